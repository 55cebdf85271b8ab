"""What the summary of a run says of its pipeline stages."""

from moezoo.host.machine import in_units
from moezoo.models.base import LanguageModel
from moezoo.parallel.mesh import STAGE
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.pipeline import Circular
from moezoo.parallel.traffic import TrafficTable


def stage_lines(
    execution: MeshExecution, model: LanguageModel, traffic: TrafficTable, settings: Circular | None = None
) -> list[str]:
    """Describe which layers lie where, how long stages wait, and what they hand on.

    Without stages: that `settings` of a pipeline have no effect, if there are some, or nothing.
    """
    piped, order = execution.piped(model), execution.pipeline
    if piped is None or order is None:
        return ["none: execution.pipeline has no effect with mesh.stage=1"] * (settings not in (None, Circular()))
    sizes = [stack.count * len(stack.blocks) for stack in model.stacks]
    period = len(model.stacks[piped.stack].blocks)
    before, inside = sum(sizes[: piped.stack]), piped.periods * period
    last, depth = before + inside, piped.depth * period
    each = f"{depth}" if piped.chunks == 1 else f"{piped.chunks} chunks of {depth}"
    rest = {"before": before, "after": sum(sizes) - last}
    others = " and ".join(f"{number} {where}" for where, number in rest.items() if number)
    where = f"layers {before + 1} to {last} of {sum(sizes)} in {piped.stages} stages of {each}"
    count, ticks = order.count(piped.stages), order.ticks(piped.stages)
    # The fewest that stages divide with half the share of ticks without work.
    more = -(-(2 * ticks - piped.stages + 1) // (order.chunks * piped.stages)) * piped.stages
    waits = f"{count} micro-batches in {ticks} ticks: stages have no work in {order.bubble(piped.stages):.1%} of them"
    by = {kind: each.bytes for (kind, axes), each in traffic.by("collective", "axes").items() if axes == (STAGE,)}
    moved = f", layers to their stages {in_units(by['all_to_all'])}" if "all_to_all" in by else ""
    return [
        where + f"; {others} these run whole, on the own micro-batches of every stage" * bool(others),
        f"{waits}; execution.pipeline.microbatches={more} halves that",
        f"received per device and step: activations, also of micro-batches that wait or are done, "
        f"{in_units(by.get('ppermute', 0))}{moved}",
    ]
