"""The oracle's layers of Llama 4 (Meta, 2025): gates on what experts read, stretches, and layers without rotation."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from oracle import Coordinates, TapedParameters, attend, norm
from oracle_grouped import Grouped
from tape import Value, as_value


@dataclass(frozen=True, kw_only=True)
class Llama4(Grouped):
    """The settings of a model that its arrays do not show. Layers without rotation see all tokens, as released."""

    stretch: int
    plain: Collection[int]
    query_scale: tuple[float, int]  # of layers without rotation
    gates_on_inputs: bool = True

    def attention(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return the attention of one row, computed head by head."""
        queries, keys, values = (self._heads(p, name, layer, x) for name in ("query", "key", "value"))
        visible, positions = at.visible, at.positions
        if layer in self.plain:
            beta, length = self.query_scale
            growth = np.array([1 + beta * math.log((int(position) + 1) // length + 1) for position in positions])
            queries = [query * growth[:, None] for query in queries]
        else:
            visible &= positions[:, None] // self.stretch == positions[None, :] // self.stretch
            queries, keys = (
                [norm(self.rope.rotate(y, positions), as_value(1.0), self.norm_eps) for y in heads]
                for heads in (queries, keys)
            )
        result = as_value(0)
        for head, query in enumerate(queries):
            shared = head * len(keys) // len(queries)
            scores = query @ keys[shared].T / math.sqrt(query.data.shape[1])
            result = result + attend(scores, visible, values[shared]) @ p("out", layer, head)
        return result
