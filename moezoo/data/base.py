"""The contract of the configuration group `data`, whose entries are frozen dataclasses, and how an entry is loaded."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from moezoo.data.corpus import Corpus
from moezoo.data.held_out import SHARE
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

    @property
    def parts(self) -> Mapping[str, "DataSettings"]:
        """The settings of the sources of a mixture by name; of any other data, these alone, without a name."""
        return {"": self}

    def with_parts(self, parts: Mapping[str, "DataSettings"]) -> "DataSettings":
        """Return the settings with others in place of `parts`."""
        return parts[""]

    @property
    def has_own_validation(self) -> bool:
        """Whether the settings name validation documents, apart from those to train on."""
        return False

    def text_ends(self) -> tuple[int, ...]:
        """Return the tokens that end a text; none where that is not known. Raises `UserError` without the tokenizer."""
        return ()

    def tokenizer_file(self) -> Path | None:
        """Return the path of the Hugging Face `tokenizer.json` that made the tokens; None without one."""
        return None

    def chat_files(self) -> dict[str, Path]:
        """Return the files by which a Hugging Face folder shows its chat template, by their names there, if any."""
        return {}


@dataclasses.dataclass(frozen=True)
class HeldOutSettings(DataSettings):
    """The settings of a source of which a part is held out for validation.

    - `held_out`: the share of its documents, or of its tokens where whole documents cannot be, as in
      `moezoo.data.held_out`; without effect where validation documents are named.
    """

    held_out: Annotated[float, Range(above=0, at_most=0.5)] = dataclasses.field(default=SHARE, kw_only=True)


Use = Literal["training", "validation", "all"]


def load(settings: DataSettings, *, seq_len: int, seed: int, vocab: int, use: Use = "training") -> Source:
    """Read the data that `settings` describe. Token ids of files stay on disk.

    Args:
        settings: An entry of the configuration group `data`.
        seq_len: The tokens per row.
        seed: The seed of the run. It decides synthetic data only; the held-out documents never depend on it.
        vocab: The vocabulary size of the model.
        use: What is read: "training" needs both splits, "validation" that one alone, and "all" makes it all documents.

    Raises:
        UserError: The data are missing or damaged, their vocabulary is larger than the model's, or a split that is
            needed has less than one window or, packed, no document; `use` is "all", and validation documents are not
            held out of others.
    """
    check_type("settings", settings, DataSettings, "write moezoo.data.Text(path=...), or take cfg.data")
    seq_len = convert(int, seq_len, "seq_len", valid=Range(at_least=1))
    seed = convert(int, seed, "seed", valid=Range(at_least=0, at_most=2**32 - 1))
    vocab = convert(int, vocab, "vocab", valid=Range(at_least=1))
    use = convert(Use, use, "use")
    source = load_unchecked(settings, seed=seed, vocab=vocab)
    if use == "all":
        source = _with_all(source)
    for name, part in source.parts.items():
        trained = use == "training" and part.stream is None and (not name or source.weighted[name].weight > 0)
        with naming(name):
            if trained:
                if not len(part.train):
                    raise UserError(
                        f"data.path is required to train with data={part.name}; pass data.path=FILE_OR_FOLDER"
                    )
                _check_size(part, part.train, seq_len, "training")
            _check_size(part, part.validation, seq_len, "all" if use == "all" else "validation")
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


def _with_all(source: Source) -> Source:
    """Return a source that validates on all documents; of a mixture, each of its sources does."""
    if source.weighted:
        parts = {}
        for name, part in source.weighted.items():
            with naming(name):
                parts[name] = part._replace(source=_with_all(part.source))
        return dataclasses.replace(source, weighted=parts)
    if source.whole is None:
        how = source.summary.get("held out", "of a source of your own")
        raise UserError(
            f"split=all: the validation documents of data={source.name} are apart ({how}); choose split=validation"
        )
    return dataclasses.replace(source, validation=source.whole)


def _check_size(source: Source, corpus: Corpus, seq_len: int, split: Use) -> None:
    """Raise `UserError` unless the documents of a split make a row."""
    what, purpose = ("has", "") if split == "all" else ("leaves", f" for {split}")
    if source.packing == "stream" and len(corpus) < seq_len + 1:
        raise UserError(
            f"data={source.name} {what} {len(corpus)} {source.unit}s{purpose}, but seq_len={seq_len} needs "
            f"{seq_len + 1} for one window; give more data or a smaller seq_len"
        )
    if not corpus.predicts():
        raise UserError(f"data={source.name} has no {source.unit} to predict{purpose}; give data that have some")
    if source.packing == "whole" and not len(fit(corpus, seq_len, source.too_long).inputs):
        raise UserError(
            f"data={source.name} has no document{purpose} that predicts a {source.unit} within seq_len={seq_len}; "
            "give shorter documents or a larger seq_len"
        )
