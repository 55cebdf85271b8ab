"""Data: documents, split into training and validation, and read in windows. Only NumPy; nothing here starts JAX."""

from moezoo.data.base import DataSettings, load
from moezoo.data.batches import train_batches, validation_batches
from moezoo.data.corpus import Corpus
from moezoo.data.python_stdlib import PythonStdlib
from moezoo.data.source import Source
from moezoo.data.synthetic import Synthetic
from moezoo.data.text import Text
from moezoo.data.tokens import Tokens, tokenize_files
from moezoo.data.trigram import trigram_loss
from moezoo.data.windows import Batch

__all__ = [
    "SOURCES",
    "Batch",
    "Corpus",
    "DataSettings",
    "PythonStdlib",
    "Source",
    "Synthetic",
    "Text",
    "Tokens",
    "load",
    "tokenize_files",
    "train_batches",
    "trigram_loss",
    "validation_batches",
]

SOURCES: dict[str, type[DataSettings]] = {
    "python_stdlib": PythonStdlib,
    "text": Text,
    "tokens": Tokens,
    "synthetic": Synthetic,
}
