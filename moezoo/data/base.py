"""The contract of the configuration group `data`; each entry is a frozen dataclass in a separate file."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from moezoo.data.source import Source
from moezoo.errors import UserError, check_numbers


@dataclasses.dataclass(frozen=True)
class DataSettings(abc.ABC):
    """The settings of a data source.

    `eval_sequences` is the number of validation windows per evaluation, evenly spaced over the validation split; 0
    reads all of them.
    """

    eval_sequences: int = dataclasses.field(default=256, kw_only=True)

    # The least and the largest value of each numeric field that has such; no integer exceeds int32.
    minima: ClassVar[Mapping[str, int]] = {}
    maxima: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self):
        for field, least in {"eval_sequences": 0, **self.minima}.items():
            if (value := getattr(self, field)) < least:
                raise UserError(f"data.{field}={value} must be at least {least}")
        for field, most in self.maxima.items():
            if (value := getattr(self, field)) > most:
                raise UserError(f"data.{field}={value} must be at most {most}")
        check_numbers("data", self)

    @abc.abstractmethod
    def load(self, *, seed: int, vocab: int) -> Source:
        """Read the data. Call `moezoo.data.load` instead, which also checks the sizes of both splits.

        Args:
            seed: the seed of the run; only synthetic data depend on it.
            vocab: the vocabulary size of the model.

        Raises:
            UserError: the data are missing or damaged, or their vocabulary is larger than `vocab`.
        """
