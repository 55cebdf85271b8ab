"""The programs that run a model, for any mesh without its devices: a step, an evaluation, both of generation."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from moezoo.config.build import build_execution
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.generation.generate import continuation, prompt_shapes, round_up
from moezoo.generation.sampling import Sampling
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.choice import choose_dispatch
from moezoo.models.working_set import stage_weights
from moezoo.nn.cache import Cache
from moezoo.parallel.memory import local_bytes
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.traffic import CallName
from moezoo.training.build import build_step
from moezoo.training.evaluate import make_sums
from moezoo.training.loss import chunk_rows

AnyMesh = Mesh | AbstractMesh


class Call(NamedTuple):
    """A program before it is traced, and the sizes of what it computes.

    Attributes:
        execution: How it runs the model.
        rows: The sequences of one pass through the layers, over all devices; with stages over those of one.
        length: The tokens of each.
        logits: The tokens per device whose logits exist at the same time.
        cache: The shapes of the cache that it reads; None without one.
        memory: What a device holds besides activations and the cache -> the bytes of it.
        trace: A function that returns the traced program.
    """

    execution: MeshExecution
    rows: int
    length: int
    logits: int
    cache: Cache | None
    memory: Mapping[str, int]
    trace: Callable[[], "jax.stages.Traced"]

    @property
    def local_tokens(self) -> tuple[int, int]:
        """The sequences per device, and the tokens of each that it has."""
        execution = self.execution
        return self.rows // execution.ways(execution.batch_axes), self.length // execution.ways(execution.sequence_axes)


def _parameters(model: LanguageModel, execution: MeshExecution) -> dict[str, int]:
    return {"parameters": local_bytes(model, execution.placements(model))}


def _local_vocab(cfg: TrainConfig, execution: MeshExecution) -> int:
    return cfg.model.vocab // execution.inner_group("vocab").size


def _train(cfg: TrainConfig, blueprint: Blueprint, mesh: AnyMesh | None = None) -> Call:
    rows = cfg.batch_size // cfg.micro_batches
    execution = on_mesh(build_execution(cfg, mesh or abstract_mesh(cfg.mesh)))
    execution = choose_dispatch(blueprint.shapes.stacks, rows, cfg.seq_len, execution, "train", blueprint.mask)
    tokens = execution.micro_batches * rows * cfg.seq_len // execution.ways(execution.token_axes)
    logits = chunk_rows(tokens, _local_vocab(cfg, execution), execution.target)
    step = build_step(cfg, execution, blueprint)
    memory = step.memory | dict(stage_weights(blueprint.shapes, blueprint.mask, execution))
    return Call(execution, rows, cfg.seq_len, logits, None, memory, lambda: step.traced)


def _evaluate(cfg: TrainConfig, blueprint: Blueprint, mesh: AnyMesh | None = None) -> Call:
    model, execution = blueprint.shapes, on_mesh(build_execution(cfg, mesh or abstract_mesh(cfg.mesh)).exact)
    rows = cfg.batch_size // execution.micro_batches
    execution = choose_dispatch(model.stacks, rows, cfg.seq_len, execution, "evaluate")
    tokens = jax.ShapeDtypeStruct((execution.micro_batches, rows, cfg.seq_len), jnp.int32)
    own = tokens.size // execution.ways(execution.token_axes)
    logits = chunk_rows(own, _local_vocab(cfg, execution), execution.target)
    batch: Any = Batch(*(tokens,) * 4)
    trace = lambda: make_sums(model, execution).trace(model, batch)  # noqa: E731
    memory = _parameters(model, execution) | dict(stage_weights(model, None, execution))
    return Call(execution, rows, cfg.seq_len, logits, None, memory, trace)


def _prefill(cfg: TrainConfig, blueprint: Blueprint, mesh: AnyMesh | None = None) -> Call:
    made = _generation(cfg, blueprint.shapes, mesh)
    trace = lambda: jax.jit(made.begin).trace(*made.arguments)  # noqa: E731
    local = cfg.batch_size // made.prefill.ways(made.prefill.batch_axes)
    memory = _parameters(blueprint.shapes, made.prefill)
    return Call(made.prefill, cfg.batch_size, round_up(cfg.seq_len), local, None, memory, trace)


def _decode(cfg: TrainConfig, blueprint: Blueprint, mesh: AnyMesh | None = None) -> Call:
    made = _generation(cfg, blueprint.shapes, mesh)
    now = eqx.filter_eval_shape(made.begin, *made.arguments)
    trace = lambda: jax.jit(made.advance).trace(*made.arguments, now)  # noqa: E731
    local = cfg.batch_size // made.decode.ways(made.decode.batch_axes)
    memory = _parameters(blueprint.shapes, made.decode)
    return Call(made.decode, cfg.batch_size, 1, local, now.cache, memory, trace)


class _Generation(NamedTuple):
    prefill: MeshExecution
    decode: MeshExecution
    begin: Callable[..., Any]
    advance: Callable[..., Any]
    arguments: tuple[PyTree, ...]


def _generation(cfg: TrainConfig, model: LanguageModel, mesh: AnyMesh | None) -> _Generation:
    """Return both programs of `generate` for prompts of `seq_len` tokens, `batch_size` of them, and a token more."""
    if cfg.seq_len >= (limit := cfg.model.longest).tokens:
        raise UserError(
            f"seq_len={cfg.seq_len}: a prompt of so many tokens and one new token exceed {limit}; "
            f"choose at most {limit.tokens - 1}"
        )
    execution = build_execution(cfg, mesh or abstract_mesh(cfg.mesh), batches="any")
    execution = on_mesh(execution.exact.in_turn).for_rows(cfg.batch_size)
    how = continuation(model, cfg.seq_len, round_up(1), Sampling(), execution, rows=cfg.batch_size)
    programs, prompts = how.programs(model), prompt_shapes(cfg.batch_size, cfg.seq_len)
    return _Generation(how.prefill, how.decode, programs.begin, programs.advance, (model, prompts))


# (configuration, blueprint, mesh in place of one without devices) -> the program
CALLS: dict[CallName, Callable[..., Call]] = {
    "train": _train,
    "evaluate": _evaluate,
    "prefill": _prefill,
    "decode": _decode,
}
