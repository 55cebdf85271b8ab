"""Rules: a layout as data. Which mesh axes store, compute and split what; one short YAML file is the whole truth."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """A layout.

    - `store`: logical axis -> mesh axes the dimension is stored over, major to minor;
    - `compute`: logical axis -> mesh axes it stays split over while computing, a prefix of the stored ones (what is
      stored and not computed is gathered);
    - `batch`, `sequence`: mesh axes that split the two dimensions of tokens.
    """

    name: str
    store: Mapping[str, tuple[str, ...]]
    compute: Mapping[str, tuple[str, ...]]
    batch: tuple[str, ...]
    sequence: tuple[str, ...]
