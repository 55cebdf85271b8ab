"""The memory model of all programs, for any mesh without its devices: that of a step, and of those without gradients.

`moezoo.training.step_memory` has what a step holds, and the words. docs/planning.md lists the terms, and how far they
are from what compilers reserve.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.config.build import blueprint_on, build_execution
from moezoo.config.settings import TrainConfig
from moezoo.generation.generate import round_up
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.layer_memory import held_in, layer_loops
from moezoo.models.working_set import Term, stage_weights, stream, weights_of
from moezoo.nn.cache import Kept
from moezoo.parallel.kernels import Target, mesh_for
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.traffic import CallName
from moezoo.tools.calls import CALLS
from moezoo.training.build import build_step
from moezoo.training.step import Step
from moezoo.training.step_memory import TPU, Footprint, hoisted_bytes, least_bytes, moment_of, step_footprint


def footprint(
    cfg: TrainConfig, call: CallName = "train", *, target: Target = TPU, blueprint: Blueprint | None = None
) -> Footprint:
    """Return the memory of a program on one device of the mesh of `cfg`. No device is used and nothing is compiled.

    One layer of each kind is traced, and of other calls than `train` the program: that takes a second or a few.

    Args:
        cfg: The configuration.
        call: What runs, as for `moezoo.tools.sharding.describe.describe`.
        target: What the program is for: it decides which kernels run.
        blueprint: As in `moezoo.training.build.build_step`.

    Raises:
        UserError: The parts of the configuration do not fit together, or a mesh axis is -1.
    """
    if call == "train":
        return step_footprint(_step(cfg, target, blueprint))
    return _forward(cfg, call, target, blueprint_on(cfg, given=blueprint))


def least_footprint(cfg: TrainConfig, target: Target) -> int:
    """Return the bytes that a training step holds at least: `footprint` without a trace, in a tenth of its time."""
    return least_bytes(_step(cfg, target, None))


def _step(cfg: TrainConfig, target: Target, blueprint: Blueprint | None) -> Step:
    return build_step(cfg, build_execution(cfg, mesh_for(cfg.mesh, target)), blueprint)


def _forward(cfg: TrainConfig, call: CallName, target: Target, blueprint: Blueprint) -> Footprint:
    program, model = CALLS[call](cfg, blueprint, mesh_for(cfg.mesh, target)), blueprint.shapes
    execution, (rows, length) = program.execution, program.local_tokens
    fixed = jax.tree.map(lambda _: False, model)
    parameters = Term("parameters", program.memory["parameters"])
    held = (parameters, Term("parameters as loops read them", hoisted_bytes(model, execution)))
    own, more = execution.micro_batches // execution.stages, ()
    passing = stream(rows * length, model.config.embed, execution)
    given = [Term("batch", 4 * 4 * own * rows * length)]
    if call != "evaluate":
        given = list(_cache(model, cfg, execution, rows))
    if execution.piped(model) is not None:  # what waits, what is done, and what passes
        more = (*stage_weights(model, None, execution), Term("micro-batches of the stage", (2 * own + 1) * passing))
    vocab = model.vocab // execution.inner_group("vocab").size
    readout, moments = weights_of(model.readout, fixed.readout, execution), []
    traced = program.trace().jaxpr
    for loop in layer_loops(traced, "outside"):
        arrays = (Term(what, size) for what, size in held_in(loop, traced, target.platform).parts.items())
        moments.append(moment_of("layers", *held, *given, Term("residual stream", passing), *arrays, *more))
    logits = Term("logits", 2 * 4 * vocab * program.logits)
    moments.append(moment_of("head", *held, *given, Term("unembedding", readout.whole), logits))
    arguments = parameters.bytes + sum(term.bytes for term in given) * (call != "prefill")
    return Footprint(arguments, tuple(moments))


def _cache(model: LanguageModel, cfg: TrainConfig, execution: MeshExecution, rows: int) -> Iterator[Term]:
    """Yield what is kept of the prompts and new tokens of `CALLS`, and what has one size whatever their length."""
    found = {"cache": 0, "recurrent states": 0}
    for stack in model.stacks:
        for block in stack.blocks:
            state = block.attention.state(round_up(cfg.seq_len) + round_up(1))
            kept: Any = jax.tree.leaves(state, is_leaf=_is_kept)
            widths = (jnp.dtype(each.dtype or execution.dtype).itemsize for each in kept)
            one = sum(math.prod(_parts(each, execution)) * width for each, width in zip(kept, widths, strict=True))
            found["cache" if state.num_slots else "recurrent states"] += stack.count * rows * one
    yield from (Term(name, size) for name, size in found.items() if size)


def _is_kept(x: PyTree) -> bool:
    return isinstance(x, Kept)


def _parts(kept: Kept, execution: MeshExecution) -> Iterator[int]:
    for axis, size in kept.sizes.items():
        yield max(1, size // execution.ways(execution.rules.kept(axis, execution.sizes)))
