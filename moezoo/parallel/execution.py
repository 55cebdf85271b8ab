"""How a model runs, as one immutable value. The model does not contain it; every call takes it as `execution=`.

| value | what it is |
|---|---|
| `Execution` | what users set |
| `moezoo.parallel.mesh_execution.MeshExecution` | what follows for one mesh: sizes, axes, groups, placements |
| `moezoo.parallel.weight_mover.WeightMover` | what moves weights to where layers compute |
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from moezoo.errors import UserError
from moezoo.parallel.collectives import ATTENTION, EXPERT_BIAS, GATHERED_WEIGHT, GROUPED_MATMUL, LAYER_INPUT
from moezoo.parallel.context_parallel import ContextParallel
from moezoo.parallel.dispatch import Dispatch, DispatchChoice
from moezoo.parallel.kernels import ANY_BACKEND, Keep, Kernels
from moezoo.parallel.pipeline import Circular
from moezoo.parallel.rules import Rules
from moezoo.parallel.sequence_order import SequenceOrder
from moezoo.typed import check_fields, convert, show

Remat = Literal["full", "offload", "dots", "none"]


class Rematerialisation(NamedTuple):
    """What a word of `Remat` means.

    Attributes:
        policy: JAX's policy, which says of each value whether it is saved.
        kernels_keep: What kernels that can do either keep: products only where the policy would save them.
        input_on_host: Whether the layer's input is in the host's memory.
    """

    policy: Callable[..., Any]
    kernels_keep: Keep
    input_on_host: bool = False


def _everything_but_gathered_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Save everything except gathered weights, named or not.

    An unnamed gathered weight is the result of an all-gather, or of a function with its own gradient around one.
    Gathered tokens and results of kernels come from the same primitives; they are saved under their own names.
    """
    if primitive.name == "name":
        return params["name"] != GATHERED_WEIGHT
    return primitive.name not in ("all_gather", "all_gather_invariant", "custom_vjp_call")


# XLA's CPU backend has one memory; offloaded values stay in place there.
_OFFLOAD = checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
)
_DOTS = checkpoint_policies.save_from_both_policies(
    checkpoint_policies.checkpoint_dots,
    checkpoint_policies.save_only_these_names(ATTENTION, GROUPED_MATMUL, EXPERT_BIAS),
)
REMAT: dict[Remat, Rematerialisation] = {
    "full": Rematerialisation(checkpoint_policies.nothing_saveable, "inputs"),
    "offload": Rematerialisation(_OFFLOAD, "inputs", input_on_host=True),
    "dots": Rematerialisation(_DOTS, "products"),
    "none": Rematerialisation(_everything_but_gathered_weights, "products"),
}


def rematerialise(layer: Any, remat: Remat) -> Any:
    """Wrap `layer`, whose first argument is its input, in rematerialisation."""
    chosen = REMAT[remat]

    def named(x: Any, *rest: Any) -> Any:
        # Inside the rematerialised function; outside it, the input would also stay in the device's memory.
        return layer(checkpoint_name(x, LAYER_INPUT), *rest)

    return jax.checkpoint(named if chosen.input_on_host else layer, policy=chosen.policy)


# The rules of a model that runs without a mesh.
UNSPLIT = Rules("unsplit", {}, {}, (), ())

DType = Literal["float32", "bfloat16"]
StoredDType = Literal["float32", "bfloat16", "float16"]
RoutingChoice = Literal["learned", "random", "balanced"]
_Same = TypeVar("_Same", bound="Execution")  # beartype does not take `Self` in methods that are checked one by one


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs: on which devices, in which layout, precision and memory. The default is one device.

    | `remat` | what a layer keeps for its backward pass |
    |---|---|
    | `full` | its input |
    | `offload` | its input, in the host's memory |
    | `dots` | its input, the results of matrix products, and what kernels return |
    | `none` | everything except gathered weights |

    | `routing` | which experts a token goes to |
    |---|---|
    | `learned` | those that the router chooses |
    | `random` | random ones, to measure speed; the router gives only the gates |
    | `balanced` | each expert gets equally many tokens; otherwise as `random` |

    Attributes:
        mesh: The devices; None for one device. A mesh without devices (`AbstractMesh`) suffices to trace.
        rules: The layout of parameters and tokens.
        dispatch: The strategy by which tokens meet experts, or a choice of one (`auto`); None for `gather`, in which
            weights move.
        dtype: What layers compute in, float32 or bfloat16. Weights are gathered in it, or in the dtype that they are
            stored in if that is narrower.
        reduce_dtype: What gradients are summed over devices in, float32 or bfloat16.
        remat: What a layer keeps for its backward pass.
        context_parallel: How queries meet keys of other devices where the sequence is split; None to gather what tokens
            keep.
        sequence_order: The order of tokens in batches whose sequences are split: `contiguous`, or `balanced` as in
            `moezoo.parallel.sequence_order`. A `Feed` applies it; a call of the model takes tokens in any order.
        kernels: The backends of each kernel; the choices left open follow from the mesh's devices.
        routing: Whether the router chooses experts.
        pipeline: How micro-batches pass through the stages of a mesh, in training and evaluation. None: stages only
            store weights, and each runs all layers, one after the other, on the same tokens.

    Raises:
        UserError: The mesh has an axis of more than one device that the rules do not name, tokens are split over some
            of the axes that experts are split over, tokens should move along an axis `expert` that does not split
            experts, or a field has a value that it cannot have.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: Rules = UNSPLIT
    dispatch: DispatchChoice | None = None
    dtype: DTypeLike = jnp.float32
    reduce_dtype: DTypeLike = jnp.float32
    remat: Remat = "full"
    context_parallel: ContextParallel | None = None
    sequence_order: SequenceOrder = "contiguous"
    kernels: Kernels = ANY_BACKEND
    routing: RoutingChoice = "learned"
    pipeline: Circular | None = None

    def __post_init__(self):
        if not isinstance(self.dispatch, DispatchChoice | None):
            raise UserError(
                f"dispatch={self.dispatch!r} is not a strategy; give a value such as moezoo.moe.dispatch.Ring(), or "
                "take the execution from moezoo.execution(cfg), which knows strategies by name"
            )
        if not isinstance(self.context_parallel, ContextParallel | None):
            raise UserError(
                f"context_parallel={self.context_parallel!r} is not a ContextParallel; leave it out for gather, or "
                "take the execution from moezoo.execution(cfg), which knows them by name"
            )
        check_fields("", self)
        if not all(isinstance(names, tuple) and all(isinstance(name, str) for name in names) for names in self.kernels):
            raise UserError(
                f"kernels={self.kernels!r}: expected tuples of names, such as "
                'moezoo.Kernels(attention=("chunked", "reference"))'
            )
        for key in ("dtype", "reduce_dtype"):
            object.__setattr__(self, key, check_dtype(key, getattr(self, key)))
        sizes = {} if self.mesh is None else self.mesh.shape
        self.rules.check_mesh(sizes)
        # An axis of this name that only stores weights is no mistake where weights move.
        moves_tokens = isinstance(self.dispatch, Dispatch) and self.dispatch.moves == "tokens"
        if not self.rules.kept("expert", sizes) and sizes.get("expert", 1) > 1 and moves_tokens:
            raise UserError(
                f"mesh.expert={sizes['expert']} but rules {self.rules.name} keep experts split over none of its "
                f"devices (rules.compute.expert={show(self.rules.compute.get('expert', ()))}), and the strategy "
                f"{type(self.dispatch).__name__} moves tokens only between devices with different experts; set "
                "rules.store.expert=[expert] rules.compute.expert=[expert], or dispatch=gather, which moves weights"
            )

    @property
    def in_turn(self: _Same) -> _Same:
        """The execution in which all devices run all layers, as calls of a model and generation do."""
        return dataclasses.replace(self, pipeline=None)

    @property
    def exact(self: _Same) -> _Same:
        """The same execution with a strategy that drops nothing. Evaluation and generation use it."""
        return dataclasses.replace(self, dispatch=None if self.dispatch is None else self.dispatch.exact)

    @property
    def keep(self) -> Keep:
        """What kernels that can do either keep for the backward pass: products only where `remat` would save them."""
        return REMAT[self.remat].kernels_keep

    @property
    def strategy(self) -> Dispatch | None:
        """The strategy, where `dispatch` is no choice that is still open (`moezoo.models.choice.choose_dispatch`)."""
        assert isinstance(self.dispatch, Dispatch | None), f"{self.dispatch} has to choose a strategy first"
        return self.dispatch

    @property
    def moves_weights(self) -> bool:
        """Whether every device runs all experts on its own tokens, as without a dispatch.

        Where parameters are stored does not depend on it; while a choice is open, it is False.
        """
        dispatch = self.dispatch
        return dispatch is None or (isinstance(dispatch, Dispatch) and dispatch.moves == "weights")

    def checkpoint(self, layer: Any) -> Any:
        """Wrap `layer`, whose first argument is its input, in the rematerialisation of `remat`."""
        return rematerialise(layer, self.remat)


def check_dtype(key: str, value: Any, choices: Any = DType) -> jnp.dtype:
    """Return the dtype `value` of the setting `key`. Raises `UserError` unless the `choices` have its name."""
    name = str(value)
    if value is not None and value is not float:  # NumPy reads both as float64, which nobody wrote
        with contextlib.suppress(TypeError):
            name = jnp.dtype(value).name
    return jnp.dtype(convert(choices, name, key))
