"""The configuration of a run as frozen dataclasses; `moezoo.config.compose` fills them from the groups of `conf/`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from moezoo.data import SOURCES, DataSettings
from moezoo.errors import UserError, check_type
from moezoo.hub.kept import Form
from moezoo.hub.upcycling import Upcycle
from moezoo.kernels.attention import BACKENDS as ATTENTION
from moezoo.kernels.attention import REFUSED
from moezoo.kernels.delta_rule import BACKENDS as DELTA_RULE
from moezoo.kernels.grouped_matmul import BACKENDS as GROUPED_MATMUL
from moezoo.models import FAMILIES, ModelConfig
from moezoo.models.adapters import ADAPTERS, Adapter, NoAdapter
from moezoo.moe.dispatch import DISPATCHES, DispatchChoice
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.optim import SCHEDULES, UPDATE_RULES, GuardSettings, Schedule, UpdateRule
from moezoo.parallel.context_parallel import ContextParallel
from moezoo.parallel.distributed import DISTRIBUTED, Distributed
from moezoo.parallel.execution import DType, Remat, RoutingChoice, check_dtype
from moezoo.parallel.mesh import MeshShape
from moezoo.parallel.pipeline import Circular
from moezoo.parallel.rules import Rules
from moezoo.parallel.sequence_order import SequenceOrder
from moezoo.trackers import TRACKERS, NoTracker, Tracker
from moezoo.typed import Count, Name, NotNegative, Range, Size, check_fields, show

# With `eval_every` null the run is evaluated at its beginning and after each of so many equal parts.
_PARTS = 4

ParamDType = Literal["float32", "bfloat16", "stored"]


class ContextParallelName(Name):
    """`gather`, `ring`, and what else is registered."""

    registry = CONTEXT_PARALLEL


class GroupedMatmulName(Name):
    """The name of a backend of `grouped_matmul`."""

    registry = GROUPED_MATMUL


class AttentionName(Name):
    """The name of a backend of attention."""

    registry, refused = ATTENTION, REFUSED


class DeltaRuleName(Name):
    """The name of a backend of the delta rule."""

    registry = DELTA_RULE


# Each kernel, which is a key of `execution`, and its backends: those of `moezoo.parallel.kernels.Kernels`.
KERNELS = {"grouped_matmul": GROUPED_MATMUL, "attention": ATTENTION, "delta_rule": DELTA_RULE}


@dataclasses.dataclass(frozen=True)
class ExecutionSettings:
    """How the model runs, except mesh, rules and dispatch; the comments in `conf/train.yaml` describe each key.

    `context_parallel` is a name, or a value. `remat` and `routing` are as in `Execution`, and `sequence_order` is as in
    `moezoo.parallel.sequence_order`.
    """

    dtype: DType = "float32"
    param_dtype: ParamDType = "float32"
    reduce_dtype: DType = "float32"
    remat: Remat = "full"
    microbatches: Size = 1
    pipeline: Circular = dataclasses.field(default_factory=Circular)
    context_parallel: ContextParallelName | ContextParallel = "gather"  # pyright: ignore[reportAssignmentType] a name is text
    sequence_order: SequenceOrder | None = None
    grouped_matmul: tuple[GroupedMatmulName, ...] | None = None
    attention: tuple[AttentionName, ...] | None = None
    delta_rule: tuple[DeltaRuleName, ...] | None = None
    routing: RoutingChoice = "learned"

    def __post_init__(self):
        for name, choices in {"dtype": DType, "param_dtype": ParamDType, "reduce_dtype": DType}.items():
            if getattr(self, name) != "stored" or choices is DType:
                object.__setattr__(self, name, check_dtype(f"execution.{name}", getattr(self, name), choices).name)
        check_fields("execution", self)


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
    """The steps of a run that JAX's profiler records; the comments in `conf/train.yaml` describe each key."""

    start: Size | None = None
    steps: Size = 3

    def __post_init__(self):
        check_fields("profile", self)

    @property
    def last(self) -> int:
        """The last step that is recorded; 0 without any."""
        return 0 if self.start is None else self.start + self.steps - 1


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run; the comments in `conf/train.yaml` describe each key.

    `batch_size` is the number of sequences per step, over all devices together. 0 turns an `*_every` off. Every section
    and every value is checked when it is made, in Python as on the command line: `dataclasses.replace` too raises
    `UserError`.

    `steps` is None where `epochs` is set and the data are not read yet; `train` fills it in.

    Of a run that starts from weights, `compose` reads the folder that `init_from` names and fills in the rest:

    - `init_sha256`: the hash of what that folder is said to hold, so that another one is not taken for it;
    - `init_forms`: with `execution.param_dtype=stored`, what frozen arrays are stored as, by patterns of their paths.
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
    steps: Count | None
    seed: Annotated[int, Range(at_least=0, at_most=2**32 - 1)]
    batch_size: Size
    seq_len: Annotated[int, Range(at_least=2)]
    # Keys with a default are missing from runs of older versions.
    epochs: Size | None = dataclasses.field(default=None, kw_only=True)
    trained: tuple[str, ...] | None = dataclasses.field(default=None, kw_only=True)
    frozen: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    init_from: str | None = dataclasses.field(default=None, kw_only=True)
    init_sha256: str | None = dataclasses.field(default=None, kw_only=True)
    init_forms: Mapping[str, Form] = dataclasses.field(default_factory=dict, kw_only=True)
    upcycle: Upcycle = dataclasses.field(default_factory=Upcycle, kw_only=True)
    adapter: Adapter = dataclasses.field(default_factory=NoAdapter, kw_only=True)
    run_dir: str | None
    resume: str | None
    eval_every: Count | None
    eval_patience: Size | None = dataclasses.field(default=None, kw_only=True)
    checkpoint_minutes: NotNegative | None = dataclasses.field(default=None, kw_only=True)
    checkpoint_every: Count
    checkpoint_keep: Size
    checkpoint_frozen: bool = dataclasses.field(default=True, kw_only=True)
    log_every: Count
    tracker: Tracker = dataclasses.field(default_factory=NoTracker, kw_only=True)
    watch: bool = dataclasses.field(default=False, kw_only=True)
    profile: ProfileSettings = dataclasses.field(default_factory=ProfileSettings, kw_only=True)
    cache_dir: str | None = dataclasses.field(default="auto", kw_only=True)

    @property
    def parts(self) -> dict[str, int]:
        """Key -> the number of parts that it cuts a batch into.

        Raises:
            UserError: The micro-batches of a pipeline are not a multiple of its stages.
        """
        stages, settings = self.mesh.stage, self.execution
        piped = {"execution.pipeline.microbatches": settings.pipeline.count(stages)} if stages > 1 else {}
        return {"execution.microbatches": settings.microbatches, **piped}

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step: those that pass through stages at once, times the micro-steps."""
        return math.prod(self.parts.values())

    @property
    def last_step(self) -> int:
        """The number of steps, which is known here: `steps` is not None."""
        assert self.steps is not None
        return self.steps

    def is_evaluated(self, step: int) -> bool:
        """Whether the model is evaluated after `step`, or for 0 before the first step."""
        last, every = self.last_step, self.eval_every
        if every is None:
            return step in {-(-last * part // _PARTS) for part in range(_PARTS + 1)}
        return step == last or (0 < every <= step and step % every == 0)

    def __post_init__(self):
        check_fields("", self)
        if self.steps is None and self.epochs is None:
            raise UserError("steps=null epochs=null: nothing says how long the run is; set one of them")
        if self.eval_patience is not None and self.eval_every == 0:
            raise UserError(
                f"eval_patience={self.eval_patience} needs evaluations during the run and eval_every=0 has one at its "
                "end only; set eval_every to a number of steps, or to null"
            )
        if self.steps is not None and self.profile.last > self.steps:
            raise UserError(
                f"profile.start={self.profile.start} profile.steps={self.profile.steps} ends with step "
                f"{self.profile.last} and steps={self.steps}; begin earlier, or record fewer steps"
            )
        if (self.init_from is None) != (self.init_sha256 is None):
            raise UserError(
                f"init_from={show(self.init_from)} init_sha256={show(self.init_sha256)}: compose reads the folder and "
                'sets both; write moezoo.compose("init_from=FOLDER")'
            )
        if self.upcycle.experts and self.upcycle.widen(self.model) != self.model:
            raise UserError(
                f"upcycle.experts={self.upcycle.experts} upcycle.per_token={self.upcycle.per_token} but the model has "
                f"{self.model.experts} and {self.model.experts_per_token}; set them when the run begins, and not later"
            )
        started = {
            f"upcycle.experts={self.upcycle.experts} copies the MLPs of a dense model": self.upcycle.experts > 0,
            f"adapter.init_from={show(self.adapter.init_from)} has pairs for trained weights": (
                self.adapter.init_from is not None
            ),
            "execution.param_dtype=stored keeps what init_from has": self.execution.param_dtype == "stored",
            "checkpoint_frozen=false leaves frozen arrays to init_from": not self.checkpoint_frozen,
        }
        for what, is_set in started.items():
            if is_set and self.init_from is None:
                raise UserError(f"{what}; name the folder of these weights as init_from, or leave it out")


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
    "adapter": ("name", ADAPTERS),
    "tracker": ("name", TRACKERS),
}
# The same for sections inside a group's.
_MEMBERS = {name: kind for name, kind in TRACKERS.items() if name not in ("none", "several")}
INNER_TAG: dict[str, tuple[str, dict[str, type]]] = {
    "data.sources.*": TAG["data"],
    "execution.pipeline": ("name", {"circular": Circular}),
    "tracker.members.*": ("name", _MEMBERS),
}
