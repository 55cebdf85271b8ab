"""Build the training step of a configuration, and a state of a model that fits it, laid out for it."""

import jax
import jax.numpy as jnp

from moezoo.config.build import blueprint_on
from moezoo.config.settings import TrainConfig
from moezoo.config.sizes import check_arrays
from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.config import differing_settings
from moezoo.optim import Optimizer
from moezoo.parallel.axes import is_stored, parameter_table
from moezoo.parallel.execution import Execution
from moezoo.parallel.memory import local_bytes
from moezoo.parallel.mesh_execution import on_mesh, place
from moezoo.training.initial import load_initial
from moezoo.training.step import State, Step
from moezoo.typed import show


def build_model_on_mesh(blueprint: Blueprint, execution: Execution, seed: int) -> LanguageModel:
    """Return a fresh model, created in its layout: no device ever holds more than its part. The seed decides values."""
    here = on_mesh(execution)
    target = here.target
    # Every array has random bits of its own, which XLA's CPU compiler spends seconds on. They are computed once.
    quick = {"xla_backend_optimization_level": 1} if target and target.platform == "cpu" else None
    make = jax.jit(blueprint.make, out_shardings=here.shardings(blueprint.shapes), compiler_options=quick)
    return make(jax.random.key(seed))


def build_step(cfg: TrainConfig, execution: Execution, blueprint: Blueprint | None = None) -> Step:
    """Return the step of a run, not compiled yet.

    Args:
        cfg: The configuration of the run.
        execution: How to run the model.
        blueprint: The blueprint in place of `blueprint_of(cfg)`, such as one with containers.

    Raises:
        UserError: Parameters, gradients and the optimiser's state alone exceed the memory of the mesh's devices. The
            blueprint is of another configuration or dtype than `cfg`. A pattern matches nothing, or what cannot be
            trained, or nothing is trained.
    """
    blueprint, here = blueprint_on(cfg, execution, blueprint), on_mesh(execution)
    shapes = blueprint.shapes
    # Where `epochs` are not steps yet nothing is trained: a plan has the same program, with other numbers in it.
    optimizer = Optimizer(cfg.optimizer, cfg.schedule, cfg.steps or 0, here.placements(shapes))
    count = cfg.micro_batches
    tokens = jax.ShapeDtypeStruct((count, cfg.batch_size // count, cfg.seq_len), jnp.int32)
    step = Step(blueprint, optimizer, here, Batch(*(tokens,) * 4), cfg.guard, cfg.seed)
    needed = local_bytes(step.arguments[0], step.placements) + step.memory["gradients"]
    check_arrays(cfg, shapes, needed, here, "gradients", "optimizer state")
    return step


def build_state(cfg: TrainConfig, execution: Execution, step: Step, model: LanguageModel | None = None) -> State:
    """Return the state before the first step, laid out as the step needs it.

    The state holds a copy of `model`. If that is None it holds the weights of `cfg.init_from`, or else a fresh model of
    the step's blueprint, from the seed.

    Raises:
        UserError: `model` has other settings, arrays, containers or dtypes than the model of the step. `cfg.init_from`
            is missing, damaged, or not what `cfg` was composed with.
    """
    if model is not None:
        check_model(model, step.arguments[0].model)
        return jax.jit(step.begin, out_shardings=step.state_shardings)(place(model, execution))
    if cfg.init_from is None:
        model = build_model_on_mesh(step.blueprint, execution, cfg.seed)
    else:
        model = load_initial(cfg, execution)
    rest = jax.jit(lambda m: step.begin(m)[1:], out_shardings=tuple(step.state_shardings[1:]))
    return State(model, *rest(model))


def describe_difference(model: LanguageModel, expected: LanguageModel) -> str:
    """Return the settings in which `model` is not `expected`, or else the first array; empty if there is none.

    Both may be shapes. Dtypes are not compared, and a container counts as the array that it stands for.
    """
    if settings := differing_settings(model.config, "the model", expected.config):
        return settings
    ours, theirs = ({path: shape for path, _, shape in parameter_table(each)} for each in (model, expected))
    for path in dict.fromkeys((*theirs, *ours)):
        if ours.get(path) != theirs.get(path):
            here, there = (show(shapes.get(path, "absent")) for shapes in (ours, theirs))
            return f"{path} is {here} in the model, {there} by cfg.model"
    return ""


def check_model(model: LanguageModel, expected: LanguageModel) -> None:
    """Raise `UserError` unless `model` has the settings, arrays, containers and dtypes of `expected`, a step's model.

    A released folder is loaded in bfloat16 and a step has float32 unless it is configured otherwise, and steps in
    bfloat16 lose small updates.
    """
    if found := describe_difference(model, expected):
        raise UserError(
            f"the model is not that of the step: {found}; make the step with dataclasses.replace(cfg, "
            "model=model.config), or give the model that the configuration describes"
        )
    leaves = (jax.tree_util.tree_leaves_with_path(each, is_leaf=is_stored) for each in (model, expected))
    for (path, ours), (_, theirs) in zip(*leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if is_stored(ours) != is_stored(theirs) or (is_stored(ours) and type(ours) is not type(theirs)):
            here, there = (type(each).__name__ if is_stored(each) else "an array" for each in (ours, theirs))
            raise UserError(
                f"{name} is {here} in the model, {there} in the step; make both with the same blueprint.change"
            )
        here, there = ([part.shape for part in jax.tree.leaves(each)] for each in (ours, theirs))
        if here != there:  # the arrays that containers stand for are equal in shape
            raise UserError(
                f"{name} has parts of shapes {show(here)} in the model, {show(there)} in the step; make both with the "
                "same blueprint.change"
            )
        if ours.dtype != theirs.dtype:
            dtype = expected.embedding.weight.dtype  # that of choice biases is always float32
            other = f", or make the step with execution.param_dtype={ours.dtype}" * (ours.dtype != dtype)
            raise UserError(
                f"{name} is {ours.dtype} in the model, {theirs.dtype} in the step (execution.param_dtype={dtype}); "
                f'load the model with dtype="{dtype}"{other}'
            )
