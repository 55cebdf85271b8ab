"""How tokens meet experts: one file a strategy, one contract in `base`."""

from moezoo.moe.dispatch.base import Assignment as Assignment
from moezoo.moe.dispatch.base import Dispatch as Dispatch
from moezoo.moe.dispatch.base import Dispatched as Dispatched
from moezoo.moe.dispatch.base import ExpertGroup as ExpertGroup
from moezoo.moe.dispatch.base import Sizes as Sizes
from moezoo.moe.dispatch.capacity import Capacity as Capacity
from moezoo.moe.dispatch.dense import Dense as Dense
from moezoo.moe.dispatch.gather import Gather as Gather
from moezoo.moe.dispatch.ragged import Ragged as Ragged
from moezoo.moe.dispatch.replicated import Replicated as Replicated
from moezoo.moe.dispatch.ring import Ring as Ring

STRATEGIES: dict[str, type[Dispatch]] = {
    "capacity": Capacity,
    "dense": Dense,
    "gather": Gather,
    "ragged": Ragged,
    "ring": Ring,
}
