"""What a layer keeps for its backward pass: what each word of `execution.remat` means."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from moezoo.parallel.collectives import ATTENTION, EXPERT_BIAS, GATHERED_WEIGHT, GROUPED_MATMUL, LAYER_INPUT
from moezoo.parallel.kernels import Keep

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
