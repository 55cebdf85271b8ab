"""`auto`: the choice whether tokens or weights move.

Naive equivalent: the user compares `moezoo.analysis.communication(cfg, dispatch=...).bytes` and names the least.
"""

import dataclasses

from moezoo.moe.dispatch.gather import Gather
from moezoo.moe.dispatch.ragged import Ragged
from moezoo.moe.dispatch.ring import Ring
from moezoo.parallel.dispatch import Dispatch, DispatchChoice, ExpertGroup


@dataclasses.dataclass(frozen=True)
class Auto(DispatchChoice):
    """Choose `ring`, `ragged` or `gather`: the one with which a device receives the fewest bytes per layer.

    The three drop nothing. Bytes are those of a traced layer (`moezoo.models.choice`), so the choice depends on the
    tokens of a call, the mesh, the dtypes, and on what is recomputed and differentiated. Where experts are not split,
    it is `gather`: nothing moves. Links, latency and memory do not count. `ragged` is left out on GPUs: it needs a flag
    there (`Ragged.refusal`) and may be far slower than its bytes suggest.
    """

    def candidates(self, group: ExpertGroup) -> tuple[Dispatch, ...]:
        """Return the strategies to compare."""
        kinds: tuple[type[Dispatch], ...] = (Ring, Ragged, Gather) if group.axes else (Gather,)
        if group.target and group.target.is_gpu:
            kinds = tuple(kind for kind in kinds if kind is not Ragged)
        return tuple(kind(chunks=self.chunks) for kind in kinds)
