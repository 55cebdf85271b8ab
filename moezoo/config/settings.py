"""The configuration of a run as frozen dataclasses; `moezoo.config.compose` fills them from the groups of `conf/`."""

import dataclasses
from typing import Annotated, Any

from moezoo.data import SOURCES, DataSettings
from moezoo.errors import check_type
from moezoo.kernels.attention import BACKENDS as ATTENTION
from moezoo.kernels.grouped_matmul import BACKENDS as GROUPED_MATMUL
from moezoo.models import FAMILIES, ModelConfig
from moezoo.moe.dispatch import DISPATCHES, DispatchChoice
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.optim import SCHEDULES, UPDATE_RULES, GuardSettings, Schedule, UpdateRule
from moezoo.parallel.context_parallel import ContextParallel
from moezoo.parallel.distributed import DISTRIBUTED, Distributed
from moezoo.parallel.execution import DType, RoutingChoice, check_dtype
from moezoo.parallel.mesh import MeshShape
from moezoo.parallel.remat import Remat
from moezoo.parallel.rules import Rules
from moezoo.parallel.sequence_order import SequenceOrder
from moezoo.typed import Count, Name, NotNegative, Range, Size, check_fields


class ContextParallelName(Name):
    """`gather`, `ring`, and what else is registered."""

    registry = CONTEXT_PARALLEL


class GroupedMatmulName(Name):
    """The name of a backend of `grouped_matmul`."""

    registry = GROUPED_MATMUL


class AttentionName(Name):
    """The name of a backend of attention."""

    registry = ATTENTION


@dataclasses.dataclass(frozen=True)
class ExecutionSettings:
    """How the model runs, except mesh, rules and dispatch.

    - `dtype`: dtype in which layers compute; weights are gathered in it, or as they are stored if that is narrower.
    - `param_dtype`: dtype of stored parameters.
    - `reduce_dtype`: dtype in which gradients are summed over devices.
    - `microbatches`: number of micro-steps per step; their gradients are summed.
    - `context_parallel`: how queries meet keys of other devices where the rules split the sequence: a name, or a value.
    - `sequence_order`: the order of tokens there, as in `moezoo.parallel.sequence_order`; with None, `balanced`, except
      where every layer has a window.
    - `grouped_matmul`, `attention`: backends of these kernels in the order in which they are tried; with None, the
      target and the sizes decide.
    - `remat`, `routing`: what a layer keeps for its backward pass, and who chooses experts, as in `Execution`.
    """

    dtype: DType = "float32"
    param_dtype: DType = "float32"
    reduce_dtype: DType = "float32"
    remat: Remat = "full"
    microbatches: Size = 1
    context_parallel: ContextParallelName | ContextParallel = "gather"  # pyright: ignore[reportAssignmentType] a name is text
    sequence_order: SequenceOrder | None = None
    grouped_matmul: tuple[GroupedMatmulName, ...] | None = None
    attention: tuple[AttentionName, ...] | None = None
    routing: RoutingChoice = "learned"

    def __post_init__(self):
        for name in ("dtype", "param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, check_dtype(f"execution.{name}", getattr(self, name)).name)
        check_fields("execution", self)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run; the comments in `conf/train.yaml` describe each key.

    `batch_size` is the number of sequences per step, over all devices together. 0 turns an `*_every` off. Every section
    and every value is checked when it is made, in Python as on the command line: `dataclasses.replace` too raises
    `UserError`.
    """

    model: ModelConfig
    mesh: MeshShape
    rules: Rules
    dispatch: DispatchChoice
    optimizer: UpdateRule
    schedule: Schedule
    data: DataSettings
    distributed: Distributed
    execution: ExecutionSettings
    guard: GuardSettings
    steps: Size
    seed: Annotated[int, Range(at_least=0, at_most=2**32 - 1)]
    batch_size: Size
    seq_len: Annotated[int, Range(at_least=2)]
    # Keys with a default are missing from runs of older versions.
    trained: tuple[str, ...] | None = dataclasses.field(default=None, kw_only=True)
    frozen: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    run_dir: str | None
    resume: str | None
    eval_every: Count
    checkpoint_minutes: NotNegative | None = dataclasses.field(default=None, kw_only=True)
    checkpoint_every: Count
    checkpoint_keep: Size
    log_every: Count
    cache_dir: str | None = dataclasses.field(default="auto", kw_only=True)

    def __post_init__(self):
        check_fields("", self)


def check_config(cfg: Any) -> None:
    """Raise `UserError` unless the argument `cfg` of a public function is a `TrainConfig`."""
    check_type("cfg", cfg, TrainConfig, 'write cfg = moezoo.compose("model=mixtral")')


# group -> (the key that chooses the class, the classes by name); its other keys are fields of the class
TAG: dict[str, tuple[str, dict[str, type]]] = {
    "model": ("family", {name: family.config for name, family in FAMILIES.items()}),
    "dispatch": ("name", DISPATCHES),
    "optimizer": ("name", UPDATE_RULES),
    "schedule": ("name", SCHEDULES),
    "data": ("name", SOURCES),
    "distributed": ("name", DISTRIBUTED),
}
# The same for sections inside a group's.
INNER_TAG: dict[str, tuple[str, dict[str, type]]] = {"data.sources.*": TAG["data"]}
