"""Update rules, one file each, learning-rate schedules, and the `Optimizer` that applies them to a model."""

from moezoo.optim.adamw import AdamW as AdamW
from moezoo.optim.base import Group as Group
from moezoo.optim.base import Schedule as Schedule
from moezoo.optim.base import UpdateRule as UpdateRule
from moezoo.optim.base import Work as Work
from moezoo.optim.guard import Guard as Guard
from moezoo.optim.guard import GuardSettings as GuardSettings
from moezoo.optim.muon import Muon as Muon
from moezoo.optim.optimizer import Optimizer as Optimizer
from moezoo.optim.schedules import Constant as Constant
from moezoo.optim.schedules import Cosine as Cosine
from moezoo.optim.sgd import SGD as SGD

UPDATE_RULES: dict[str, type[UpdateRule]] = {"adamw": AdamW, "muon": Muon, "sgd": SGD}
SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "cosine": Cosine}
