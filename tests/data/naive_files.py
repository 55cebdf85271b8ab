"""The documents and windows of a run on files, read in plain Python that shares no code with moezoo."""

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Encode = Callable[[str], list[int]]


Shard = list[list[int]]  # documents, as token ids


def read_lines(folder: Path) -> list[str]:
    """Return the texts of all JSONL files, sorted by path; .gz ones are unpacked."""
    found = []
    for path in sorted(folder.rglob("*.jsonl*"), key=lambda path: path.relative_to(folder).as_posix()):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        found += [json.loads(line)["text"] for line in content.decode().split("\n") if line.strip()]
    return found


def cut_by_size(texts: list[str], encode: Encode, size: int) -> list[Shard]:
    """Return shards of at least `size` bytes of text, the last one of the rest."""
    shards, room = [Shard()], size
    for text in texts:
        if room <= 0:
            shards.append(Shard())
            room = size
        shards[-1].append(encode(text))
        room -= len(text.encode())
    return shards


def mix(x: int) -> int:
    """Return the last step of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def content_hash(document: list[int]) -> int:
    """Return the hash of a document that decides on which side it is."""
    total = sum(mix(index * 2**32 + id) for index, id in enumerate(document))
    return mix((total + (len(document) + 1) * 0x9E3779B97F4A7C15) % 2**64)


def is_held_out(document: list[int]) -> bool:
    """Return whether 1/20 of all documents has this one."""
    return content_hash(document) % 20 == 0


def chat_hash(documents: list[list[int]]) -> int:
    """Return the hash of a chat, of which each document is a part."""
    hashes = [(content_hash(document) + (i + 1) * 0x9E3779B97F4A7C15) % 2**64 for i, document in enumerate(documents)]
    return mix(sum(map(mix, hashes)) % 2**64)


def rows(shards: list[Shard], *, seed: int, seq_len: int) -> Iterator[list[list[int]]]:
    """Yield the tokens, labels, segments and positions of one row after another, epoch after epoch, without end."""
    chosen = [[document for document in shard if not is_held_out(document)] for shard in shards]
    for epoch in itertools.count():
        draw = iter(np.random.Philox(key=[seed, epoch]).random_raw(10**5).tolist())
        of_shard = [next(draw) for _ in chosen]
        keyed = [(of_shard[i], next(draw), document) for i, part in enumerate(chosen) for document in part]
        stream = [(n, place, id) for n, (*_, document) in enumerate(sorted(keyed)) for place, id in enumerate(document)]
        for begin in range(0, len(stream) - 1, seq_len):
            part = stream[begin : begin + seq_len + 1]
            row, segment, position = [], 0, 0
            for i in range(seq_len):
                if i >= len(part):
                    row.append((0, -1, 0, 0))
                    continue
                new = i == 0 or part[i][0] != part[i - 1][0]
                segment, position = segment + new, 0 if new else position + 1
                goes_on = i + 1 < len(part) and part[i + 1][0] == part[i][0]
                row.append((part[i][2], part[i + 1][2] if goes_on else -1, segment, position))
            yield [list(column) for column in zip(*row, strict=True)]


Row = list[list[int]]  # tokens, labels, segments and positions


def pack(documents: list[list[int]], seq_len: int, buffer: int) -> list[Row]:
    """Return rows of whole documents; a long one becomes parts first, of which each begins with the last token before.

    Of each `buffer` documents the longest goes first, into the fullest row that has room for it.
    """
    parts = [part for document in documents for part in cut_long(document, seq_len)]
    rows = []
    for begin in range(0, len(parts), buffer):
        some, boxes = parts[begin : begin + buffer], []
        for number in sorted(range(len(some)), key=lambda i: (-len(some[i]), i)):
            fitting = [box for box in boxes if sum(len(some[i]) - 1 for i in [*box, number]) <= seq_len]
            if fitting:
                max(fitting, key=lambda box: sum(len(some[i]) - 1 for i in box)).append(number)
            else:
                boxes.append([number])
        rows += [[some[i] for i in sorted(box)] for box in sorted(boxes, key=min)]
    return [lay_out(row, seq_len) for row in rows]


def cut_long(document: list[int], seq_len: int) -> list[list[int]]:
    """Return parts that predict at most `seq_len` tokens each."""
    return [document[at : at + seq_len + 1] for at in range(0, len(document) - 1, seq_len)]


def lay_out(documents: list[list[int]], seq_len: int) -> Row:
    """Return the row that holds documents one after another."""
    places = [
        (document[i], document[i + 1], segment, i)
        for segment, document in enumerate(documents, 1)
        for i in range(len(document) - 1)
    ]
    return [list(column) for column in zip(*places, *[(0, -1, 0, 0)] * (seq_len - len(places)), strict=True)]


def packed_rows(shards: list[Shard], *, seed: int, seq_len: int, buffer: int) -> Iterator[Row]:
    """Yield packed rows of the documents that are trained on, epoch after epoch, without end."""
    chosen = [
        [part for document in shard if not is_held_out(document) for part in cut_long(document, seq_len)]
        for shard in shards
    ]
    for epoch in itertools.count():
        draw = iter(np.random.Philox(key=[seed, epoch]).random_raw(10**5).tolist())
        of_shard = [next(draw) for _ in chosen]
        keyed = [(of_shard[i], next(draw), part) for i, parts in enumerate(chosen) for part in parts]
        yield from pack([part for *_, part in sorted(keyed)], seq_len, buffer)
