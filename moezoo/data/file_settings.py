"""What sources share that read files: a tokenizer, the cache, and the choice of validation documents."""

import abc
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from moezoo.data.base import DataSettings, HeldOutSettings, naming
from moezoo.data.cache import cache_folder, kept
from moezoo.data.corpus import dtype_for
from moezoo.data.documents import Document, How
from moezoo.data.files import Found, find_files
from moezoo.data.held_out import Split, hold_out, own_validation
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.token_files import TokenFiles, nothing
from moezoo.data.tokenizer import HuggingFace, Tokenizer, end_id, text_tokenizer
from moezoo.errors import UserError
from moezoo.typed import show


@dataclasses.dataclass(frozen=True)
class FileSettings(HeldOutSettings):
    """The settings of a source that reads documents from files.

    - `path`: a file, a folder, or a pattern such as `texts/*.txt`; an evaluation on `validation` needs none;
    - `tokenizer`: a Hugging Face `tokenizer.json`; None makes each byte a token;
    - `end_token`: the text of the tokenizer's token that ends each document; None adds none;
    - `validation`: other files to validate on; None holds out a part of `path`;
    - `cache`: the folder of token ids, which later runs read; "auto" for moezoo's in the user's folder of caches.
    """

    path: str | None = None
    tokenizer: str | None = None
    end_token: str | None = None
    validation: str | None = None
    cache: str = "auto"

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    answers: ClassVar[bool] = False  # whether documents have answers, which `ends` end

    @property
    @abc.abstractmethod
    def reader(self) -> str:
        """What `documents` reads, in words: other words for anything that changes it."""

    @abc.abstractmethod
    def documents(self, found: Found) -> Iterator[Document]:
        """Yield the documents of all files. Raises `UserError` for a file, line or row that is not as it should be."""

    def load(self, *, seed: int, vocab: int) -> Source:
        """Tokenize all files that are not in the cache, and map the ids into memory.

        Raises:
            UserError: A path does not exist or holds no text, or every file of `path` is also in `validation`.
        """
        del seed
        path, own = self.path, self.validation
        if path is None and own is None:
            raise UserError(f"data.path is required for data={self.kind}; pass data.path=FILE_OR_FOLDER")
        how, held_out = self._how(vocab), None
        found = None if path is None else self.find_training(path)
        if own is None:
            assert found is not None
            read = self._read(found, how)
            split = self.split(read)
        else:
            apart = self.find_validation(own)
            if found is not None:
                found = self.withhold(found, apart)
            read = nothing(how.dtype) if found is None else self._read(found, how)
            held_out = self._read(apart, how)
            hashes, names = (read.hashes, held_out.hashes), tuple(held_out.names)
            split = own_validation(read.corpus, held_out.corpus, f"data.validation={own}", hashes=hashes, names=names)
        split = split._replace(held_out=tuple(dict.fromkeys(split.held_out)))  # a long file is several documents
        extra = {} if found is None else self.describe(found, read)
        about = [each.about for each in (read, held_out) if each]
        ends = self.ends(how.tokenizer, about)
        texts = map(how.tokenizer.token_text, ends) if isinstance(how.tokenizer, HuggingFace) else ()
        extra |= {
            "tokenizer": show(self.tokenizer or "bytes"),
            "end token": show(" or ".join(filter(None, texts)) or "none"),
        }
        notes, warnings = (
            tuple(dict.fromkeys(line for each in about for line in each.get(kind, ())))
            for kind in ("notes", "warnings")
        )
        source = make_source(
            self.kind, split, how.tokenizer, vocab=how.tokenizer.vocab, sha256=read.sha256[:16], **extra
        )
        return dataclasses.replace(
            source, shards=self.shards(read), notes=notes, warnings=warnings, ends=ends if self.answers else ()
        )

    def find_training(self, path: str) -> Found:
        """Return the files of `path`. Raises `UserError` if there is none."""
        return find_files(path, key="data.path", suffixes=self.suffixes)

    def find_validation(self, own: str) -> Found:
        """Return the files of `validation`. Raises `UserError` if there is none."""
        return find_files(own, key="data.validation", suffixes=self.suffixes)

    def withhold(self, found: Found, apart: Found) -> Found:
        """Return files to train on without those `apart`, which may be in a subfolder. Raises `UserError` for none."""
        withheld = {file.resolve() for file in apart.paths}
        found = found._replace(paths=[file for file in found.paths if file.resolve() not in withheld])
        if not found.paths:
            raise UserError(
                f"data.validation={self.validation} holds every file of data.path={self.path}; give different files"
            )
        return found

    def split(self, read: TokenFiles) -> Split:
        """Return the training and the validation documents."""
        return hold_out(read.corpus, self.held_out, hashes=read.hashes, names=read.names)

    def shards(self, read: TokenFiles) -> np.ndarray | None:
        """Return the shards of the training order; None shuffles windows."""
        return read.shards

    def describe(self, found: Found, read: TokenFiles) -> dict[str, str]:
        """Return facts for the summary, as title and text."""
        del found
        return {"shards": f"{len(read.shards):,}"}

    @property
    def has_own_validation(self) -> bool:
        return self.validation is not None

    def text_ends(self) -> tuple[int, ...]:
        return self.ends(text_tokenizer(self.tokenizer, key="data.tokenizer"))

    def ends(self, tokenizer: Tokenizer, about: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the tokens that end a document or, in chats, an answer; `about` is that of entries of the cache."""
        del about
        end = self._end(tokenizer)
        return () if end is None else (end,)

    def tokenizer_file(self) -> Path | None:
        return None if self.tokenizer is None else Path(os.path.expanduser(self.tokenizer))

    def _how(self, vocab: int) -> How:
        tokenizer = text_tokenizer(self.tokenizer, key="data.tokenizer")
        bytes_ = f"data={self.kind} without data.tokenizer has 256 byte values"
        what = bytes_ if self.tokenizer is None else f"data.tokenizer has {tokenizer.vocab} tokens"
        require_vocab(what, tokenizer.vocab, vocab)
        return How(self.reader, tokenizer, self.tokenizer_file(), dtype_for(tokenizer.vocab), self._end(tokenizer))

    def _end(self, tokenizer: Tokenizer) -> int | None:
        return None if self.end_token is None else end_id(tokenizer, self.end_token, key="data.end_token")

    def _read(self, found: Found, how: How) -> TokenFiles:
        return kept(cache_folder(self.cache), found, self.documents(found), how)


def fill_in(
    data: DataSettings,
    given: Collection[str],
    find: Callable[[FileSettings, Collection[str]], Mapping[str, str | None]],
) -> DataSettings:
    """Return settings in which sources of files, alone or in a mixture, have what `find` returns, field by field.

    Args:
        data: The settings.
        given: The keys that the user has set, such as data.tokenizer. They stay.
        find: Is called with each source and the fields of it that are in `given`.
    """
    parts = {}
    for name, part in data.parts.items():
        before = f"data.sources.{name}." if name else "data."
        own = [key.removeprefix(before) for key in given if key.startswith(before)]
        if isinstance(part, FileSettings):
            with naming(name):
                found = {field: value for field, value in find(part, own).items() if field not in own}
            part = dataclasses.replace(part, **found)
        parts[name] = part
    return data.with_parts(parts)
