"""The contract of the configuration group `data`; each entry is a frozen dataclass in a file of its own."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from moezoo.data.source import Source
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class DataSettings(abc.ABC):
    """Where documents come from.

    `eval_sequences` is how many validation windows an evaluation reads, evenly spaced over the validation split; 0
    reads all of them.
    """

    eval_sequences: int = dataclasses.field(default=256, kw_only=True)

    minima: ClassVar[Mapping[str, int]] = {}  # the least value of the other numbers, field by field

    def __post_init__(self):
        for field, least in {"eval_sequences": 0, **self.minima}.items():
            if (value := getattr(self, field)) < least:
                raise UserError(f"data.{field}={value} must be at least {least}")

    @abc.abstractmethod
    def load(self, *, seed: int, vocab: int) -> Source:
        """Read the data; callers use `moezoo.data.load`, which also checks the sizes of both splits.

        Only synthetic data depend on `seed`. Raises `UserError` for data that are missing or damaged, or that have
        more different tokens than the `vocab` of the model.
        """
