"""Where the rows of a run go besides its folder: one file per tracker, each over the library of its vendor."""

from moezoo.trackers.base import MetricsRow as MetricsRow
from moezoo.trackers.base import NoTracker as NoTracker
from moezoo.trackers.base import RunStart as RunStart
from moezoo.trackers.base import Tracker as Tracker
from moezoo.trackers.base import Writer as Writer
from moezoo.trackers.base import numbers_in as numbers_in
from moezoo.trackers.several import Several
from moezoo.trackers.to_mlflow import MLflow
from moezoo.trackers.to_tensorboard import TensorBoard
from moezoo.trackers.to_wandb import WandB

TRACKERS: dict[str, type[Tracker]] = {
    "none": NoTracker,
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "several": Several,
}
