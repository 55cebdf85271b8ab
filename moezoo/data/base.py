"""The contract of the configuration group `data`; each entry is a frozen dataclass in a separate file."""

import abc
import dataclasses

from moezoo.convert import Count, check_fields
from moezoo.data.source import Source


@dataclasses.dataclass(frozen=True)
class DataSettings(abc.ABC):
    """The settings of a data source.

    `eval_sequences` is the number of validation windows per evaluation, evenly spaced over the validation split; 0
    reads all of them.
    """

    eval_sequences: Count = dataclasses.field(default=256, kw_only=True)

    def __post_init__(self):
        check_fields("data", self)

    @abc.abstractmethod
    def load(self, *, seed: int, vocab: int) -> Source:
        """Read the data. Call `moezoo.data.load` instead, which also checks the sizes of both splits.

        Args:
            seed: the seed of the run; only synthetic data depend on it.
            vocab: the vocabulary size of the model.

        Raises:
            UserError: the data are missing or damaged, or their vocabulary is larger than `vocab`.
        """
