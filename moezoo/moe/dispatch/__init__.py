"""How tokens reach experts: one file per strategy. The contract is in `moezoo.parallel.dispatch`.

Every strategy computes the same sum, `y[t] = sum_k gates[t, k] * expert[expert_ids[t, k]](x[t])`. They differ in what
moves between devices. Letters in these files:

| letter | meaning |
|---|---|
| T | tokens on this device |
| K | experts per token; a token has K assignments |
| E | experts of the layer |
| P | devices of the expert group; each stores E/P experts |
| R | rows that the experts of this device read: what `Dispatch.rows` returns |
| d, f | width of the model, width of an expert |
"""

import importlib
import inspect
import pkgutil

from moezoo.moe.dispatch.auto import Auto as Auto
from moezoo.moe.dispatch.capacity import Capacity as Capacity
from moezoo.moe.dispatch.dense import Dense as Dense
from moezoo.moe.dispatch.gather import Gather as Gather
from moezoo.moe.dispatch.ragged import Ragged as Ragged
from moezoo.moe.dispatch.replicated import Replicated as Replicated
from moezoo.moe.dispatch.ring import Ring as Ring
from moezoo.parallel.dispatch import Assignment as Assignment
from moezoo.parallel.dispatch import Dispatch as Dispatch
from moezoo.parallel.dispatch import DispatchChoice as DispatchChoice
from moezoo.parallel.dispatch import Dispatched as Dispatched
from moezoo.parallel.dispatch import ExpertGroup as ExpertGroup


def _find_strategies() -> dict[str, type[Dispatch]]:
    """Return the strategies in the files of this folder: `name.py` holds the class `Name`.

    So a strategy is one file, and one of the same name in `conf/dispatch/`.
    """
    found = {}
    for name in sorted(each.name for each in pkgutil.iter_modules(__path__)):
        kind = getattr(importlib.import_module(f"{__name__}.{name}"), name.capitalize(), None)
        if inspect.isclass(kind) and issubclass(kind, Dispatch) and kind is not Replicated:  # which is a wrapper
            found[name] = kind
    return found


STRATEGIES = _find_strategies()

# What a configuration can name: a strategy, or a choice between some.
DISPATCHES: dict[str, type[DispatchChoice]] = {"auto": Auto, **STRATEGIES}
