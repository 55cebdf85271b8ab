"""What a device holds while it runs one layer, beside what was saved: closed forms of sizes.

Letters: T tokens of the device, d width of the model, K experts per token, R rows that experts have room for, f width
of an expert, n devices that share a sequence. A number is an element of an array in the dtype of computation.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.models.block import Block
from moezoo.moe.chunks import for_group
from moezoo.moe.dispatch import Capacity, Ragged, Replicated, Ring
from moezoo.moe.mixture import MoE
from moezoo.nn.attention import Attention
from moezoo.nn.base import FeedForward, Mixer
from moezoo.nn.context_parallel import GatherKept, context_parallel
from moezoo.nn.latent_attention import LatentAttention
from moezoo.nn.mlp import MLP
from moezoo.parallel.axes import Role
from moezoo.parallel.dispatch import Dispatch, ExpertGroup
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.remat import REMAT


class Term(NamedTuple):
    """A part of what a device holds: its `name`, and its `bytes` on one device."""

    name: str
    bytes: int


class Weights(NamedTuple):
    """The weights of a part of a layer while it runs, in bytes on one device.

    Attributes:
        whole: As the layer reads them: gathered, in the dtype of computation.
        gathered: The part of `whole` that comes from other devices.
        gradients: The gradients of the trained ones, in that dtype.
        summed: Those that are summed over devices layer by layer, in the dtype of the sum.
        turned: Those of `summed` that are gathered along another dimension than their first.
    """

    whole: int
    gathered: int
    gradients: int
    summed: int
    turned: int


def weights_of(module: PyTree, trained: PyTree, execution: MeshExecution) -> Weights:
    """Return the weights of `module`: the shapes of one layer, whole. `trained` is a tree of booleans like it."""
    itemsize, width = jnp.dtype(execution.dtype).itemsize, jnp.dtype(execution.reduce_dtype).itemsize
    found = []
    placements = jax.tree.leaves(execution.placements(module))
    for x, placement, learns in zip(jax.tree.leaves(module), placements, jax.tree.leaves(trained), strict=True):
        ways = math.prod(execution.ways(axes) for axes in placement.gathered)
        # Of key-value heads that all devices store, a device takes its own.
        taken = math.prod(min(execution.ways(a), n) for a, n in zip(placement.taken, x.shape, strict=False) if a)
        numbers = placement.local_size(x.shape) * ways // taken
        keeps = placement.axes.role in (Role.PART, Role.FROZEN, Role.BUFFER)
        whole, sums = numbers * (x.dtype.itemsize if keeps else itemsize), numbers * width * (learns and ways > 1)
        found.append((whole, whole * (ways > 1), numbers * itemsize * learns, sums, sums * any(placement.gathered[1:])))
    return Weights(*map(sum, zip(*found, strict=True)))


def of_one(stacked: PyTree) -> PyTree:
    """Return the shapes of one layer of a stack."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def is_modelled(block: Block) -> bool:
    """Return whether this module knows what both parts of a layer hold; it counts nothing for those of others."""
    return isinstance(block.attention, Attention | LatentAttention) and isinstance(block.feed_forward, MoE | MLP)


def stream(tokens: int, embed: int, execution: MeshExecution) -> int:
    """Return the bytes of the activations between two layers, T d numbers: what `remat=full` saves of a layer."""
    return tokens * embed * jnp.dtype(execution.dtype).itemsize


def forward_terms(block: Block, execution: MeshExecution, tokens: int, backend: str) -> tuple[Term, ...]:
    """Return what a forward pass without gradients holds in a layer; weights aside, arguments as `backward_moments`."""
    itemsize = jnp.dtype(execution.dtype).itemsize
    kept, _ = _attention(block.attention, execution)
    rows, moving, beside = _feed_forward(
        block.feed_forward, execution, tokens, _FORWARD.get(backend, _COMPOSED[0]), False
    )
    return (
        Term("activations of the residual stream", 3 * stream(tokens, _width(block), execution)),
        # The two parts of a layer run one after the other.
        Term("activations of the layer", max(kept * tokens * itemsize, rows + moving + beside)),
    )


def backward_moments(
    block: Block, trained: Block, execution: MeshExecution, tokens: int, backend: str
) -> dict[str, tuple[Term, ...]]:
    """Return the moments of the backward pass of a layer at which much is held: name -> terms.

    Args:
        block: The shapes of one layer, whole.
        trained: Which of its arrays are trained.
        execution: How the step runs it.
        tokens: T, of one micro-step.
        backend: What runs grouped products (`moezoo.kernels.grouped_matmul.chosen_backend`).
    """
    mixer = weights_of(block.attention, trained.attention, execution)
    mlp = weights_of(block.feed_forward, trained.feed_forward, execution)
    itemsize = jnp.dtype(execution.dtype).itemsize
    kept, back = (numbers * tokens * itemsize for numbers in _attention(block.attention, execution))
    # The policies `dots` and `none` saved what attention keeps, and the products of experts.
    again = REMAT[execution.remat].kernels_keep == "inputs"
    always = (
        # The layer's input, that of the feed-forward part, both normalised, and the gradient that passes.
        Term("residual stream and its gradient", 5 * stream(tokens, _width(block), execution)),
        Term("gathered weights", mixer.whole + mlp.whole),
        Term("what attention keeps", kept * again),
    )

    def experts(numbers: _Rows) -> tuple[Term, ...]:
        rows, moving, beside = _feed_forward(block.feed_forward, execution, tokens, numbers, True)
        return (
            Term("rows of experts and their gradients", rows),
            Term("rows on their way", moving),
            Term("routing, shared experts, MLP", beside),
        )

    added = {} if backend in _BACKWARD else {"gradients by rows of experts": (*always, *experts(_ADDED))}
    return {
        "products of the feed-forward part": (
            *always,
            *experts(_BACKWARD.get(backend, _COMPOSED[1 if again else 2])),
        ),
        **added,
        "gradients of the feed-forward part": (*always, *experts(_LATER), *_gradients(mlp)),
        "attention": (*always, Term("gradients of attention", back), *_gradients(mixer)),
    }


def _width(block: Block) -> int:
    return block.attention_norm.scale.shape[-1]


def _gradients(weights: Weights) -> tuple[Term, ...]:
    # One matrix after the other is cast for the sum. Sums run beside other work, so all of them may be there, and those
    # that are gathered along an inner dimension once more, with this dimension first.
    return (
        Term("gradients of weights", weights.gradients // 3),
        Term("gradients of weights in the dtype of their sum", weights.summed),
        Term("the same with the gathered dimension first", weights.turned),
    )


def _attention(mixer: Mixer, execution: MeshExecution) -> tuple[int, int]:
    """Return the numbers per token that attention keeps for its backward pass, and those of the gradients there."""
    devices, heads = execution.ways(execution.sequence_axes), execution.inner_group("heads").size
    gathers = devices > 1 and isinstance(context_parallel(execution), GatherKept)
    wide = 4 // jnp.dtype(execution.dtype).itemsize  # numbers in the bytes of a float32
    # Of `gather` keys and values of the whole sequence. Of `ring` those that are there and those that arrive.
    copies = devices if gathers else 2 if devices > 1 else 1
    # Gradients pass the ring in float32: those that pass, those that arrive, and this device's share.
    passing = 3 * wide * (devices > 1 and not gathers)
    if isinstance(mixer, Attention):
        *_, number, size = mixer.query.shape
        number //= heads
        keys, queries = 2 * max(1, mixer.key.shape[-2] // heads) * size, 2 * number * size
        # Norms need what they normalise: queries and keys.
        normed = (queries + keys) // 2 * (mixer.query_norm is not None)
        return normed + queries + keys * copies + wide * number, queries + keys * (copies + passing)
    if isinstance(mixer, LatentAttention):
        s, whole = mixer.sizes, devices if gathers else 1
        number, latents = s.heads // heads, s.kv_lora + s.rope_dim
        # Queries and results are as many as keys and values.
        both, lora = number * (s.nope_dim + s.rope_dim + s.value_dim) * (1 + whole), 2 * (s.q_lora or 0) + 2 * latents
        return both + lora + copies * latents + wide * number, both + lora + (copies + passing) * latents
    return 0, 0  # another mixer: what it keeps is not known


class _Rows(NamedTuple):
    """What experts hold, in arrays of all rows: of the width of the model and of their own, and float32 of the two."""

    outer: int
    inner: int
    wide_outer: int = 0
    wide_inner: int = 0


# Kernels that gather rows: results. The backward pass has rows of cotangents, and turns gate, up and the gradient by
# what is between them and down into three such arrays. `blocked` loops over blocks and writes gradients by rows.
_FORWARD = {"hopper": _Rows(2, 1), "blackwell": _Rows(2, 1), "blocked": _Rows(1, 0)}
_BACKWARD = {"hopper": _Rows(1, 6), "blackwell": _Rows(1, 6), "blocked": _Rows(2, 0)}
# Products one by one: XLA returns those of a TPU in float32. A forward pass has gate, up and their activation. A
# backward pass that makes both again has them and the gradient by what is between, and one array of the activation's
# gradient; one that has them saved reads two arrays and writes one, beside that gradient.
_COMPOSED = (_Rows(1, 1, 0, 2), _Rows(2, 1, 0, 3), _Rows(1, 3, 0, 1))
# Then gradients by rows come through gate and through up and are added; three inner arrays wait for the products that
# make gradients of weights.
_ADDED = _Rows(2, 3, 2)
# When gradients of weights are sent off: rows, their gradients, and gradients of gate and up.
_LATER = _Rows(2, 2)


def _feed_forward(
    part: FeedForward, execution: MeshExecution, tokens: int, each: _Rows, back: bool
) -> tuple[int, int, int]:
    """Return the bytes of rows of experts, of rows on their way, and of what is beside them."""
    itemsize, inner = jnp.dtype(execution.dtype).itemsize, execution.inner_group("mlp").size
    if isinstance(part, MLP):
        # gate, up, what is between them and down, and in a backward pass the gradients of the three.
        return 0, 0, (3 + 3 * back) * tokens * part.gate.shape[-1] // inner * itemsize
    if not isinstance(part, MoE):
        return 0, 0, 0  # another feed-forward part: what it holds is not known
    d, f = part.experts.gate.shape[-2], part.experts.gate.shape[-1] // inner
    experts, k = part.router.weight.shape[-1], part.router.k
    group = execution.expert_group(experts)
    strategy = for_group(execution.strategy, group)
    rows = max(strategy.rows(chunk, k, group) for chunk in strategy.chunk_sizes(tokens))
    of_row = (each.outer * itemsize + each.wide_outer * 4) * d + (each.inner * itemsize + each.wide_inner * 4) * f
    shared = 0 if part.shared is None else (3 + 3 * back) * tokens * part.shared.gate.shape[-1] // inner * itemsize
    # Logits, scores and their gradients in float32; of each choice an id, a gate, a row, an order, and gradients.
    routing = 4 * tokens * (3 * experts + 8 * k)
    return rows * of_row, _moving(strategy, group, tokens, k, back) * d * itemsize, shared + routing


def _moving(strategy: Dispatch, group: ExpertGroup, tokens: int, k: int, back: bool) -> int:
    """Return the rows of width d that bring tokens to experts, in a backward pass also gradients to tokens (`back`)."""
    if isinstance(strategy, Replicated):
        return _moving(strategy.strategy, group, -(-tokens // group.size), k, back)
    rows = sum(strategy.rows(chunk, k, group) for chunk in strategy.chunk_sizes(tokens))
    if isinstance(strategy, Ring):  # tokens of the group and their sums; then also gradients by tokens
        return (2 + back) * group.size * tokens
    if isinstance(strategy, Ragged):  # rows that are sent and that arrive; then also those of gradients
        return (1 + back) * (tokens * k + rows)
    return (2 + back) * rows * isinstance(strategy, Capacity)  # buffers as filled, as received; gradients by results
