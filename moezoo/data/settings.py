"""What the `data` group of the configuration may say: one frozen dataclass a source. Nothing here reads data."""

import dataclasses
from typing import Any

from moezoo.errors import UserError


def _at_least(settings: Any, field: str, least: int) -> None:
    value = getattr(settings, field)
    if value < least:
        raise UserError(f"data.{field}={value} must be at least {least}")


@dataclasses.dataclass(frozen=True)
class PythonStdlib:
    """The source code of the running Python's standard library as raw bytes, one document a file.

    It is on every machine and needs no download. `eval_sequences` is how many validation windows an evaluation reads,
    evenly spaced over the validation split; 0 reads all of them.
    """

    eval_sequences: int = 256

    def __post_init__(self):
        _at_least(self, "eval_sequences", 0)


@dataclasses.dataclass(frozen=True)
class Text:
    """UTF-8 text: a file, or a folder with one document a file.

    `tokenizer` is a Hugging Face `tokenizer.json`; without one a token is a raw byte. `validation` is a second file or
    folder to validate on; without one a part of `path` is held out.
    """

    path: str | None = None
    tokenizer: str | None = None
    validation: str | None = None
    eval_sequences: int = 256

    def __post_init__(self):
        _at_least(self, "eval_sequences", 0)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token ids made by `moezoo prepare-data`: a `.npy` file that stays on disk, with document offsets beside it.

    `validation` is a second such file to validate on; without one a part of `path` is held out.
    """

    path: str | None = None
    validation: str | None = None
    eval_sequences: int = 256

    def __post_init__(self):
        _at_least(self, "eval_sequences", 0)


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """A random Markov chain whose entropy is known: each token has `successors` equally likely next ones.

    No model can do better than ln(`successors`) nats a token. `documents` of `document_length` tokens are drawn; the
    chain and the draws follow from the run's seed.
    """

    vocab: int = 256
    successors: int = 4
    documents: int = 2000
    document_length: int = 1000
    eval_sequences: int = 256

    def __post_init__(self):
        _at_least(self, "successors", 1)
        _at_least(self, "documents", 1)
        _at_least(self, "document_length", 2)
        _at_least(self, "eval_sequences", 0)
        if self.vocab < self.successors:
            raise UserError(
                f"data.successors={self.successors} are more than data.vocab={self.vocab} tokens to choose from; "
                f"set data.successors={max(self.vocab, 1)} or less"
            )


DataSettings = PythonStdlib | Text | Tokens | Synthetic

SOURCES: dict[str, type] = {"python_stdlib": PythonStdlib, "text": Text, "tokens": Tokens, "synthetic": Synthetic}
