"""Documents from files: the standard library's source code, and text files and folders."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moezoo.data.corpus import Corpus, Split, concatenate, dtype_for, hold_out, select_held_out_by_name
from moezoo.data.settings import Text
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import Bytes, Tokenizer, document_ids, text_tokenizer
from moezoo.errors import UserError

# Installed packages and tests are not the library; tables of characters and help texts are not code.
_NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3", "__pycache__")
)


class NamedCorpus(NamedTuple):
    """Documents with a name each, and how many files were passed over because they are not text."""

    corpus: Corpus
    names: list[str]
    passed_over: int


def load_python_stdlib(*, vocab: int) -> Source:
    """The standard library of the running Python as bytes; a file is held out by a hash of its path."""
    require_vocab("data=python_stdlib has 256 byte values", Bytes.vocab, vocab)
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in _files(root, ".py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    if not paths:
        raise UserError(f"data=python_stdlib finds no *.py file in {root}; use data=text data.path=FILE_OR_FOLDER")
    corpus = concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in paths], np.dtype(np.uint8))
    names = [path.relative_to(root).as_posix() for path in paths]
    # Every interpreter has a library of its own, so losses compare only where this line and the hash agree.
    version = f"{platform.python_implementation()} {platform.python_version()}"
    split = hold_out(corpus, select_held_out_by_name(names), names)
    return make_source("python_stdlib", split, Bytes(), vocab=256, sha256=_digest(corpus), python=version)


def load_text(settings: Text, *, vocab: int) -> Source:
    """A file or folder of text, with validation files of its own or a part held out.

    Raises `UserError` for a path that is not there, is not UTF-8 text, or holds no file that validation leaves.
    """
    path, own = settings.path, settings.validation
    if path is None:
        raise UserError("data.path is required for data=text; pass data.path=FILE_OR_FOLDER")
    tokenizer = text_tokenizer(settings.tokenizer, key="data.tokenizer")
    if settings.tokenizer is None:
        require_vocab("data=text without data.tokenizer has 256 byte values", tokenizer.vocab, vocab)
    else:
        require_vocab(f"data.tokenizer has {tokenizer.vocab} tokens", tokenizer.vocab, vocab)
    paths = find_documents(path, key="data.path")
    if own is None:
        read = _read(paths, path, tokenizer, key="data.path")
        split = hold_out(read.corpus, select_held_out_by_name(read.names), read.names)
    else:
        apart = find_documents(own, key="data.validation")
        # Validation files may lie in a subfolder of the training ones, and must not be trained on.
        withheld = {file.resolve() for file in apart}
        paths = [file for file in paths if file.resolve() not in withheld]
        if not paths:
            raise UserError(f"data.validation={own} holds every file of data.path={path}; give different files")
        read = _read(paths, path, tokenizer, key="data.path")
        held_out = _read(apart, own, tokenizer, key="data.validation")
        split = Split(read.corpus, held_out.corpus, f"data.validation={own}", tuple(held_out.names))
    extra = {"passed over": f"{read.passed_over} files that are not UTF-8 text"} if read.passed_over else {}
    return make_source("text", split, tokenizer, vocab=tokenizer.vocab, sha256=_digest(read.corpus), **extra)


def find_documents(path: str, *, key: str) -> list[Path]:
    """The file `path`, or all files under the folder `path` but hidden ones, sorted by path.

    Raises `UserError`, naming `key`, where there is none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"{key}={path} does not exist; give a text file or a folder of them")
    found = [file for file in _files(root) if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    if not found:
        raise UserError(f"{key}={path} is a folder without files; give a text file or a folder of them")
    return found


def read_documents(paths: Sequence[Path], path: str, *, key: str) -> Iterator[tuple[str, bytes]]:
    """The name and the text of each of `paths` that is UTF-8; in a folder `path`, other files are passed over.

    A name is the path inside the folder. Raises `UserError`, naming `key`, for a file that cannot be read, for a
    `path` that is one file and not UTF-8, and for a folder without any text.
    """
    root = Path(path).expanduser()
    alone = root.is_file()
    empty = True
    for file in paths:
        try:
            content = file.read_bytes()
            content.decode()
        except OSError as error:
            raise UserError(f"{key}={path}: {file} cannot be read ({error.strerror}); make it readable") from error
        except UnicodeDecodeError as error:
            if alone:
                raise UserError(
                    f"{key}={path} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}; "
                    "convert it to UTF-8"
                ) from error
            continue
        if alone or b"\0" not in content:  # images and archives of zeros decode as UTF-8 too
            empty = False
            yield root.name if alone else file.relative_to(root).as_posix(), content
    if empty:
        raise UserError(
            f"{key}={path} holds no UTF-8 text (files read: {len(paths)}); give a text file or a folder of them"
        )


def _read(paths: Sequence[Path], path: str, tokenizer: Tokenizer, *, key: str) -> NamedCorpus:
    names, documents = [], []
    dtype = dtype_for(tokenizer.vocab)
    for name, content in read_documents(paths, path, key=key):
        names.append(name)
        documents.append(document_ids(tokenizer, content, dtype))
    return NamedCorpus(concatenate(documents, dtype), names, len(paths) - len(names))


def _files(root: Path, suffix: str = "") -> list[Path]:
    """All regular files under `root` by path, so that their order does not depend on the file system."""
    found = [Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(suffix)]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _digest(corpus: Corpus) -> str:
    """The first 16 digits of the SHA-256 of the tokens of both splits."""
    return hashlib.sha256(corpus.tokens.data).hexdigest()[:16]
