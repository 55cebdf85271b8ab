"""What an annotation says of a parameter: its role and its logical axes."""

import dataclasses
import enum


class Role(enum.Enum):
    """What a parameter is for: decay, casting, initial values and reduction follow from it."""

    WEIGHT = "weight"
    SCALE = "scale"
    BIAS = "bias"  # trained and counted, never decayed; starts at zero
    EMBEDDING = "embedding"
    BUFFER = "buffer"  # saved and reduced, but never trained, decayed, cast below float32 or counted
    PART = "part"  # of a stored value: laid out and gathered as a weight, never cast, trained only on request


@dataclasses.dataclass(frozen=True)
class Axes:
    """A parameter's role and logical axes: `stacked` ones number independent matrices from `inputs` to `outputs`."""

    role: Role
    stacked: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Logical axes in the order of the array's dimensions."""
        return self.stacked + self.inputs + self.outputs
