"""The oracle for families of grouped-query attention against transformers, in float64: the loss and every gradient."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from oracle_grouped import Grouped, clamped_swiglu, with_experts
from oracle_rope import Rope
from oracle_router import softmax

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")

VOCAB, EMBED, HEADS, KV_HEADS, SIZE, EXPERTS, ROWS, LENGTH = 30, 16, 4, 2, 8, 8, 2, 9

_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": 2}
_COMMON |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_experts_per_tok": 3}
_PLAIN = {"rope_type": "default", "rope_theta": 100.0}
# Of four pairs, two keep their frequencies, one is on the ramp, one is slowed.
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
_YARN |= {"beta_fast": 2.0, "beta_slow": 0.5}


def mixtral(**changes: Any) -> Any:
    """Return the configuration of a tiny Mixtral."""
    sizes = {"intermediate_size": 12, "head_dim": SIZE, "num_local_experts": EXPERTS, "rope_parameters": _PLAIN}
    return transformers.MixtralConfig(**{**_COMMON, **sizes, "sliding_window": None, **changes})


def qwen3(**changes: Any) -> Any:
    """Return the configuration of a tiny Qwen3-MoE."""
    sizes = {"intermediate_size": 20, "moe_intermediate_size": 12, "head_dim": SIZE, "num_experts": EXPERTS}
    sizes |= {"sliding_window": 3}  # counts only with `use_sliding_window`
    return transformers.Qwen3MoeConfig(**{**_COMMON, **sizes, "rope_parameters": _PLAIN, **changes})


def olmoe(**changes: Any) -> Any:
    """Return the configuration of a tiny OLMoE, whose head size follows from the others."""
    sizes = {"intermediate_size": 12, "num_experts": EXPERTS, "rope_parameters": _PLAIN}
    return transformers.OlmoeConfig(**{**_COMMON, **sizes, **changes})


def gpt_oss(**changes: Any) -> Any:
    """Return the configuration of a tiny gpt-oss that clamps some numbers in its experts."""
    sizes = {"intermediate_size": 12, "head_dim": SIZE, "num_local_experts": EXPERTS, "sliding_window": 3}
    sizes |= {"swiglu_limit": 2.0, "rope_parameters": _YARN | {"truncate": False}}
    return transformers.GptOssConfig(**{**_COMMON, **sizes, **changes})


CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: mixtral(sliding_window=3),
    "qwen3": lambda: qwen3(norm_topk_prob=True, rms_norm_eps=0.01),
    "qwen3 layers": lambda: qwen3(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1], attention_bias=True),
    "qwen3 middle layer": lambda: qwen3(num_hidden_layers=3, mlp_only_layers=[1], use_sliding_window=True),
    "qwen3 yarn": lambda: qwen3(rope_parameters=_YARN, attention_bias=True, num_key_value_heads=1),
    "qwen3 yarn mscales": lambda: qwen3(rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    "olmoe": lambda: olmoe(norm_topk_prob=True, rms_norm_eps=0.01),
    "olmoe clip": lambda: olmoe(clip_qkv=0.9, num_key_value_heads=1),
    "gpt_oss": lambda: gpt_oss(num_hidden_layers=3),
    "gpt_oss other layers": lambda: gpt_oss(
        layer_types=["full_attention", "sliding_attention"],
        attention_bias=False,
        swiglu_alpha=0.8,
        num_key_value_heads=1,
    ),
    "olmoe clip renormalised": lambda: olmoe(clip_qkv=0.9, num_key_value_heads=4, norm_topk_prob=True),
}


class Wide(torch.overrides.TorchFunctionMode):
    """Replace float32 by float64: transformers asks for float32 by name in norms, softmax and rotation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        widened = [torch.float64 if x is torch.float32 else x for x in args]
        named = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*widened, **named)


@contextmanager
def in_float64() -> Iterator[None]:
    """Run transformers in float64, without its warnings."""
    with warnings.catch_warnings(), Wide():
        warnings.simplefilter("ignore")
        yield


def build(config: Any) -> Any:
    """Return transformers' model with every array random; norms are not one and biases are not zero."""
    with in_float64():
        kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
        theirs = transformers.AutoModelForCausalLM.from_config(config, **kinds).double()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            start = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.tensor(start + 0.4 * rng.standard_normal(parameter.shape)))
    return theirs


def family_of(config: Any) -> Grouped:
    """Return the oracle's settings for a configuration."""
    c, rope = config, config.rope_parameters
    yarn = {}
    if rope["rope_type"] == "yarn":
        yarn = {"factor": rope["factor"], "length": rope["original_max_position_embeddings"]}
        yarn |= {"beta_fast": rope["beta_fast"], "beta_slow": rope["beta_slow"]}
        yarn |= {"truncate": rope.get("truncate", True)}
        yarn |= {"mscale": rope.get("mscale", 0.0), "mscale_all": rope.get("mscale_all_dim", 0.0)}
    different: dict[str, Any] = {}
    if c.model_type == "gpt_oss":
        different = {"full": [i for i, kind in enumerate(c.layer_types) if kind == "full_attention"]}
        different["activation"] = clamped_swiglu(c.swiglu_alpha, c.swiglu_limit)
    return Grouped(
        **different,
        experts_per_token=c.num_experts_per_tok,
        sparse=with_experts(
            c.num_hidden_layers, getattr(c, "decoder_sparse_step", 1), getattr(c, "mlp_only_layers", ())
        ),
        rope=Rope(rope["rope_theta"], **yarn),
        norm_eps=c.rms_norm_eps,
        choice=softmax(c.model_type in ("mixtral", "gpt_oss") or c.norm_topk_prob),
        window=getattr(c, "sliding_window", None),
        clip=getattr(c, "clip_qkv", None),
        losses=oracle.Losses(0.0, 0.0, "batch"),
    )


class Entry(NamedTuple):
    """An array of the oracle: its name, and the function that cuts it from a parameter of transformers."""

    name: str
    cut: Callable[[np.ndarray], np.ndarray]


def turned(w: np.ndarray) -> np.ndarray:
    """Return matrices with inputs first, or the other way around."""
    return w.swapaxes(-1, -2)


def oracle_entries(config: Any) -> dict[str, list[Entry]]:
    """Return the oracle's entries by the names of a layer's parameters in transformers."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", EMBED // heads)

    def projection(name: str, at: str, count: int) -> dict[str, list[Entry]]:
        return {
            f"self_attn.{at}_proj.weight": [Entry(name, lambda w: w.T.reshape(EMBED, count, size))],
            f"self_attn.{at}_proj.bias": [Entry(f"{name}_bias", lambda b: b.reshape(count, size))],
            f"self_attn.{at}_norm.weight": [Entry(f"{name}_norm", np.copy)],
        }

    attention = projection("query", "q", heads) | projection("key", "k", kv_heads) | projection("value", "v", kv_heads)
    attention |= _gpt_oss_entries() if config.model_type == "gpt_oss" else _other_entries()
    return attention | {
        "self_attn.o_proj.weight": [Entry("out", lambda w: w.T.reshape(heads, size, EMBED))],
        "self_attn.o_proj.bias": [Entry("out_bias", np.copy)],
        "input_layernorm.weight": [Entry("attention_norm", np.copy)],
        "post_attention_layernorm.weight": [Entry("feed_forward_norm", np.copy)],
        "mlp.gate_proj.weight": [Entry("dense_gate", turned)],
        "mlp.up_proj.weight": [Entry("dense_up", turned)],
        "mlp.down_proj.weight": [Entry("dense_down", turned)],
    }


def _other_entries() -> dict[str, list[Entry]]:
    """Return the entries of router and experts where transformers joins the rows of gate and up."""
    return {
        "mlp.gate.weight": [Entry("router", turned)],
        "mlp.experts.gate_up_proj": [
            Entry("gate", lambda w: turned(w[:, : w.shape[1] // 2])),
            Entry("up", lambda w: turned(w[:, w.shape[1] // 2 :])),
        ],
        "mlp.experts.down_proj": [Entry("down", turned)],
    }


def _gpt_oss_entries() -> dict[str, list[Entry]]:
    """Return the entries of sinks, router and experts of gpt-oss: gate and up are at even and at odd places."""
    even, odd = (lambda w: w[..., ::2]), (lambda w: w[..., 1::2])
    return {
        "self_attn.sinks": [Entry("sinks", np.copy)],
        "mlp.router.weight": [Entry("router", turned)],
        "mlp.router.bias": [Entry("router_bias", np.copy)],
        "mlp.experts.gate_up_proj": [Entry("gate", even), Entry("up", odd)],
        "mlp.experts.gate_up_proj_bias": [Entry("gate_bias", even), Entry("up_bias", odd)],
        "mlp.experts.down_proj": [Entry("down", np.copy)],
        "mlp.experts.down_proj_bias": [Entry("down_bias", np.copy)],
    }


def to_oracle(config: Any, arrays: dict[str, np.ndarray]) -> oracle.Parameters:
    """Return the oracle's parameters from arrays by their names in transformers; none is left over."""
    whole = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm"}
    entries, layers, found = oracle_entries(config), {}, {}
    for name, array in arrays.items():
        if name in whole:
            found[whole[name]] = array
        elif name == "lm_head.weight":
            found["unembedding"] = array.T
        else:
            # The name after `model.layers.N.`; parameters come in the order of the layers.
            for entry in entries[name.split(".", 3)[3]]:
                layers.setdefault(entry.name, []).append(entry.cut(array))
    return found | {name: np.stack(parts) for name, parts in layers.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients(name):
    config = CONFIGS[name]()
    theirs, family = build(config), family_of(config)
    tokens = np.random.default_rng(2).integers(1, VOCAB, (ROWS, LENGTH))
    ids = torch.tensor(tokens)
    with in_float64():
        logits = theirs(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    assert logits.dtype == torch.float64

    labels = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)
    batch = {"tokens": tokens, "labels": labels, "segments": np.ones_like(tokens), "positions": positions}
    parameters = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    outcome = oracle.differentiate(to_oracle(config, parameters), batch, 1, family)
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-12)
    wanted = to_oracle(config, {n: p.grad.numpy() for n, p in theirs.named_parameters()})
    assert set(wanted) == set(outcome.gradients)
    for array, gradient in wanted.items():
        scale = abs(gradient).max()
        assert scale > 1e-3, array
        assert abs(outcome.gradients[array] - gradient).max() < 1e-12 * scale, array
