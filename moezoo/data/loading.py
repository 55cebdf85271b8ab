"""From settings to data."""

from moezoo.data.base import DataSettings
from moezoo.data.source import Source
from moezoo.errors import UserError


def load(settings: DataSettings, *, seq_len: int, seed: int, vocab: int) -> Source:
    """Read the data that `settings` names, for windows of `seq_len` tokens and a model of `vocab` tokens.

    `seed` makes synthetic data and nothing else: what is held out never depends on it. Text is read into memory;
    files of tokens stay on disk.

    Raises `UserError` for data that is missing, damaged, has more different tokens than the model, or gives one of the
    splits less than one window.
    """
    if seq_len < 1:
        raise UserError(f"seq_len={seq_len} must be at least 1")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must be from 0 to {2**32 - 1}")
    source = settings.load(seed=seed, vocab=vocab)
    for split, corpus in (("training", source.train), ("validation", source.validation)):
        if len(corpus) < seq_len + 1:
            raise UserError(
                f"data={source.name} leaves {len(corpus)} {source.unit}s for {split}, but seq_len={seq_len} needs "
                f"{seq_len + 1} for one window; give more data or a smaller seq_len"
            )
    return source
