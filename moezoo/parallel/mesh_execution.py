"""What follows from an `Execution` for its mesh: sizes, axes, groups and placements."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from moezoo.errors import UserError, check_type
from moezoo.parallel.axes import Axes, axes_of
from moezoo.parallel.collectives import InnerGroup, varying_axes
from moezoo.parallel.context_parallel import SequenceGroup
from moezoo.parallel.dispatch import ExpertGroup
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import KernelName, KernelOrder, Target, target_of
from moezoo.parallel.mesh import STAGE
from moezoo.parallel.pipeline import Piped
from moezoo.parallel.placement import Placement
from moezoo.parallel.rules import live
from moezoo.parallel.sequence_order import balanced_order


@dataclasses.dataclass(frozen=True)
class MeshExecution(Execution):
    """An `Execution`, and what follows from it for its mesh; layers get one as `execution`, from `on_mesh`.

    Attributes:
        in_stage: Whether the layers of a stage run: then its devices alone share weights and tokens. Set by
            `within_stage`.
        rows_over: The mesh axes that split the batch, in place of those in the rules; sequences are then whole. Set by
            `for_rows`.
    """

    in_stage: bool = False
    rows_over: tuple[str, ...] | None = None

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> the number of devices along it, in a stage those of the stage; empty without a mesh."""
        sizes = {} if self.mesh is None else self.mesh.shape
        return {axis: size for axis, size in sizes.items() if not (self.in_stage and axis == STAGE)}

    @property
    def stages(self) -> int:
        """The number of stages that micro-batches pass through; 1 without a pipeline."""
        return self.ways((STAGE,)) if self.pipeline is not None else 1

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The mesh axis along which stages split micro-batches, outside of the layers that are piped."""
        return (STAGE,) if self.stages > 1 else ()

    @property
    def within_stage(self) -> "MeshExecution":
        """The execution of layers that are piped; the same one without a pipeline."""
        return dataclasses.replace(self, in_stage=self.in_stage or self.stages > 1)

    @property
    def micro_batches(self) -> int:
        """The micro-batches that pass through the stages at once; 1 without a pipeline."""
        return 1 if self.pipeline is None or self.stages == 1 else self.pipeline.count(self.stages)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Return the number of devices along all of `axes` together."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return live(self.rules.batch if self.rows_over is None else self.rows_over, self.sizes)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the sequence; context parallelism runs over these."""
        return live(self.rules.sequence if self.rows_over is None else (), self.sizes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split tokens: `stage_axes`, `batch_axes`, then `sequence_axes`."""
        return self.stage_axes + self.batch_axes + self.sequence_axes

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The mesh axes that experts stay split over while they compute."""
        return self.rules.kept("expert", self.sizes)

    @property
    def live_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device."""
        return live(tuple(self.sizes), self.sizes)

    @property
    def tokens_spec(self) -> PartitionSpec:
        """The layout of an array [batch, seq, ...]."""
        return PartitionSpec(self.batch_axes or None, self.sequence_axes or None)

    @property
    def micro_batches_spec(self) -> PartitionSpec:
        """The layout of an array [micro-batches, batch, seq, ...]."""
        return PartitionSpec(self.stage_axes or None, *self.tokens_spec)

    def token_order(self, length: int) -> np.ndarray:
        """Return the index of each token in the order in which devices get sequences of `length` tokens.

        Raises:
            UserError: The order does not divide `length`.
        """
        devices = self.ways(self.sequence_axes)
        return (
            balanced_order(length, devices) if devices > 1 and self.sequence_order == "balanced" else np.arange(length)
        )

    def for_rows(self, rows: int) -> "MeshExecution":
        """Return the execution for a batch of `rows` whole sequences, split over the most devices that divide it.

        Devices along the other axes repeat the same computation, except the experts' work, which they always share.
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
        """Return the devices that share one set of `num_experts` experts."""
        axes = self.expert_axes
        replicated = not set(axes) <= set(self.token_axes)
        return ExpertGroup(axes, self.ways(axes), num_experts, replicated, self.target)

    def inner_group(self, logical: Literal["heads", "mlp", "vocab"]) -> InnerGroup:
        """Return the devices that share an inner dimension; `heads` includes `kv_heads`, and `mlp` `expert_mlp`."""
        axes = self.rules.kept(logical, self.sizes)
        return InnerGroup(axes, self.ways(axes), self.reduce_dtype)

    @property
    def sequence_group(self) -> SequenceGroup:
        """The devices that share sequences."""
        return SequenceGroup(self.sequence_axes, self.ways(self.sequence_axes), self.token_axes, self.sequence_order)

    @functools.cached_property
    def target(self) -> Target | None:
        """What programs are compiled for: as the mesh describes it, not this machine. None if it names no device."""
        return target_of(self.mesh)

    def kernel(self, name: KernelName) -> KernelOrder:
        """Return the argument `implementation` for calls of a kernel."""
        return KernelOrder(getattr(self.kernels, name), self.target)

    def placement(self, axes: Axes, shape: tuple[int, ...], by_layer: bool = False) -> Placement:
        """Return where a parameter with these axes and this global shape is stored, and how its layer gathers it.

        `by_layer`: whether each stage stores its own layers of it.
        """
        return self._placement(axes, self.rules.shared(axes, shape, self.sizes), by_layer)

    def placement_of_part(self, axes: Axes, x: jax.Array) -> Placement:
        """Return the placement of a parameter of which `x` is this device's part.

        Key-value heads are shared if `x` does not vary over the axes that they should stay split over.
        """
        is_split = set(self.rules.kept("kv_heads", self.sizes)) <= varying_axes(x)
        return self._placement(axes, () if is_split else ("kv_heads",))

    def _placement(self, axes: Axes, shared: tuple[str, ...], by_layer: bool = False) -> Placement:
        whole = ("expert",) if self.moves_weights else ()
        return self.rules.placement(axes, self.sizes, whole=whole, shared=shared, by_layer=by_layer)

    def piped(self, module: PyTree) -> Piped | None:
        """Return which layers of a model run in stages; None without stages, and for a module without layers.

        Raises:
            UserError: The model has too few layers.
        """
        if self.pipeline is None or self.stages == 1:
            return None
        return self.pipeline.piped(module, self.stages, bool(self.rules.store.get("layer")))

    def placements(self, module: PyTree) -> PyTree:
        """Return the tree of `module` with a `Placement` in place of every array or array shape.

        Raises:
            UserError: The rules cannot lay out an array on this mesh.
        """

        piped = self.piped(module)
        apart = f"{piped.path}." if piped is not None and piped.by_layer else None

        def leaf(path: Any, x: Any, axes: Axes) -> Placement:
            name = jax.tree_util.keystr(path)
            placement = self.placement(axes, x.shape, apart is not None and name.startswith(apart))
            self.rules.check_parameter(name, placement, x.shape, self.sizes)
            return placement

        arrays = eqx.filter(module, lambda x: isinstance(x, jax.Array | jax.ShapeDtypeStruct))
        return jax.tree_util.tree_map_with_path(leaf, arrays, axes_of(arrays))

    def specs(self, module: PyTree) -> PyTree:
        """Return the tree of `module` with a `PartitionSpec` in place of every array. Raises as `placements` does."""
        return jax.tree.map(lambda placement: placement.spec, self.placements(module))

    def shardings(self, module: PyTree) -> PyTree:
        """Return `specs` as `NamedSharding`s on this execution's mesh; without one, the first device of this process.

        Raises as `placements` does.
        """
        if self.mesh is None:
            here = SingleDeviceSharding(jax.local_devices()[0])
            return jax.tree.map(lambda _: here, module)
        return jax.tree.map(functools.partial(NamedSharding, self.mesh), self.specs(module))

    def run(self, function: Callable, arguments: tuple, in_specs: tuple, out_specs: Any) -> Any:
        """Run `function` on each device's parts of `arguments`, in any layout; without a mesh, on the arguments.

        Args:
            function: The function, which runs inside `shard_map`.
            arguments: Trees of arrays.
            in_specs: The layout of each argument: a `PartitionSpec`, or a tree of them.
            out_specs: The layout of the result.

        Raises:
            UserError: There is no mesh, and an array is split over explicit axes of one.
        """
        if self.mesh is None:
            # An operation on arrays that are split over explicit axes may raise one of JAX's errors.
            for kind in map(jax.typeof, jax.tree.leaves(arguments)):
                if any(kind.sharding.spec):
                    raise UserError(
                        f"an array {kind} is split over axes of mesh.axis_types=explicit, and there is no execution; "
                        "pass execution=moezoo.execution(cfg), or move the model to one device: moezoo.place(model, "
                        "moezoo.Execution())"
                    )
            return function(*arguments)
        # Axes of type Explicit require that arrays arrive in these layouts; with Auto, JAX would move them silently.
        laid_out = jax.tree.map(functools.partial(NamedSharding, self.mesh), in_specs)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return mapped(*jax.device_put(arguments, laid_out))

    def first_input(self, logical: str, count: int) -> jax.Array | int:
        """Return the number of the first of `count` inputs that this device has along an axis of a gathered weight."""
        return self._index(self.rules.kept(logical, self.sizes)) * count

    def first_micro_batch(self, own: int) -> jax.Array | int:
        """Return the number of the first of the `own` micro-batches of a step that this device has."""
        return self._index(self.stage_axes) * own

    def token_numbers(self, rows: int, tokens: int) -> jax.Array:
        """Return int32 [rows, tokens], which number the tokens of this device among those of all devices.

        The token at place p of row r, of rows of n tokens, has number r n + p, in whatever order devices have them.
        """
        length = tokens * self.ways(self.sequence_axes)
        first = self._index(self.sequence_axes) * tokens
        places = jax.lax.dynamic_slice_in_dim(jnp.asarray(self.token_order(length), jnp.int32), first, tokens)
        row = self._index(self.batch_axes) * rows + jax.lax.iota(jnp.int32, rows)
        return row[:, None] * length + places[None]

    def _index(self, axes: tuple[str, ...]) -> jax.Array | int:
        """Return this device's number along `axes`, inside `shard_map`; 0 without axes."""
        return jax.lax.axis_index(axes) if axes else 0


def on_mesh(execution: Execution) -> MeshExecution:
    """Return what follows from `execution` for its mesh; a `MeshExecution` is returned as it is."""
    if isinstance(execution, MeshExecution):
        return execution
    return MeshExecution(**{field.name: getattr(execution, field.name) for field in dataclasses.fields(execution)})


def place(model: PyTree, execution: Execution) -> PyTree:
    """Return a copy of `model` in the layout of `execution`, from any layout.

    Raises:
        UserError: The rules cannot lay out an array on the mesh, or an argument has another type.
    """
    check_type("model", model, eqx.Module, "give a model, such as moezoo.build_model returns")
    check_type("execution", execution, Execution, "write moezoo.execution(cfg)")
    if execution.mesh is None:
        # Moved to a device instead of a sharding, an array of explicit axes would keep their type.
        return jax.device_put(model, SingleDeviceSharding(jax.devices()[0]))
    return jax.device_put(model, on_mesh(execution).shardings(model))
