"""Data: documents, split into training and validation, and read in rows. Only NumPy; nothing here starts JAX."""

from moezoo.data.base import DataSettings as DataSettings
from moezoo.data.base import load as load
from moezoo.data.batches import train_batches as train_batches
from moezoo.data.batches import validation_batches as validation_batches
from moezoo.data.chat import Chat as Chat
from moezoo.data.corpus import Corpus as Corpus
from moezoo.data.hf import Hf as Hf
from moezoo.data.hf import HfChat as HfChat
from moezoo.data.jsonl import Jsonl as Jsonl
from moezoo.data.jsonl import Parquet as Parquet
from moezoo.data.mixture import Mixture as Mixture
from moezoo.data.mixture import Weighted as Weighted
from moezoo.data.python_stdlib import PythonStdlib as PythonStdlib
from moezoo.data.rows import Batch as Batch
from moezoo.data.source import Source as Source
from moezoo.data.synthetic import Synthetic as Synthetic
from moezoo.data.text import Text as Text
from moezoo.data.tokens import Tokens as Tokens
from moezoo.data.tokens import tokenize_files as tokenize_files
from moezoo.data.trigram import trigram_loss as trigram_loss

SOURCES: dict[str, type[DataSettings]] = {
    "python_stdlib": PythonStdlib,
    "text": Text,
    "jsonl": Jsonl,
    "parquet": Parquet,
    "chat": Chat,
    "hf": Hf,
    "hf_chat": HfChat,
    "tokens": Tokens,
    "synthetic": Synthetic,
    "mixture": Mixture,
}
