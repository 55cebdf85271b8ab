"""The choice of the strategy that a layer runs."""

from collections.abc import Collection

from moezoo.moe.dispatch.gather import Gather
from moezoo.moe.dispatch.replicated import Replicated
from moezoo.parallel.dispatch import Dispatch, ExpertGroup


def resolve(dispatch: Dispatch | None, group: ExpertGroup, token_axes: Collection[str]) -> Dispatch:
    """Return `dispatch`, by default `Gather`, wrapped in `Replicated` where devices of the group have the same tokens.

    `token_axes`: the mesh axes over which tokens differ.
    """
    strategy = dispatch or Gather()
    return strategy if set(group.axes) <= set(token_axes) else Replicated(strategy, chunks=strategy.chunks)
