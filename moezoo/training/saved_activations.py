"""The bytes that layers save for their backward pass."""

from collections.abc import Iterator
from typing import Any

import jax

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.working_set import stream
from moezoo.parallel.axes import Stack
from moezoo.parallel.traces import Equation, equations
from moezoo.training.step import Step


def saved_bytes(step: Step) -> tuple[int, ...]:
    """Return the bytes on one device that the scan over each stack stacks for the backward pass, of one micro-step.

    With `full` and `offload` it is a layer's input, which `offload` keeps on the host, and its routing sums. With
    `dots` and `none` it depends on every operation and kernel of a layer, so the step is traced. With stages it is what
    the parts of a pass stack: the stacks before the one that is piped, its ticks, and all layers after them.
    """
    if step.execution.remat in ("dots", "none"):
        return traced_bytes(step)
    stacks, execution = step.blueprint.shapes.stacks, step.execution
    each = [_of_period(step, stack) for stack in stacks]
    if (piped := execution.piped(step.blueprint.shapes)) is None or execution.pipeline is None:
        return tuple(stack.count * sum(one) for stack, one in zip(stacks, each, strict=True))
    own, ticks = execution.micro_batches // execution.stages, execution.pipeline.ticks(execution.stages)
    whole = [own * stack.count * sum(one) for stack, one in zip(stacks, each, strict=True)]
    input, sums = each[piped.stack]
    in_ticks = ticks * (input // len(stacks[piped.stack].blocks) + piped.depth * sums)
    rest = own * (stacks[piped.stack].count - piped.periods) * (input + sums)
    before, after = sum(whole[: piped.stack]), rest + sum(whole[piped.stack + 1 :])
    return (*([before] if before else []), in_ticks, *([after] if after else []))


def tick_bytes(step: Step) -> int:
    """Return the bytes on one device that the layers of one tick save when the backward pass runs the tick again.

    Raises:
        UserError: It cannot be read from the traced step.
    """
    execution, stacks = step.execution, step.blueprint.shapes.stacks
    piped = execution.piped(step.blueprint.shapes)
    assert piped is not None
    if execution.remat not in ("dots", "none"):
        return piped.depth * _of_period(step, stacks[piped.stack])[0]
    again = (one for one in _scans(step, "recomputed") if one.equation.params["length"] == piped.depth)
    if not (found := [_on_device(one) for one in again]):
        raise UserError(
            f"the memory of execution.remat={execution.remat} in stages of one layer is not modelled; "
            "choose execution.remat=full or other mesh.stage"
        )
    return max(found)


def _of_period(step: Step, stack: Stack) -> tuple[int, int]:
    """Return what one period of layers saves of one micro-batch: inputs on the device, and routing sums."""
    _, rows, length = step.arguments[1].tokens.shape
    execution = step.execution
    rows, length = rows // execution.ways(execution.batch_axes), length // execution.ways(execution.sequence_axes)

    def sums(block: Block) -> int:
        # Loads and sums of probabilities of each row, its tokens, a loss and the dropped assignments: 4 bytes each.
        return 0 if block.moe is None else 4 * (rows * (2 * block.moe.router.weight.shape[-1] + 1) + 2)

    width = stack.blocks[0].attention_norm.scale.shape[-1]
    input = len(stack.blocks) * stream(rows * length, width, execution)
    return input * (execution.remat == "full"), sum(map(sums, stack.blocks))


def traced_bytes(step: Step) -> tuple[int, ...]:
    """Return the same of the traced step: what the scans over layers of the forward pass stack on the device."""
    stacks, found, execution = step.blueprint.shapes.stacks, list[int](), step.execution
    if execution.pipeline is not None and execution.piped(step.blueprint.shapes) is not None:
        outer = list[Equation]()
        for each in _scans(step, "forward"):
            if not (outer and each.path.startswith(f"{outer[-1].path}/")):  # a scan inside of the one before
                outer.append(each)
        if execution.pipeline.gather == "once":
            # The scan before that of the ticks gathers weights.
            lengths, ticks = (
                [one.equation.params["length"] for one in outer],
                execution.pipeline.ticks(execution.stages),
            )
            carries = [len(_stacked(one)) < len(one.equation.outvars) for one in outer]
            del outer[next(n for n, one in enumerate(zip(lengths, carries, strict=True)) if one == (ticks, True)) - 1]
        return tuple(map(_on_device, outer))
    for each in _scans(step, "forward"):
        if _stacked(each) and each.equation.params["length"] == stacks[len(found)].count:
            found.append(_on_device(each))
    assert len(found) == len(stacks)
    return tuple(found)


def _scans(step: Step, phase: str) -> Iterator[Equation]:
    for each in equations(step.traced.jaxpr):
        if each.equation.primitive.name == "scan" and (each.scope, each.phase) == ("layers", phase):
            yield each


def _stacked(each: Equation) -> list[Any]:
    """Return the arrays that a scan stacks."""
    # They have a dimension more outside than inside; its other results are carried.
    inside: list[Any] = each.equation.params["jaxpr"].out_avals
    outside: list[Any] = [x.aval for x in each.equation.outvars]
    return [x for x, one in zip(outside, inside, strict=True) if x.ndim > one.ndim]


def _on_device(each: Equation) -> int:
    """Return the bytes of these that are not in the host's memory."""
    return sum(x.size * x.dtype.itemsize for x in _stacked(each) if x.memory_space != jax.memory.Space.Host)
