"""What a strategy runs and holds in one layer."""

from moezoo.moe.dispatch.gather import Gather
from moezoo.moe.dispatch.replicated import Replicated
from moezoo.parallel.dispatch import Dispatch, ExpertGroup


def for_group(dispatch: Dispatch | None, group: ExpertGroup) -> Dispatch:
    """Return `dispatch`, by default `Gather`; where all devices of the group have the same tokens, in `Replicated`."""
    strategy = dispatch or Gather()
    return Replicated(strategy, chunks=strategy.chunks) if group.replicated else strategy


def layer_rows(dispatch: Dispatch | None, tokens: int, k: int, group: ExpertGroup) -> int:
    """Return the rows that a device has room for in a layer, summed over chunks. Arguments as for `Dispatch.rows`."""
    strategy = for_group(dispatch, group)
    return sum(strategy.rows(chunk, k, group) for chunk in strategy.chunk_sizes(tokens))
