"""Load the data that settings describe."""

from moezoo.convert import Range, convert
from moezoo.data.base import DataSettings
from moezoo.data.source import Source
from moezoo.errors import UserError, check_type


def load(settings: DataSettings, *, seq_len: int, seed: int, vocab: int) -> Source:
    """Read the data that `settings` describe. Text is read into memory; token files stay on disk.

    Args:
        settings: an entry of the configuration group `data`.
        seq_len: tokens per window.
        seed: decides synthetic data only; the held-out documents never depend on it.
        vocab: the vocabulary size of the model.

    Raises:
        UserError: the data are missing or damaged, their vocabulary is larger than the model's, or a split has less
            than one window.
    """
    check_type("settings", settings, DataSettings, "write moezoo.data.Text(path=...), or take cfg.data")
    seq_len = convert(int, seq_len, "seq_len", valid=Range(at_least=1))
    seed = convert(int, seed, "seed", valid=Range(at_least=0, at_most=2**32 - 1))
    vocab = convert(int, vocab, "vocab", valid=Range(at_least=1))
    source = settings.load(seed=seed, vocab=vocab)
    for split, corpus in (("training", source.train), ("validation", source.validation)):
        if len(corpus) < seq_len + 1:
            raise UserError(
                f"data={source.name} leaves {len(corpus)} {source.unit}s for {split}, but seq_len={seq_len} needs "
                f"{seq_len + 1} for one window; give more data or a smaller seq_len"
            )
    return source
