"""The contract of the configuration group `data`, whose entries are frozen dataclasses, and how an entry is loaded."""

import abc
import dataclasses
from pathlib import Path
from typing import Literal

from moezoo.data.source import Source
from moezoo.errors import UserError, check_type
from moezoo.typed import Count, Range, check_fields, convert


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
            seed: The seed of the run; only synthetic data depend on it.
            vocab: The vocabulary size of the model.

        Raises:
            UserError: The data are missing or damaged, or their vocabulary is larger than `vocab`.
        """

    @property
    def has_own_validation(self) -> bool:
        """Whether the settings name validation documents, apart from those to train on."""
        return False

    def tokenizer_file(self) -> Path | None:
        """Return the path of the Hugging Face `tokenizer.json` that made the tokens; None without one."""
        return None


Use = Literal["training", "validation", "all"]


def load(settings: DataSettings, *, seq_len: int, seed: int, vocab: int, use: Use = "training") -> Source:
    """Read the data that `settings` describe. Token ids of files stay on disk.

    Args:
        settings: An entry of the configuration group `data`.
        seq_len: The tokens per window.
        seed: The seed of the run. It decides synthetic data only; the held-out documents never depend on it.
        vocab: The vocabulary size of the model.
        use: What is read: "training" needs both splits, "validation" that one alone, and "all" makes it all documents.

    Raises:
        UserError: The data are missing or damaged, their vocabulary is larger than the model's, or a split that is
            needed has less than one window; `use` is "all", and validation documents are not held out of others.
    """
    check_type("settings", settings, DataSettings, "write moezoo.data.Text(path=...), or take cfg.data")
    seq_len = convert(int, seq_len, "seq_len", valid=Range(at_least=1))
    seed = convert(int, seed, "seed", valid=Range(at_least=0, at_most=2**32 - 1))
    vocab = convert(int, vocab, "vocab", valid=Range(at_least=1))
    use = convert(Use, use, "use")
    source = settings.load(seed=seed, vocab=vocab)
    if use == "all":
        if source.whole is None:
            how = source.summary.get("held out", "of a source of your own")
            raise UserError(
                f"split=all: the validation documents of data={source.name} are apart ({how}); choose split=validation"
            )
        source = dataclasses.replace(source, validation=source.whole)
    if use == "training" and not len(source.train):
        raise UserError(f"data.path is required to train with data={source.name}; pass data.path=FILE_OR_FOLDER")
    needed = {"training": source.train, "validation": source.validation}
    for split, corpus in needed.items() if use == "training" else [(use, source.validation)]:
        if len(corpus) < seq_len + 1:
            what = "has" if split == "all" else "leaves"
            whole = "" if split == "all" else f" for {split}"
            raise UserError(
                f"data={source.name} {what} {len(corpus)} {source.unit}s{whole}, but seq_len={seq_len} needs "
                f"{seq_len + 1} for one window; give more data or a smaller seq_len"
            )
    return source
