"""What one device computes, moves in its memory and receives in a call of a model, and the least time that it takes."""

from collections.abc import Mapping
from typing import NamedTuple

from moezoo.analysis.hardware import Slice
from moezoo.config.settings import TrainConfig
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.traffic import CallName, Phase, TrafficTable


class Work(NamedTuple):
    """What one device does in one call.

    Attributes:
        flops: Phase -> FLOPs of products. Evaluation and generation are all `outside`.
        model_flops: A device's share of `model_flops` in training, otherwise the sum of `flops`.
        hbm: What moves -> the bytes read from memory or written to it, at least.
        traffic: The collectives.
    """

    flops: dict[Phase, float]
    model_flops: float
    hbm: dict[str, float]
    traffic: TrafficTable


class Bound(NamedTuple):
    """The least seconds that one call takes on a slice.

    Attributes:
        compute: All products at the peak rate of bfloat16.
        hbm: All bytes at the peak rate of memory.
        links: Cut -> seconds (`moezoo.analysis.hardware`).
        alone: The collectives one after the other, each as fast as it can be.
    """

    compute: float
    hbm: float
    links: dict[str, float]
    alone: float

    @property
    def step_seconds(self) -> float:
        """The largest of all: compute, memory and links work at the same time, without a pause."""
        return max(self.compute, self.hbm, *self.links.values())

    @property
    def bound_by(self) -> str:
        """The name of the largest: "compute", "HBM", or a cut."""
        named = {"compute": self.compute, "HBM": self.hbm, **self.links}
        return max(named, key=lambda name: named[name])

    @property
    def summed(self) -> float:
        """The seconds if nothing overlaps: products, then bytes of memory, then each collective."""
        return self.compute + self.hbm + self.alone


def work_of(cfg: TrainConfig, call: CallName = "train", *, blueprint: Blueprint | None = None) -> Work:
    """Return what one device does in a call, read from the traced program. No device is used.

    Args:
        cfg: The configuration.
        call: What runs, as in `moezoo.analysis.sharding.describe`.
        blueprint: As in `moezoo.training.build.build_step`.

    Raises:
        UserError: The parts of the configuration do not fit together, or a mesh axis is -1.
    """


def bound(work: Work, where: Slice, mesh: Mapping[str, int]) -> Bound:
    """Return the least seconds of `work` on a slice. Mesh and errors are those of `Slice.link_seconds`."""


def model_flops(cfg: TrainConfig) -> float:
    """Return the FLOPs of the model in a step, over all devices: those of rematerialisation do not count.

    They are 6 per token and active parameter in a product, plus those of attention over the keys that a query sees.
    """
