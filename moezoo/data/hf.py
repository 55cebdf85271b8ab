"""Data: data sets of the Hugging Face Hub, or as its library `datasets` stores them. Only this module uses it."""

import abc
import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from moezoo.data.chat import Chat, Seen
from moezoo.data.corpus import concatenate
from moezoo.data.documents import Document, How, Make, all_of_text
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found
from moezoo.data.held_out import Split
from moezoo.data.json_values import kind, without_nulls
from moezoo.data.packing import BUFFER
from moezoo.data.source import Source, make_source
from moezoo.data.stream import Chunk, Stream, read_corpus
from moezoo.data.token_files import TokenFiles
from moezoo.data.tokenizer import one_line
from moezoo.errors import UserError, nearest
from moezoo.typed import Count, counted, show

_HUB = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>\S+))?")
# The library's readers of files: they stand in the place of a data set's name.
_READERS = ("arrow", "csv", "json", "parquet", "text")
_ROWS = 1024  # to have in memory at once
_FIRST = 64  # rows by which a stream is known again
_SHARDS = 64  # of a folder of `save_to_disk` that is streamed, about
# What the library may do is set for the whole process, and several threads read.
_SETTING = threading.RLock()


@dataclasses.dataclass(frozen=True)
class DataSet(FileSettings):
    """What data sets of text and of chats share.

    - `path`: `hf://ORG/NAME`, also with `@REVISION`; a folder that `save_to_disk` wrote; a folder of data files; or a
      reader of the library for `data_files`: arrow, csv, json, parquet or text;
    - `data_files`: patterns of files by the name of their split;
    - `subset`: the name of one of several configurations of a data set;
    - `train`: the split to train on; outside folders of `save_to_disk` also a part of it or a sum, as in
      `train[:90%]` or `train+test`;
    - `validation`: the split to validate on, written so too; None holds out a part of `train`;
    - `download`: whether the library may use the network. Without it, a data set of the Hub is that of its own cache;
    - `streaming`: whether documents are read and tokenized as they are trained on, and nothing is stored. Then
      `validation` is needed, of which the first `eval_sequences` rows are read;
    - `shuffle_buffer`: the rows that each process of a stream reads at once and puts into a random order; 0 keeps the
      order of the rows. The order of shards is random for both.
    """

    data_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    subset: str | None = None
    train: str = "train"
    download: bool = False
    streaming: bool = False
    shuffle_buffer: Count = 10_000

    def load(self, *, seed: int, vocab: int) -> Source:
        """Do what a source of files does with the rows of the data set.

        Raises:
            UserError: The library is missing; there is no such data set, split or column, or it cannot be read.
        """
        if self.path is None:
            raise UserError(
                f"data.path is required for data={self.kind}; pass data.path=hf://ORG/NAME, a folder, or one of "
                f"{', '.join(_READERS)} with data.data_files"
            )
        return self._load_stream(vocab) if self.streaming else super().load(seed=seed, vocab=vocab)

    @abc.abstractmethod
    def convert(self, batch: Mapping[str, list[Any]], shown: str, number: int) -> Iterator[Document]:
        """Yield a document or record of each row of a batch, the columns by name; its first row is `number`, from 1."""

    @abc.abstractmethod
    def expand(self, lines: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents that `convert` has yielded, or those of its records."""

    @abc.abstractmethod
    def maker(self, how: How) -> Make:
        """Return what makes the ids of a document of a stream, as in `how`, for as long as it is used."""

    @abc.abstractmethod
    def select(self, rows: Any, shown: str) -> Any:
        """Return a data set with the columns that `convert` reads. Raises `UserError` if one is missing."""

    def find_training(self, path: str) -> Found:
        return self._find(self.train, "data.train")

    def find_validation(self, own: str) -> Found:
        return self._find(own, "data.validation")

    def withhold(self, found: Found, apart: Found) -> Found:
        if both := self._overlap(found.part, apart.part):
            raise UserError(
                f"data.validation={apart.part} and data.train={found.part} share rows of {both}; name parts that do "
                "not, such as train[:90%] and train[90%:]"
            )
        return found

    def describe(self, found: Found, read: TokenFiles) -> dict[str, str]:
        return {**super().describe(found, read), "split": found.part}

    def _read(self, found: Found, how: How) -> TokenFiles:
        return super()._read(found, self.of_part(found, how))

    def of_part(self, found: Found, how: How) -> How:
        """Return how documents become ids, in words that are other ones for another part of the same files."""
        return how._replace(reader=f"{how.reader} {found.part}")

    def _find(self, split: str, key: str) -> Found:
        """Return the files in which the library has a split."""
        rows = self.open(split)
        paths = [Path(file["filename"]) for file in rows.cache_files]
        shown = f"{show(f'data.path={self.path}')} {key}={split}"
        root = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
        return Found(shown, root, paths, alone=True, part=split)

    def read_rows(self, found: Found) -> Iterator[Document]:
        """Yield a document or record of each row of a split."""
        number = 1
        for batch in self.read_batches(self.select(self.open(found.part), found.shown), _ROWS, found.shown):
            yield from self.convert(batch, found.shown, number)
            number += len(next(iter(batch.values())))

    def read_batches(self, rows: Any, size: int, shown: str) -> Iterator[Mapping[str, list[Any]]]:
        """Yield the rows of a data set, so many at a time, the columns by name."""
        batches = rows.iter(size)
        while True:
            with self.library(shown):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _load_stream(self, vocab: int) -> Source:
        """Return the training rows as a stream, and validation rows in memory."""
        if self.validation is None:
            raise UserError(
                "data.streaming=true holds out no row; set data.validation to a split, or streaming to false"
            )
        if self.validation == self.train:
            raise UserError(f"data.validation={self.validation} is the split of data.train; name another one")
        shown, apart = (
            Found(f"{show(f'data.path={self.path}')} data.{key}={split}", Path(), [], True, split)
            for key, split in (("train", self.train), ("validation", self.validation))
        )
        how = self._how(vocab)
        first = [line.text for line in itertools.islice(self.read_rows(shown), _FIRST)]
        if not first:
            raise UserError(f"{shown.shown}: there is no document; name a split that has some")
        held_out = itertools.islice(self.read_rows(apart), self.eval_sequences or None)
        stream = _Stream(
            shown.shown, self.maker(how), how.dtype, hashlib.sha256(b"\0".join(first)).hexdigest()[:16], self
        )
        validation = read_corpus(stream, list(self.expand(held_out)))
        split = Split(concatenate([], how.dtype), validation, f"data.validation={self.validation}")
        ends = self.ends(how.tokenizer)
        facts = {
            "split": self.train,
            "shuffle buffer": f"{self.shuffle_buffer:,} rows",
            "tokenizer": show(self.tokenizer or "bytes"),
        }
        source = make_source(self.kind, split, how.tokenizer, vocab=how.tokenizer.vocab, **facts)
        summary = {**source.summary, "train": "a stream, tokenized as it is read"}
        return dataclasses.replace(
            source, summary=summary, stream=stream, ends=ends if self.answers else (), whole=None
        )

    def open(self, split: str, readers: int = 1) -> Any:
        """Return a split as a `datasets.Dataset`, or of a stream as an `IterableDataset` for so many readers.

        Raises `UserError` if there is none.
        """
        shown = show(f"data.path={self.path}")
        with self.library(shown) as datasets:
            if self._is_saved:
                if own := "data.subset" * bool(self.subset) or "data.data_files" * bool(self.data_files):
                    raise UserError(f"{shown} is a folder of save_to_disk, which is read whole; leave {own} out")
                rows = _saved(datasets.load_from_disk(self._folder), split, shown)
                # Readers can share its shards equally if it has enough rows.
                shards = readers * max(1, min(_SHARDS, len(rows)) // readers)
                return rows.to_iterable_dataset(num_shards=min(shards, max(1, len(rows)))) if self.streaming else rows
            builder = datasets.load_dataset_builder(**self._names())
            _check_split(split, builder.info.splits or builder.config.data_files or (), shown)
            if self.streaming:
                if "[" in split or "+" in split:
                    raise UserError(
                        f"{shown} split {show(split)}: streaming reads whole splits; name one, or set streaming=false"
                    )
                return builder.as_streaming_dataset(split=split)
            builder.download_and_prepare()
            return builder.as_dataset(split=split)

    def _overlap(self, *specs: str) -> str:
        """Return the split of which two specifications have the same rows; empty for none."""
        if self._is_saved:
            return specs[0] if specs[0] == specs[1] else ""
        splits = self.open(specs[0]).info.splits
        with self.library(show(f"data.path={self.path}")) as datasets:
            sizes = {str(name): info.num_examples for name, info in splits.items()}
            first, second = (datasets.ReadInstruction.from_spec(spec).to_absolute(sizes) for spec in specs)
        pairs = itertools.product(first, second)
        return next(
            (a.splitname for a, b in pairs if a.splitname == b.splitname and a.from_ < b.to and b.from_ < a.to), ""
        )

    @property
    def _folder(self) -> Path:
        return Path(os.path.expanduser(self.path or ""))

    @property
    def _is_saved(self) -> bool:
        """Whether `path` is a folder that `save_to_disk` wrote."""
        return any((self._folder / name).is_file() for name in ("dataset_dict.json", "state.json"))

    def _names(self) -> dict[str, Any]:
        """Return the arguments by which the library finds a data set that is not in a folder of `save_to_disk`."""
        files = {split: os.path.expanduser(pattern) for split, pattern in self.data_files.items()}
        found = _HUB.fullmatch(self.path or "")
        if self.path in _READERS:
            if not files:
                raise UserError(f"data.path={self.path} reads files; set data.data_files.train=FILES")
            if self.subset is not None:
                raise UserError(f"data.path={self.path} reads files, which have no subsets; leave data.subset out")
            for split, pattern in files.items():
                if "://" not in pattern and not glob.glob(pattern, recursive=True):
                    raise UserError(f"{show(f'data.data_files.{split}={pattern}')} matches no file; correct it")
            return {"path": self.path, "data_files": files}
        if found is None and not self._folder.is_dir():
            instead = "choose data=jsonl or data=chat for files" if self._folder.is_file() else "name one of these"
            raise UserError(
                f"{show(f'data.path={self.path}')} is neither hf://ORG/NAME nor a folder, nor one of "
                f"{', '.join(_READERS)}; {instead}"
            )
        if found is not None and os.path.exists(found["name"]):
            raise UserError(f"data.path={self.path}: datasets would read {found['name']} here; start in another folder")
        where = {"path": str(self._folder)} if found is None else {"path": found["name"], "revision": found["revision"]}
        return {**where, "name": self.subset, "data_files": files or None}

    def columns(self, rows: Any, shown: str) -> list[str]:
        """Return the names of the columns; a stream may know them from its first row alone."""
        with self.library(shown):
            return rows.column_names or [*next(iter(rows), {})]

    @contextlib.contextmanager
    def library(self, shown: str) -> Iterator[Any]:
        """Yield the library, quiet, and without the network unless that is asked for; its errors become `UserError`."""
        try:
            import datasets.config
            import datasets.distributed
            import huggingface_hub.constants as hub
        except ImportError:
            raise UserError(f"{shown} needs the library datasets; pip install 'moezoo[hf]'") from None
        with _SETTING, contextlib.ExitStack() as held:
            for each, name in ((datasets.config, "HF_HUB_OFFLINE"), (hub, "HF_HUB_OFFLINE")):
                held.callback(setattr, each, name, getattr(each, name))
                setattr(each, name, getattr(each, name) or not self.download)
            held.callback(datasets.logging.set_verbosity, datasets.logging.get_verbosity())
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)
            if datasets.is_progress_bar_enabled():
                held.callback(datasets.enable_progress_bars)
                datasets.disable_progress_bars()
            try:
                yield datasets
            except UserError:
                raise
            except ConnectionError as error:
                why = f"cannot be reached ({one_line(error)}); try again later"
                if datasets.config.HF_HUB_OFFLINE:
                    why = "is not in the local cache of datasets; set data.download=true, or name a folder"
                raise UserError(f"{shown} {why}") from error
            except Exception as error:  # of many kinds
                reason = one_line(error.__cause__ or error)
                raise UserError(f"{shown} cannot be read by datasets ({reason}); correct it, or the files") from error


@dataclasses.dataclass(frozen=True)
class _Stream(Stream):
    """The rows of a split, in random order."""

    settings: DataSet

    def chunks(self, reader: int, readers: int, seed: int, place: Any) -> Iterator[Chunk]:
        settings, at = self.settings, {"epoch": 0, "chunk": 0, "state": None} if place is None else place
        rows = settings.select(settings.open(settings.train, readers), self.shown)
        with settings.library(self.shown) as datasets:
            # The library's state has not the rows of its shuffle buffer, so it gets a buffer of one row, and shuffles
            # the order of shards alone.
            rows = rows.shuffle(seed=seed, buffer_size=1, max_buffer_input_shards=1)
            rows = datasets.distributed.split_dataset_by_node(rows, rank=reader, world_size=readers)
            if at["state"] is not None:
                rows.load_state_dict(at["state"])
        while True:
            epoch = at["epoch"]
            rows.set_epoch(epoch)
            for batch in settings.read_batches(rows, settings.shuffle_buffer or BUFFER, self.shown):
                shown = f"{self.shown} reader {reader} epoch {epoch} chunk {at['chunk']}"
                lines = list(settings.convert(batch, shown, 1))
                if settings.shuffle_buffer:
                    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, at["chunk"], reader], np.uint64)
                    order = np.argsort(np.random.Philox(key=key, counter=counter).random_raw(len(lines)), kind="stable")
                    lines = [lines[number] for number in order]
                yield Chunk(list(settings.expand(lines)), epoch, at)
                at = {"epoch": epoch, "chunk": at["chunk"] + 1, "state": rows.state_dict()}
            if at["chunk"] == 0:
                raise UserError(f"{self.shown} has no row for process {reader} of {readers}; use fewer processes")
            at = {"epoch": epoch + 1, "chunk": 0, "state": None}

    def notes(self, readers: int) -> list[str]:
        shards = self.settings.open(self.settings.train, readers).num_shards
        if shards % readers == 0:
            return []
        return [
            f"{self.shown} has {counted(shards, 'shard')}, which {readers} processes cannot share equally: each reads "
            f"all rows and keeps 1 in {readers}"
        ]


@dataclasses.dataclass(frozen=True)
class Hf(DataSet):
    """A data set of text: the text in the column `field` of each row is a document."""

    field: str = "text"

    kind: ClassVar[str] = "hf"

    @property
    def reader(self) -> str:
        return f"hf {self.field}"

    def documents(self, found: Found) -> Iterator[Document]:
        return self.read_rows(found)

    def select(self, rows: Any, shown: str) -> Any:
        names = self.columns(rows, shown)
        if self.field not in names:
            near = nearest(self.field, names) if names else "there is none"
            raise UserError(f"{shown} has no column {show(self.field)}; {near}; set data.field")
        return rows.select_columns([self.field])

    def convert(self, batch: Mapping[str, list[Any]], shown: str, number: int) -> Iterator[Document]:
        for place, text in enumerate(batch[self.field], number):
            where = f"{shown} row {place}"
            if not isinstance(text, str):
                raise UserError(f"{where}: column {show(self.field)} is {kind(text)}, not a string; set data.field")
            yield Document(text.encode(), where)

    def expand(self, lines: Iterable[Document]) -> Iterator[Document]:
        return iter(lines)

    def maker(self, how: How) -> Make:
        return all_of_text(how.tokenizer, how.dtype, how.end)


@dataclasses.dataclass(frozen=True)
class HfChat(Chat, DataSet):
    """A data set of chats: each row is a record as `moezoo.data.Chat` reads it from a file.

    All have one form. Of a stream, no chats are counted: `refused=stop` ends the run at the first refused one, and
    `drop` leaves them out.
    """

    kind: ClassVar[str] = "hf_chat"

    @property
    def reader(self) -> str:
        return f"hf {super().reader}"

    def _read(self, found: Found, how: How) -> TokenFiles:
        return super()._read(found, self.of_part(found, how))

    def documents(self, found: Found, seen: Seen | None = None) -> Iterator[Document]:
        return self._of_one_form(self.read_rows(found), seen or Seen(drop=True))

    def select(self, rows: Any, shown: str) -> Any:
        return rows.select_columns(self._choose(self.columns(rows, shown)))

    def convert(self, batch: Mapping[str, list[Any]], shown: str, number: int) -> Iterator[Document]:
        for place, values in enumerate(zip(*batch.values(), strict=True), number):
            record = without_nulls(dict(zip(batch, values, strict=True)))
            text = json.dumps(record, default=str, ensure_ascii=False)
            yield Document(text.encode(), f"{shown} row {place}", container="a data set")

    def expand(self, lines: Iterable[Document]) -> Iterator[Document]:
        return self._of_one_form(lines, Seen(drop=True))

    def maker(self, how: How) -> Make:
        chats = self.format()
        make = self._maker(chats, how.dtype, Seen(drop=self.refused == "drop", at_once=True))
        weakref.finalize(make, chats.close)
        return make


def _saved(found: Any, split: str, shown: str) -> Any:
    """Return a split of what `load_from_disk` has read."""
    splits = found if isinstance(found, dict) else {str(found.split or "train"): found}
    if split not in splits:
        raise UserError(f"{shown} has no split {show(split)}; {nearest(split, splits)}")
    return splits[split]


def _check_split(split: str, splits: Iterable[str], shown: str) -> None:
    """Raise `UserError` unless every split is there of which `split` has a part."""
    for name in (part.split("[")[0].strip() for part in split.split("+")):
        if name not in (known := [str(each) for each in splits]):
            raise UserError(f"{shown} has no split {show(split)}; {nearest(name, known)}")
