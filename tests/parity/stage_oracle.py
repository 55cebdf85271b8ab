"""What pipeline stages hand on in a training step, by the documentation: an oracle for the traced program.

Written from docs/pipeline.md, "What it costs". With S stages, v chunks, M micro-batches in each of P passes, k layers
of a chunk, and t tokens of a micro-batch on a device, a pass has T = v M + S - 1 ticks. As `traffic_oracle`, of which
it uses the layout of parameters inside of a stage, it imports nothing of moezoo that issues or counts a collective.
"""

import dataclasses
from collections import Counter
from typing import Any

from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path
from traffic_oracle import FLOAT32, INT32, WIDTHS, MeshAxes, Run, place, received, weights

from moezoo.parallel.axes import axes_of

# (collective, mesh axes) -> (count, bytes received).
Moved = dict[tuple[str, MeshAxes], tuple[int, int]]
STAGE = ("stage",)


def stage_traffic(config: Any, model: Any) -> Moved:
    """Return all collectives over `stage` alone, and those that gather weights inside of stages.

    Args:
        config: The training run. Its strategy moves tokens, its rules are `fsdp_ep`, and sequences are whole.
        model: The shapes of its model.
    """
    order, stages, passes = config.execution.pipeline, config.mesh.stage, config.execution.microbatches
    chunks, micro_batches = order.chunks, order.microbatches
    ticks, own = chunks * micro_batches + stages - 1, micro_batches // stages
    one_stage = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, stage=1))
    whole, inside = Run(config, config.dispatch), Run(one_stage, config.dispatch)
    tokens = config.batch_size // (passes * micro_batches) // inside.ways(inside.batch) * config.seq_len
    found: Counter[tuple[str, MeshAxes]] = Counter()
    size: Counter[tuple[str, MeshAxes]] = Counter()

    def book(collective: str, axes: MeshAxes, given: int, times: int) -> None:
        ways = stages if axes == STAGE else inside.ways(axes)
        found[collective, axes] += passes * times
        size[collective, axes] += passes * times * received(collective, given, ways)

    # A result to the next stage and two streams to the one before, forward and backward.
    book("ppermute", STAGE, tokens * model.config.embed * whole.width, 2 * 3 * ticks)
    book("all_gather", STAGE, own * tokens * INT32, 2)  # positions and segments of all micro-batches
    experts, stacks = model.config.experts, model.stacks
    layers = sum(stack.count for stack in stacks for block in stack.blocks if hasattr(block.feed_forward, "router"))
    for numbers in (experts, 1, 1, 1):  # assignments and dropped ones, two losses
        book("psum", STAGE, layers * numbers * FLOAT32, 1)
    lengths = [stack.count * len(stack.blocks) for stack in stacks]
    piped = lengths.index(max(lengths))
    depth = stacks[piped].count // (stages * chunks)
    by_layer = chunks == 1 and stacks[piped].count == stages * depth
    leaves, declared = tree_leaves_with_path(stacks[piped]), tree_leaves(axes_of(stacks[piped]))
    for (path, leaf), axes in zip(leaves, declared, strict=True):
        array = place(whole, keystr(path), axes, leaf, None)
        if not by_layer and "stage" in array.mesh_axes:  # to the stage that runs it, and its gradient back
            given = stages * chunks * depth * array.local * WIDTHS[config.execution.param_dtype]
            book("all_to_all", STAGE, given, 2)
    # Once per pass, or in every tick: forward, when the tick runs again, and for the gradients of its layers.
    once = order.gather == "once"
    times = {"F": 1, "R": 0 if once else 2, "B": 1}
    runs = chunks * depth if once else ticks * depth

    def gather(phases: str, collective: str, axes: MeshAxes, numbers: int, width: int) -> None:
        if axes:
            book(collective, axes, numbers * width, runs * sum(times[phase] for phase in phases))

    weights(gather, inside, [place(inside, keystr(p), a, x, None) for (p, x), a in zip(leaves, declared, strict=True)])
    return {key: (count, size[key]) for key, count in found.items() if count}
