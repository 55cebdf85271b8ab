"""Both families against transformers, on random tiny models: logits, loss, every gradient, and folders both ways."""

import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moezoo
from moezoo.hub import arrays_by_path, tensors
from moezoo.models import FAMILIES, DeepSeekConfig, MixtralConfig

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")

SMALL: dict[str, Any] = {"vocab": 40, "embed": 16, "heads": 4, "expert_mlp": 12, "experts": 8, "experts_per_token": 2}
# A short original length, so that the ramp between kept and slowed frequencies falls within these few pairs.
YARN: dict[str, Any] = {"yarn_factor": 4.0, "yarn_length": 64, "yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5}


def mixtral(**changes: Any) -> MixtralConfig:
    """A tiny Mixtral."""
    return MixtralConfig(**{**SMALL, "layers": 2, "kv_heads": 2, "head_dim": 8, "rope_base": 100.0, **changes})


def third(**changes: Any) -> DeepSeekConfig:
    """A tiny DeepSeek-V3."""
    sizes: dict[str, Any] = {"q_lora": 6, "kv_lora": 5, "nope_dim": 6, "rope_dim": 8, "value_dim": 7, "mlp": 20}
    return DeepSeekConfig(**{**SMALL, **sizes, "layers": 2, **changes})


def second(**changes: Any) -> DeepSeekConfig:
    """A tiny DeepSeek-V2; transformers' needs an even offset to the rotated part of its latent."""
    router: dict[str, Any] = {"score": "softmax", "expert_weights": "scores", "choice_bias": "none"}
    router |= {"group_score": "max", "groups": 1, "kept_groups": 1, "expert_scale": 1.0}
    return third(**{"kv_lora": 4, **router, **changes})


CONFIGS = {
    "mixtral": mixtral(),
    "mixtral window": mixtral(window=5),
    "mixtral all experts": mixtral(experts_per_token=8),
    "v3": third(**YARN),
    "v3 two mscales": third(**YARN, yarn_mscale=0.7, yarn_mscale_all=1.3),
    "v3 no mscale": third(**YARN, yarn_mscale=0.0, yarn_mscale_all=0.0),
    "v3 plain": third(q_lora=None, groups=1, kept_groups=1, expert_weights="scores", rope_pairs="halves"),
    "v3 two dense": third(layers=3, dense_layers=2, shared_experts=2),
    "v3 none dense": third(dense_layers=0),
    "v3 all experts": third(experts_per_token=8, kept_groups=4),
    "v2": second(),
    "v2 groups": second(**YARN, groups=4, kept_groups=2, expert_scale=16.0),
    "v2 lite": second(**YARN, q_lora=None, yarn_mscale=0.707, yarn_mscale_all=0.707, shared_experts=2),
}
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 16)).astype(np.int32)


def random_model(config):
    """A model whose every array is random: norms are not one, biases not zero."""
    model = moezoo.build(config, key=jax.random.key(1))
    rng = np.random.default_rng(2)
    leaves, structure = jax.tree.flatten(model)
    noisy = [np.asarray(x) + (0.1 + 0.1 * (x.ndim < 3)) * rng.standard_normal(x.shape, np.float32) for x in leaves]
    return jax.tree.unflatten(structure, [jnp.asarray(x) for x in noisy])


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """Our model, and what transformers makes of the folder we write."""
    model = random_model(CONFIGS[request.param])
    folder = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not told[kind], kind
    return model, theirs, folder


def mapped(tree, family):
    """A tree in our model's shape as tensors by their names in a folder."""
    arrays = arrays_by_path(tree)
    return {
        t.name: t.to_file([np.asarray(arrays[p][i]) for p, i in t.parts])
        for t in tensors(tree, family.hub)
        if t.parts[0][0] in arrays
    }


def of_transformers(theirs, names):
    """Gradients by the names on disk: in memory experts are joined."""
    found = {}
    for name, parameter in theirs.named_parameters():
        gradient = parameter.grad.numpy()
        if name.endswith("experts.gate_up_proj"):
            half = gradient.shape[1] // 2
            gate, up = ("w1", "w3") if "block_sparse_moe" in names else ("gate_proj", "up_proj")
            for e, one in enumerate(gradient):
                found[name.replace("gate_up_proj", f"{e}.{gate}.weight")] = one[:half]
                found[name.replace("gate_up_proj", f"{e}.{up}.weight")] = one[half:]
        elif name.endswith("experts.down_proj"):
            down = "w2" if "block_sparse_moe" in names else "down_proj"
            found |= {
                name.replace("experts.down_proj", f"experts.{e}.{down}.weight"): g for e, g in enumerate(gradient)
            }
        else:
            found[name] = gradient
    if "block_sparse_moe" in names:
        found = {name.replace(".mlp.", ".block_sparse_moe."): g for name, g in found.items()}
    return found


def test_logits_loss_and_gradients(case):
    model, theirs, _ = case
    family = next(f for f in FAMILIES.values() if isinstance(model, f.model))

    def loss(model):
        logits = model(TOKENS).logits[:, :-1]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(TOKENS[:, 1:, None]), axis=-1)
        return -picked.mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(model)
    ids = torch.tensor(TOKENS.astype(np.int64))
    out = theirs(ids, labels=ids)
    out.loss.backward()
    np.testing.assert_allclose(model(TOKENS).logits, out.logits.detach().numpy(), rtol=0, atol=1e-4)
    assert float(value) == pytest.approx(out.loss.item(), abs=1e-5)

    ours = mapped(gradients, family)
    found = of_transformers(theirs, " ".join(ours))
    ours = {name: g for name, g in ours.items() if not name.endswith("e_score_correction_bias")}
    assert set(found) == set(ours)
    for name, gradient in ours.items():
        scale = np.abs(found[name]).max()
        # Float32 on both sides, some thousand roundings.
        np.testing.assert_allclose(gradient, found[name], rtol=0, atol=1e-4 * scale + 1e-7, err_msg=name)


def test_round_trip_is_bit_equal(case):
    model, _, folder = case
    again = moezoo.from_pretrained(folder)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_reads_what_transformers_writes(case, tmp_path):
    model, theirs, _ = case
    theirs.save_pretrained(tmp_path / "theirs")
    assert "rope_parameters" in json.loads((tmp_path / "theirs" / "config.json").read_text())
    again = moezoo.from_pretrained(tmp_path / "theirs")
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
