"""A state is made only of a model that the step and its configuration describe."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import moezoo
from moezoo.config.build import blueprint_of, build_execution
from moezoo.models import DeepSeekConfig
from moezoo.nn.containers import store
from moezoo.training.build import build_state, build_step

# Its layers with experts have choice biases.
CONFIG = DeepSeekConfig(
    vocab=24, embed=8, layers=2, heads=2, q_lora=4, kv_lora=4, nope_dim=4, rope_dim=2, value_dim=4, mlp=6, expert_mlp=6
)
BIAS = ".stacks[1].blocks[0].feed_forward.router.choice_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder in bfloat16, as released ones are."""
    path = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(moezoo.build_model(CONFIG, key=jax.random.key(0), dtype="bfloat16"), path)
    return path


def prepare(config, *overrides):
    """Return a configuration of the folder's model, how it runs, and its step."""
    cfg = moezoo.compose("mesh=single", "dispatch=gather", "batch_size=2", "seq_len=4", *overrides)
    cfg = dataclasses.replace(cfg, model=config)
    execution = build_execution(cfg)
    return cfg, execution, build_step(cfg, execution)


def test_the_dtype_of_a_folder_and_of_the_configuration(folder):
    """Either is refused with the other; both ways out that the message names work."""
    model = moezoo.from_pretrained(folder)
    wide = prepare(model.config)
    ways = ('dtype="float32"', "execution.param_dtype=bfloat16")
    with refused(".", "bfloat16 in the model, float32 in the step", "execution.param_dtype=float32", *ways):
        build_state(*wide, model)
    narrow = prepare(model.config, "execution.param_dtype=bfloat16")
    for prepared, given in ((wide, moezoo.from_pretrained(folder, dtype="float32")), (narrow, model)):
        state = build_state(*prepared, given)
        for one, other in zip(jax.tree.leaves(state.model), jax.tree.leaves(given), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    dtypes = {jax.tree_util.keystr(path): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(state.model)}
    assert {path for path, dtype in dtypes.items() if dtype != jnp.bfloat16} == {BIAS}
    all_of_it = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    with refused(f"{BIAS} is bfloat16 in the model, float32 in the step", 'dtype="bfloat16"'):
        build_state(*narrow, all_of_it)


def test_containers_keep_their_dtypes(folder):
    """8-bit values and their scales are those of the step, but they must stand for an array of its dtype."""

    def change(model):
        return store(model, lambda path: ".experts." in path)

    cfg, execution, plain = prepare(CONFIG)
    step = build_step(cfg, execution, dataclasses.replace(blueprint_of(cfg), change=change))
    model = moezoo.from_pretrained(folder, dtype="float32")
    state = build_state(cfg, execution, step, change(model))
    assert state.model.stacks[1].blocks[0].feed_forward.experts.gate.values.dtype == jnp.int8
    for prepared, given in ((step, model), (plain, change(model))):
        with refused(".", "an array", "blueprint.change"):
            build_state(cfg, execution, prepared, given)
    with refused(".", "bfloat16 in the model, float32 in the step"):
        build_state(cfg, execution, step, change(moezoo.from_pretrained(folder)))


def test_another_model_than_that_of_the_step(folder):
    model = moezoo.from_pretrained(folder, dtype="float32")
    prepared = prepare(dataclasses.replace(model.config, embed=16))
    with refused(
        "the model is ", "model.embed=8 in the model, 16 in cfg", "dataclasses.replace(cfg, model=model.config)"
    ):
        build_state(*prepared, model)
    prepared = prepare(model.config)
    wider = eqx.tree_at(lambda m: m.embedding.weight, model, jnp.zeros((25, 8)))
    with refused("the model is ", ".embedding.weight is [25, 8] in the model, [24, 8] by cfg.model"):
        build_state(*prepared, wider)
