"""Data: a corpus of documents, split in two, and read in windows. NumPy only; nothing here starts JAX."""

from moezoo.data.batches import train_batches, validation_batches
from moezoo.data.corpus import Corpus
from moezoo.data.loading import load
from moezoo.data.settings import SOURCES, DataSettings, PythonStdlib, Synthetic, Text, Tokens
from moezoo.data.source import Source
from moezoo.data.tokens import tokenize_files
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
