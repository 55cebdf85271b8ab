"""The oracle's layers of MiMo-V2-Flash (Xiaomi, 2025): most have a window and sinks, and all have narrow values."""

from dataclasses import dataclass, replace

from oracle import Coordinates, TapedParameters
from oracle_grouped import Grouped
from oracle_rope import Rope
from tape import Value


@dataclass(frozen=True, kw_only=True)
class Windowed(Grouped):
    """The settings of a model that its arrays do not show; all layers have as many key-value heads."""

    full_rope: Rope  # the positions of layers without a window
    value_scale: float

    def mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return what a layer's attention makes of a row."""
        kind = replace(self, rope=self.full_rope) if layer in self.full else self
        return kind.attention(p, layer, x, at)

    def sink(self, p: TapedParameters, layer: int, head: int) -> Value | None:
        """Return a head's sink, which only layers with a window have."""
        before = sum(i < layer for i in self.full)
        return None if layer in self.full else p("sinks", layer - before, head)

    def _heads(self, p: TapedParameters, name: str, layer: int, x: Value) -> list[Value]:
        heads = super()._heads(p, name, layer, x)
        return [value * self.value_scale for value in heads] if name == "value" else heads
