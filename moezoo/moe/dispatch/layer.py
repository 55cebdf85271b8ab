"""What a strategy runs, moves and holds in one layer."""

from moezoo.moe.dispatch.gather import Gather
from moezoo.moe.dispatch.replicated import Replicated
from moezoo.parallel.dispatch import Dispatch, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


def for_group(dispatch: Dispatch | None, group: ExpertGroup) -> Dispatch:
    """Return `dispatch`, by default `Gather`; where all devices of the group have the same tokens, in `Replicated`."""
    strategy = dispatch or Gather()
    return Replicated(strategy, chunks=strategy.chunks) if group.replicated else strategy


def layer_moves(dispatch: Dispatch | None, sizes: Sizes, group: ExpertGroup) -> Moves:
    """Return the collectives of `dispatch` and `combine` in a layer, summed over chunks; `sizes` are those of all."""
    strategy, moves = for_group(dispatch, group), Moves()
    for chunk in strategy.chunk_sizes(sizes.tokens) if group.axes else ():
        moves += strategy.exchanges(sizes._replace(tokens=chunk), group)
    return moves


def layer_rows(dispatch: Dispatch | None, tokens: int, k: int, group: ExpertGroup) -> int:
    """Return the rows that a device has room for in a layer, summed over chunks. Arguments as for `Dispatch.rows`."""
    strategy = for_group(dispatch, group)
    return sum(strategy.rows(chunk, k, group) for chunk in strategy.chunk_sizes(tokens))


def received_bytes(dispatch: Dispatch, sizes: Sizes, group: ExpertGroup) -> int:
    """Return the bytes that a device receives for a layer in the phases of `sizes`, moved weights included."""
    phases = layer_moves(dispatch, sizes, group).phases(recomputed=True)
    exchanged = sum(move.received_bytes for phase in sizes.phases for move in phases.get(phase, ()))
    return exchanged + (sizes.weights if dispatch.moves == "weights" else 0)
