"""Build the training step of a configuration, and a state that is laid out for it."""

import jax
import jax.numpy as jnp

from moezoo.config.build import blueprint_on
from moezoo.config.settings import TrainConfig
from moezoo.config.sizes import check_arrays
from moezoo.data import Batch
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.optim import Optimizer
from moezoo.parallel.execution import Execution
from moezoo.parallel.memory import local_bytes
from moezoo.parallel.mesh_execution import on_mesh, place
from moezoo.training.fit import check_model
from moezoo.training.initial import load_initial
from moezoo.training.step import State, Step


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
