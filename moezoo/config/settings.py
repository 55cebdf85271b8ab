"""Everything a run is told, as frozen dataclasses; `moezoo.config.compose` fills them from the YAML groups of `conf/`.

A group whose entries differ in kind (dispatch, optimizer, schedule, data, model) is a registry: the key named in
`TAG` picks the class and the other keys are that class's fields. Nothing here computes.
"""

import dataclasses
from typing import Literal

from moezoo.data import SOURCES, DataSettings
from moezoo.kernels.attention import Implementation as AttentionBackend
from moezoo.kernels.grouped_matmul import Implementation as GroupedMatmulBackend
from moezoo.models import FAMILIES, ModelConfig
from moezoo.moe.dispatch import STRATEGIES, Dispatch
from moezoo.optim import SCHEDULES, UPDATE_RULES, Schedule, UpdateRule
from moezoo.parallel.distributed import DISTRIBUTED, Distributed
from moezoo.parallel.execution import DType, check_dtype
from moezoo.parallel.mesh import MeshShape
from moezoo.parallel.rules import Rules


@dataclasses.dataclass(frozen=True)
class GuardSettings:
    """Which steps are not taken: parameters, moments and the choice bias stay as they were, and the data goes on.

    A step whose loss or gradient norm is not finite, ever; one whose `loss` or `gradient_norm` is more than so many
    times its running mean over accepted steps, once there were 20; null asks for no such thing. After `patience`
    skipped steps in a row the run ends.
    """

    loss: float | None = 3.0
    gradient_norm: float | None = 10.0
    patience: int = 10


@dataclasses.dataclass(frozen=True)
class ExecutionSettings:
    """How the model runs beyond mesh, rules and dispatch.

    `dtype` is what layers compute in and what weights are cast to before they are gathered, `param_dtype` what
    parameters and moments are stored in, `reduce_dtype` what gradients are summed over devices in. `remat` says what a
    layer keeps for its backward pass: `full` its input only, `offload` its input in the host's memory, `dots` the
    results of matrix products too, `none`
    everything but gathered weights. `microbatches` splits a step's batch into micro-steps whose gradients are summed.
    `context_parallel` says how queries meet keys of other devices where the rules split the sequence. `grouped_matmul`
    and `attention` name backends of these kernels in the order in which they are tried; null leaves the choice to the
    devices and sizes compiled for. `routing`: whether the router chooses experts or, to measure speed, chance or turns
    do.
    """

    dtype: DType = "float32"
    param_dtype: DType = "float32"
    reduce_dtype: DType = "float32"
    remat: Literal["full", "offload", "dots", "none"] = "full"
    microbatches: int = 1
    context_parallel: Literal["gather"] = "gather"
    grouped_matmul: tuple[GroupedMatmulBackend, ...] | None = None
    attention: tuple[AttentionBackend, ...] | None = None
    routing: Literal["learned", "random", "balanced"] = "learned"

    def __post_init__(self):
        for name in ("dtype", "param_dtype", "reduce_dtype"):
            check_dtype(f"execution.{name}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. `batch_size` is sequences a step over all devices together; 0 turns an `*_every` off."""

    model: ModelConfig
    mesh: MeshShape
    rules: Rules
    dispatch: Dispatch
    optimizer: UpdateRule
    schedule: Schedule
    data: DataSettings
    distributed: Distributed
    execution: ExecutionSettings
    guard: GuardSettings
    steps: int
    seed: int
    batch_size: int
    seq_len: int
    run_dir: str | None
    resume: str | None
    eval_every: int
    checkpoint_minutes: float | None = dataclasses.field(
        default=None, kw_only=True
    )  # runs saved before have no such key
    checkpoint_every: int
    checkpoint_keep: int
    log_every: int


# field -> (the key that picks the class, the classes by name)
TAG: dict[str, tuple[str, dict[str, type]]] = {
    "model": ("family", {name: family.config for name, family in FAMILIES.items()}),
    "dispatch": ("name", STRATEGIES),
    "optimizer": ("name", UPDATE_RULES),
    "schedule": ("name", SCHEDULES),
    "data": ("name", SOURCES),
    "distributed": ("name", DISTRIBUTED),
}
