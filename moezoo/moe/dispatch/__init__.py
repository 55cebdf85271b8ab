"""How tokens meet experts: a file per strategy; the contract is in `moezoo.parallel.dispatch`."""

from moezoo.moe.dispatch.capacity import Capacity as Capacity
from moezoo.moe.dispatch.dense import Dense as Dense
from moezoo.moe.dispatch.gather import Gather as Gather
from moezoo.moe.dispatch.ragged import Ragged as Ragged
from moezoo.moe.dispatch.replicated import Replicated as Replicated
from moezoo.moe.dispatch.ring import Ring as Ring
from moezoo.parallel.dispatch import Assignment as Assignment
from moezoo.parallel.dispatch import Dispatch as Dispatch
from moezoo.parallel.dispatch import Dispatched as Dispatched
from moezoo.parallel.dispatch import ExpertGroup as ExpertGroup
from moezoo.parallel.dispatch import Sizes as Sizes

STRATEGIES: dict[str, type[Dispatch]] = {
    "capacity": Capacity,
    "dense": Dense,
    "gather": Gather,
    "ragged": Ragged,
    "ring": Ring,
}
