"""How a model runs: one immutable value beside the model, which knows nothing of it."""

import dataclasses
import functools
import itertools
import math
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moezoo.convert import show
from moezoo.errors import UserError, nearest
from moezoo.parallel.axes import Axes, Role, axes_of
from moezoo.parallel.collectives import ATTENTION, GATHERED_WEIGHT, GROUPED_MATMUL, LAYER_INPUT, gather_weight, vary
from moezoo.parallel.context_parallel import ContextParallel, SequenceGroup
from moezoo.parallel.dispatch import Dispatch, ExpertGroup
from moezoo.parallel.kernels import ANY_BACKEND, KernelOrder, Kernels, Target, target_of
from moezoo.parallel.placement import Placement
from moezoo.parallel.rules import Rules, live

# Where a model runs without a mesh: nothing is stored over anything.
UNSPLIT = Rules("unsplit", {}, {}, (), ())

Remat = Literal["full", "offload", "dots", "none"]
RoutingChoice = Literal["learned", "random", "balanced"]


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs: where (mesh, rules), how tokens meet experts (dispatch), in which precision and memory.

    The default is one device; a `mesh` without devices is enough to trace. `dtype` is what layers compute in; weights
    are cast to it before they are gathered. Gradients are summed over devices in `reduce_dtype`. `remat` says what a
    layer keeps for its backward pass: `full` its input only, `offload` its input in the host's memory, `dots` the
    results of matrix products too, `none` everything but gathered weights. `dispatch` is a strategy; without one,
    tokens stay and weights move (`gather`). `context_parallel` says how queries meet keys of other devices where the
    sequence is split; without one, what tokens leave behind is gathered. `kernels` names backends; what it leaves open
    follows from the mesh's devices. `routing` is `learned`; to measure speed, `random` or `balanced` choose experts
    instead and the router only gives the gates. `rows_over`: mesh axes that split the batch in place of those that the
    rules name, with whole sequences (`for_rows`).

    Raises `UserError` when a mesh has an axis of more than one device that no rule names, when `dispatch` is not a
    strategy, and for a `remat`, `routing` or `kernels` that cannot be.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: Rules = UNSPLIT
    dispatch: Dispatch | None = None
    dtype: DTypeLike = jnp.float32
    reduce_dtype: DTypeLike = jnp.float32
    remat: Remat = "full"
    context_parallel: ContextParallel | None = None
    kernels: Kernels = ANY_BACKEND
    routing: RoutingChoice = "learned"
    rows_over: tuple[str, ...] | None = None

    def __post_init__(self):
        if not isinstance(self.dispatch, Dispatch | None):
            raise UserError(
                f"dispatch={self.dispatch!r} is not a strategy; give a value such as moezoo.moe.dispatch.Ring(), or "
                "take the execution from moezoo.execution(cfg), which knows strategies by name"
            )
        if not isinstance(self.context_parallel, ContextParallel | None):
            raise UserError(
                f"context_parallel={self.context_parallel!r} is no ContextParallel; leave it out for gather, or take "
                "the execution from moezoo.execution(cfg), which knows them by name"
            )
        for key, choices in (("remat", get_args(Remat)), ("routing", get_args(RoutingChoice))):
            if (value := getattr(self, key)) not in choices:
                raise UserError(f"{key}={value!r}: {nearest(str(value), choices)}")
        orders = self.kernels if isinstance(self.kernels, Kernels) else (None,)
        if not all(isinstance(names, tuple) and all(isinstance(name, str) for name in names) for names in orders):
            raise UserError(
                f"kernels={self.kernels!r}: expected tuples of names, such as "
                'moezoo.Kernels(attention=("chunked", "reference"))'
            )
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "reduce_dtype", jnp.dtype(self.reduce_dtype))
        if self.mesh is not None:
            for axis, size in self.mesh.shape.items():
                if size > 1 and axis not in self.rules.mesh_axes:
                    raise UserError(
                        f"mesh.{axis}={size} but rules {self.rules.name} name no axis '{axis}', so its {size} devices "
                        f"would all do the same; set mesh.{axis}=1 or name it in the rules"
                    )
        expert_axes = self.expert_axes
        if set(expert_axes) & set(self.token_axes) not in (set(), set(expert_axes)):
            raise UserError(
                f"rules {self.rules.name}: rules.compute.expert={show(expert_axes)} and tokens are split over only "
                "some of them; name all of them in rules.batch and rules.sequence, or none"
            )

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> number of devices along it."""
        return {} if self.mesh is None else dict(self.mesh.shape)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Number of devices along `axes` together."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return live(self.rules.batch if self.rows_over is None else self.rows_over, self.sizes)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the sequence: context parallelism is whatever the rules name here."""
        return live(self.rules.sequence if self.rows_over is None else (), self.sizes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split tokens."""
        return self.batch_axes + self.sequence_axes

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes that experts stay split over while they compute."""
        return live(self.rules.compute.get("expert", ()), self.sizes)

    @property
    def live_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one device."""
        return live(tuple(self.sizes), self.sizes)

    @property
    def tokens_spec(self) -> PartitionSpec:
        """Layout of an array [batch, sequence, ...]."""
        return PartitionSpec(self.batch_axes or None, self.sequence_axes or None)

    @property
    def exact(self) -> "Execution":
        """The same with a strategy that drops nothing: for evaluation and generation."""
        return dataclasses.replace(self, dispatch=None if self.dispatch is None else self.dispatch.exact)

    def for_rows(self, rows: int) -> "Execution":
        """The same for a batch of any size whose sequences are whole: rows over as many devices as can share them.

        Along the other axes devices do the same, but for the experts' work, which they always share.
        """
        expert_axes = set(self.expert_axes)
        fitting = [
            axes
            for count in range(len(self.token_axes) + 1)
            for axes in itertools.combinations(self.token_axes, count)
            if rows % self.ways(axes) == 0 and expert_axes & set(axes) in (set(), expert_axes)
        ]
        return dataclasses.replace(self, rows_over=max(fitting, key=self.ways))

    def expert_group(self, num_experts: int) -> ExpertGroup:
        """The devices that share one set of `num_experts` experts."""
        axes = self.expert_axes
        return ExpertGroup(axes, self.ways(axes), num_experts)

    @property
    def sequence_group(self) -> SequenceGroup:
        """The devices that share sequences."""
        return SequenceGroup(self.sequence_axes, self.ways(self.sequence_axes), self.token_axes)

    @functools.cached_property
    def target(self) -> Target | None:
        """What programs are compiled for: of the mesh, never of this machine; None where the mesh names no device."""
        return target_of(self.mesh)

    def kernel(self, name: Literal["grouped_matmul", "attention"]) -> KernelOrder:
        """What calls of a kernel are given."""
        return KernelOrder(getattr(self.kernels, name), self.target)

    @property
    def moves_weights(self) -> bool:
        """Whether every device runs all experts, on its own tokens; without a dispatch it does."""
        return self.dispatch is None or self.dispatch.moves == "weights"

    def placement(self, axes: Axes) -> Placement:
        """Where a parameter of these axes lies, and what of it is gathered where its layer runs."""
        return self.rules.placement(axes, self.sizes, whole=("expert",) if self.moves_weights else ())

    def placements(self, module: PyTree) -> PyTree:
        """A `Placement` for every array of `module` or of its shapes. Raises `UserError` where the rules do not fit."""

        def leaf(path: Any, x: Any, axes: Axes) -> Placement:
            placement = self.placement(axes)
            self.rules.check_parameter(jax.tree_util.keystr(path), placement, x.shape, self.sizes)
            return placement

        arrays = eqx.filter(module, _is_array)
        return jax.tree_util.tree_map_with_path(leaf, arrays, axes_of(arrays))

    def specs(self, module: PyTree) -> PyTree:
        """The layout of every array of `module`, as its placement says."""
        return jax.tree.map(lambda placement: placement.spec, self.placements(module))

    def shardings(self, module: PyTree) -> PyTree:
        """`specs` on this mesh."""
        assert self.mesh is not None
        mesh = self.mesh
        return jax.tree.map(lambda placement: NamedSharding(mesh, placement.spec), self.placements(module))

    def summed_axes(self, placement: Placement) -> tuple[str, ...]:
        """Mesh axes over which devices use a gathered parameter on different tokens, so that its gradients are summed.

        Those that split tokens. For experts whose weights move also those that split experts: a strategy gives each of
        their devices other tokens, even where tokens are the same on all.
        """
        extra = self.expert_axes if self.moves_weights and "expert" in placement.axes.names else ()
        return self.token_axes + tuple(axis for axis in extra if axis not in self.token_axes)

    def whole(self, module: PyTree) -> PyTree:
        """A layer's weights, cast to `dtype` and gathered as the rules say; called where the layer is about to run.

        Containers stay containers: their arrays are gathered one by one, in their own dtypes.
        """

        def leaf(x: jax.Array, axes: Axes) -> jax.Array:
            placement = self.placement(axes)
            dtype = x.dtype if axes.role is Role.PART else self.dtype
            if axes.role is Role.BUFFER:
                dtype = jnp.promote_types(x.dtype, jnp.float32)
            return gather_weight(x, placement.gathered, self.summed_axes(placement), dtype, self.reduce_dtype)

        arrays, rest = eqx.partition(module, eqx.is_array)
        return eqx.combine(jax.tree.map(leaf, arrays, axes_of(arrays)), rest)

    def vary_parameters(self, module: PyTree) -> PyTree:
        """Parameters typed as varying over all axes that split tokens: once, before layers are scanned.

        Otherwise a replicated leaf gets its sum over devices inside the backward loop, once a layer and micro-step.
        """
        return jax.tree.map(lambda x: vary(x, self.token_axes) if eqx.is_array(x) else x, module)

    def checkpoint(self, layer: Any) -> Any:
        """`layer`, whose first argument is its input, with rematerialisation as `remat` says.

        Gathered weights are never saved, under any policy.
        """
        policy = {
            "full": checkpoint_policies.nothing_saveable,
            # XLA's CPU has one memory: there what is offloaded stays where it is.
            "offload": checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[LAYER_INPUT],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            "dots": checkpoint_policies.save_from_both_policies(
                checkpoint_policies.checkpoint_dots,
                checkpoint_policies.save_only_these_names(ATTENTION, GROUPED_MATMUL),
            ),
            "none": _everything_but_gathered_weights,
        }[self.remat]

        def named(x: Any, *rest: Any) -> Any:
            # Inside what is rematerialised: else the input itself would be kept too, on the device.
            return layer(checkpoint_name(x, LAYER_INPUT), *rest)

        return jax.checkpoint(named if self.remat == "offload" else layer, policy=policy)


def place(model: PyTree, execution: Execution) -> PyTree:
    """A copy of `model` laid out as `execution` needs it, from whatever layout it has."""
    if execution.mesh is None:
        return jax.device_put(model, jax.devices()[0])
    return jax.device_put(model, execution.shardings(model))


def _everything_but_gathered_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that saves all but weights: neither under their name nor as what the name was given to.

    That is the result of an all-gather, or of a function with its own gradient, as a weight's gather is. What such
    functions return elsewhere, gathered tokens and grouped products, is saved under names of their own.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED_WEIGHT
    return primitive.name not in ("all_gather", "all_gather_invariant", "custom_vjp_call")


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
