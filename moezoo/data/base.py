"""The contract of the configuration group `data`, whose entries are frozen dataclasses, and how an entry is loaded."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from moezoo.data.packing import Packing, fit
from moezoo.data.source import Source
from moezoo.errors import UserError, check_type
from moezoo.typed import Count, Range, check_fields, convert


@dataclasses.dataclass(frozen=True)
class DataSettings(abc.ABC):
    """The settings of a data source.

    - `eval_sequences`: the number of validation rows per evaluation, evenly spaced over the validation split; 0 reads
      all of them;
    - `packing`: `stream` reads documents one after another in windows of one row; `whole` puts whole documents into
      rows, as in `moezoo.data.packing`.
    """

    eval_sequences: Count = dataclasses.field(default=256, kw_only=True)
    packing: Packing = dataclasses.field(default="stream", kw_only=True)

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

    def tokenizer_file(self) -> Path | None:
        """Return the path of the Hugging Face `tokenizer.json` that made the tokens; None without one."""
        return None

    def chat_files(self) -> dict[str, Path]:
        """Return the files by which a Hugging Face folder shows its chat template, by their names there, if any."""
        return {}


def load(settings: DataSettings, *, seq_len: int, seed: int, vocab: int, training: bool = True) -> Source:
    """Read the data that `settings` describe. Token ids of files stay on disk.

    Args:
        settings: An entry of the configuration group `data`.
        seq_len: The tokens per row.
        seed: The seed of the run. It decides synthetic data only; the held-out documents never depend on it.
        vocab: The vocabulary size of the model.
        training: Whether the training split is needed; an evaluation reads the other one alone.

    Raises:
        UserError: The data are missing or damaged, their vocabulary is larger than the model's, or a split that is
            needed has less than one window or, packed, no document.
    """
    check_type("settings", settings, DataSettings, "write moezoo.data.Text(path=...), or take cfg.data")
    seq_len = convert(int, seq_len, "seq_len", valid=Range(at_least=1))
    seed = convert(int, seed, "seed", valid=Range(at_least=0, at_most=2**32 - 1))
    vocab = convert(int, vocab, "vocab", valid=Range(at_least=1))
    source = load_unchecked(settings, seed=seed, vocab=vocab)
    for name, part in source.parts.items():
        trained = training and (not name or source.weighted[name].weight > 0)
        with naming(name):
            _check_splits(part, seq_len, trained)
    return source


def load_unchecked(settings: DataSettings, *, seed: int, vocab: int) -> Source:
    """Do what `load` does, without looking at the sizes of splits."""
    return dataclasses.replace(settings.load(seed=seed, vocab=vocab), packing=settings.packing)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Let a mistake in the block begin with the name of a source of a mixture; an empty name changes nothing."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.sources.{name}: {error}" if name else str(error)) from error


def _check_splits(source: Source, seq_len: int, training: bool) -> None:
    if training and not len(source.train):
        raise UserError(f"data.path is required to train with data={source.name}; pass data.path=FILE_OR_FOLDER")
    for split, corpus in (("training", source.train), ("validation", source.validation))[not training :]:
        if source.packing == "stream" and len(corpus) < seq_len + 1:
            raise UserError(
                f"data={source.name} leaves {len(corpus)} {source.unit}s for {split}, but seq_len={seq_len} needs "
                f"{seq_len + 1} for one window; give more data or a smaller seq_len"
            )
        if not corpus.predicts():
            raise UserError(f"data={source.name} has no {source.unit} to predict for {split}; give data that have some")
        if source.packing == "whole" and not len(fit(corpus, seq_len, source.too_long).inputs):
            raise UserError(
                f"data={source.name} has no document for {split} that predicts a {source.unit} within "
                f"seq_len={seq_len}; give shorter documents or a larger seq_len"
            )
