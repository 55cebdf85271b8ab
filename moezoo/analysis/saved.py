"""The bytes that each stack of layers saves for its backward pass."""

from typing import Any

import jax

from moezoo.models.block import Block
from moezoo.models.working_set import stream
from moezoo.parallel.traces import equations
from moezoo.training.step import Step


def saved_bytes(step: Step) -> tuple[int, ...]:
    """Return the bytes on one device that the scan over each stack stacks for the backward pass, of one micro-step.

    With `full` and `offload` it is a layer's input, which `offload` keeps on the host, and its routing sums. With
    `dots` and `none` it depends on every operation and kernel of a layer, so the step is traced.
    """
    if step.execution.remat in ("dots", "none"):
        return traced_bytes(step)
    _, rows, length = step.arguments[1].tokens.shape
    execution = step.execution
    rows, length = rows // execution.ways(execution.batch_axes), length // execution.ways(execution.sequence_axes)

    def one(block: Block) -> int:
        input = stream(rows * length, block.attention_norm.scale.shape[-1], execution)
        # Loads and sums of probabilities of each row, its tokens, a loss and the dropped assignments: 4 bytes each.
        sums = 0 if block.moe is None else 4 * (rows * (2 * block.moe.router.weight.shape[-1] + 1) + 2)
        return input * (execution.remat == "full") + sums

    return tuple(stack.count * sum(map(one, stack.blocks)) for stack in step.blueprint.shapes.stacks)


def traced_bytes(step: Step) -> tuple[int, ...]:
    """Return the same of the traced step: what the scans over layers of the forward pass stack on the device."""
    stacks, found = step.blueprint.shapes.stacks, list[int]()
    for each in equations(step.traced.jaxpr):
        equation = each.equation
        if equation.primitive.name != "scan" or (each.scope, each.phase) != ("layers", "forward"):
            continue
        # What a scan stacks has a dimension more outside than inside; its other results are carried.
        inside: list[Any] = equation.params["jaxpr"].out_avals
        outside: list[Any] = [x.aval for x in equation.outvars]
        stacked = [x for x, one in zip(outside, inside, strict=True) if x.ndim > one.ndim]
        if stacked and equation.params["length"] == stacks[len(found)].count:
            found.append(sum(x.size * x.dtype.itemsize for x in stacked if x.memory_space != jax.memory.Space.Host))
    assert len(found) == len(stacks)
    return tuple(found)
