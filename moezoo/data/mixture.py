"""Data: a mixture of named sources, of which each training row draws one by weight."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moezoo.data.base import DataSettings, load_unchecked, naming
from moezoo.data.corpus import concatenate
from moezoo.data.source import Part, Source
from moezoo.errors import UserError, describe_class
from moezoo.typed import INLINED, NotNegative, check_fields, show

_NAME = re.compile(r"[A-Za-z_]\w*")
_WRITE = "write data.sources.NAME.name=text data.sources.NAME.path=... data.sources.NAME.weight=0.5 for each source"


@dataclasses.dataclass(frozen=True)
class Weighted:
    """A source of a mixture, and how often a row is of it, relative to the weights of the others.

    In a configuration the keys of the source stand beside `weight`. A source of weight 0 is only validated on.
    """

    source: DataSettings = dataclasses.field(metadata={INLINED: True})
    weight: NotNegative = 1.0

    def __post_init__(self):
        check_fields("", self)


@dataclasses.dataclass(frozen=True)
class Mixture(DataSettings):
    """Sources by name, each any other data source, for instance

        Mixture(sources={"code": Weighted(Text(path="src"), 0.3), "prose": Weighted(Text(path="books"), 0.7)})

    Each row of each batch is of one source, drawn by weight; every source has epochs of its own. All have the same
    tokenizer. `eval_sequences` counts for each source. `packing="whole"` packs the documents of all of them; with
    `stream` each source has its own `packing`.
    """

    sources: Mapping[str, Weighted] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        usual = DataSettings.eval_sequences
        if not isinstance(self.sources, Mapping):
            found = describe_class(self.sources)
            raise UserError(f"data.sources={show(self.sources)}: expected names and their sources, found {found}")
        for name, weighted in self.sources.items():
            key = f"data.sources.{show(name)}"
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UserError(f"{key}: expected a name of letters, digits and _, found {show(name)}")
            if not isinstance(weighted, Weighted):
                found = describe_class(weighted)
                raise UserError(f"{key} is {found}, expected a source with its weight; write Weighted(source, 0.5)")
            if isinstance(weighted.source, Mixture):
                raise UserError(f"{key} is a mixture in a mixture; write its sources beside the others")
            if weighted.source.eval_sequences != usual:
                raise UserError(
                    f"{key}.eval_sequences={weighted.source.eval_sequences} cannot differ among the sources of a "
                    "mixture; set data.eval_sequences, which counts for each"
                )
        total = sum(weighted.weight for weighted in self.sources.values())
        if self.sources and not total:
            raise UserError(f"data.sources: the weight of each of {', '.join(self.sources)} is 0; give one above 0")
        if not math.isfinite(total):
            raise UserError("data.sources: the sum of all weights is too large for a float; give smaller ones")

    def load(self, *, seed: int, vocab: int) -> Source:
        """Load all sources. Raises `UserError` for a mistake in one, and where they have different tokenizers."""
        if not self.sources:
            raise UserError(f"data.sources is required for data=mixture; {_WRITE}")
        parts = {}
        for name, (settings, weight) in self._settings().items():
            with naming(name):
                parts[name] = Part(load_unchecked(settings, seed=seed, vocab=vocab), weight)
                if weight and parts[name].source.stream is not None:
                    raise UserError(
                        "a stream is no source of a mixture, which draws rows by number; set streaming=false"
                    )
        self._check_tokenizers(parts)
        total = sum(part.weight for part in parts.values())
        widest = max((part.source for part in parts.values()), key=lambda source: source.vocab)
        empty = concatenate([], np.dtype(np.uint8))
        hashes = [(name, part.source.summary.get("sha256")) for name, part in parts.items()]
        shares = ", ".join(f"{name} {part.weight / total:.1%}" for name, part in parts.items())
        return Source(
            name="mixture",
            train=empty,
            validation=empty,
            vocab=widest.vocab,
            unit=widest.unit,
            summary={"rows": shares, "sha256": hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]},
            held_out=tuple(f"{name}/{each}" for name, part in parts.items() for each in part.source.held_out),
            encode=widest.encode,
            decode=widest.decode,
            token_bytes=widest.token_bytes,
            unsettled=widest.unsettled,
            weighted=parts,
            ends=tuple(dict.fromkeys(end for part in parts.values() for end in part.source.ends)),
        )

    @property
    def parts(self) -> Mapping[str, DataSettings]:
        return {name: weighted.source for name, weighted in self.sources.items()}

    def with_parts(self, parts: Mapping[str, DataSettings]) -> "Mixture":
        own = {name: dataclasses.replace(weighted, source=parts[name]) for name, weighted in self.sources.items()}
        return dataclasses.replace(self, sources=own)

    @property
    def has_own_validation(self) -> bool:
        return any(part.has_own_validation for part in self.parts.values())

    def text_ends(self) -> tuple[int, ...]:
        return tuple({end: None for each in self.sources.values() for end in each.source.text_ends()})

    def tokenizer_file(self) -> Path | None:
        return next((part.tokenizer_file() for part in self.parts.values()), None)

    def chat_files(self) -> dict[str, Path]:
        return next((files for part in self.parts.values() if (files := part.chat_files())), {})

    def _settings(self) -> dict[str, tuple[DataSettings, float]]:
        """Return the settings of each source, packed as the mixture is, and its weight."""
        packed = {} if self.packing == "stream" else {"packing": self.packing}
        return {
            name: (dataclasses.replace(weighted.source, **packed), weighted.weight)
            for name, weighted in self.sources.items()
        }

    def _check_tokenizers(self, parts: Mapping[str, Part]) -> None:
        """Raise `UserError` unless the ids of all sources mean the same."""
        (first, expected), *others = ((name, self._tokenizer(name, part)) for name, part in parts.items())
        for name, found in others:
            if found[0] != expected[0]:
                raise UserError(
                    f"data.sources.{first} has {expected[1]} and data.sources.{name} has {found[1]}: the sources of a "
                    "mixture need one tokenizer; set the same for all"
                )

    def _tokenizer(self, name: str, part: Part) -> tuple[str, str]:
        """Return what is the same for the same tokenizer, and its description."""
        path = self.sources[name].source.tokenizer_file()
        if path is not None:
            return hashlib.sha256(path.read_bytes()).hexdigest(), f"the tokenizer {show(str(path))}"
        if part.source.unit == "byte":
            return "byte", "bytes as tokens"
        return "number", f"ids without a tokenizer, below {part.source.vocab}"
