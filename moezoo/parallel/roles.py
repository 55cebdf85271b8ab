"""What an annotation declares about a parameter: its role and its logical axes."""

import dataclasses
import enum


class Role(enum.Enum):
    """What a parameter is for. Casting, training, weight decay and parameter counts follow from it.

    | role | cast to `Execution.dtype` | trained | decayed | counted |
    |---|---|---|---|---|
    | weight | yes | yes | yes | yes |
    | scale, bias, embedding | yes | yes | no | yes |
    | buffer | only to float32, from less | never | no | no |
    | part of a container | no | on request | no | as the container's array |
    | frozen part | no | never | no | as the container's array |
    | frozen weight, the array of a container | yes | never | no | as the container's array |
    """

    WEIGHT = "weight"
    SCALE = "scale"
    BIAS = "bias"
    EMBEDDING = "embedding"
    BUFFER = "buffer"
    PART = "part"
    FROZEN = "frozen part"
    BASE = "frozen weight"


@dataclasses.dataclass(frozen=True)
class Axes:
    """A parameter's role and logical axes.

    Attributes:
        role: What the parameter is for.
        stacked: The axes that number independent matrices, such as `layer` and `expert`.
        inputs: The input axes of a weight; for other roles all axes after the comma.
        outputs: The output axes of a weight; empty for other roles.
        within: For an array of a container, all axes of the weight that the container stands for; for a bias that is
            added to partial sums, those of the weight whose product it is added to.
    """

    role: Role
    stacked: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    within: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is an array of matrices that layers multiply by."""
        return self.role in (Role.WEIGHT, Role.BASE)

    @property
    def names(self) -> tuple[str, ...]:
        """All logical axes, in the order of the array's dimensions."""
        return self.stacked + self.inputs + self.outputs
