"""What a device holds while one layer runs its backward pass, beside what was saved: a closed form of sizes.

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
from moezoo.moe.mixture import MoE
from moezoo.nn.attention import Attention
from moezoo.nn.base import FeedForward, Mixer
from moezoo.nn.context_parallel import GatherKept, context_parallel
from moezoo.nn.latent_attention import LatentAttention
from moezoo.parallel.axes import Role
from moezoo.parallel.execution import Execution
from moezoo.parallel.remat import REMAT


class Term(NamedTuple):
    """A part of what a device holds: its `name`, and its `bytes` on one device."""

    name: str
    bytes: int


class Weights(NamedTuple):
    """The weights of a part of a layer while it runs, in bytes on one device.

    Attributes:
        whole: As the layer reads them: gathered, in the dtype of computation.
        gradients: The gradients of the trained ones, in that dtype.
        summed: Those that are summed over devices layer by layer, in the dtype of the sum.
        turned: Those of `summed` that are gathered along another dimension than their first.
    """

    whole: int
    gradients: int
    summed: int
    turned: int


def weights_of(module: PyTree, trained: PyTree, execution: Execution) -> Weights:
    """Return the weights of `module`: the shapes of one layer, whole. `trained` is a tree of booleans like it."""
    itemsize, width = jnp.dtype(execution.dtype).itemsize, jnp.dtype(execution.reduce_dtype).itemsize
    total = [0, 0, 0, 0]
    placements = jax.tree.leaves(execution.placements(module))
    for x, placement, learns in zip(jax.tree.leaves(module), placements, jax.tree.leaves(trained), strict=True):
        ways = math.prod(execution.ways(axes) for axes in placement.gathered)
        taken = math.prod(
            min(execution.ways(axes), size) for axes, size in zip(placement.taken, x.shape, strict=False) if axes
        )
        numbers = placement.local_size(x.shape) * ways // taken
        keeps = placement.axes.role in (Role.PART, Role.FROZEN, Role.BUFFER)
        total[0] += numbers * (jnp.dtype(x.dtype).itemsize if keeps else itemsize)
        total[1] += numbers * itemsize * learns
        total[2] += numbers * width * (learns and ways > 1)
        total[3] += numbers * width * (learns and any(placement.gathered[1:]))
    return Weights(*total)


def of_one(stacked: PyTree) -> PyTree:
    """Return the shapes of one layer of a stack."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def stream(tokens: int, embed: int, execution: Execution) -> int:
    """Return the bytes of the activations between two layers, T d numbers: what `remat=full` saves of a layer."""
    return tokens * embed * jnp.dtype(execution.dtype).itemsize


def layer_moments(
    block: Block, trained: Block, execution: Execution, tokens: int, backend: str
) -> dict[str, tuple[Term, ...]]:
    """Return the moments of the backward pass of a layer at which much is held.

    Args:
        block: The shapes of one layer, whole.
        trained: Which of its arrays are trained.
        execution: How the step runs it.
        tokens: T, of one micro-step.
        backend: What runs grouped products (`moezoo.kernels.grouped_matmul.chosen_backend`).
    """
    mixer = weights_of(block.attention, trained.attention, execution)
    mlp = weights_of(block.feed_forward, trained.feed_forward, execution)
    one = stream(tokens, block.attention_norm.scale.shape[-1], execution)
    kept, back = attention_numbers(block.attention, execution)
    itemsize = jnp.dtype(execution.dtype).itemsize
    # The policies `dots` and `none` saved what attention keeps.
    again = REMAT[execution.remat].kernels_keep == "inputs"
    both = (
        # The layer's input, that of the feed-forward part, both normalised, and the gradient that passes.
        Term("activations of the residual stream and their gradient", 5 * one),
        Term("gathered weights", mixer.whole + mlp.whole),
    )
    attention = Term("queries, keys, values and results of attention", kept * tokens * itemsize * again)
    products, gradients = feed_forward_bytes(block.feed_forward, execution, tokens, backend)
    return {
        "products of the feed-forward part": (*both, attention, *products),
        "gradients of the feed-forward part": (*both, attention, *gradients, *_gradient_terms(mlp)),
        "attention": (
            *both,
            attention,
            Term("gradients of queries, keys, values and results", back * tokens * itemsize),
            *_gradient_terms(mixer),
        ),
    }


def _gradient_terms(weights: Weights) -> tuple[Term, ...]:
    # Those of one matrix after the other are converted; the sums over devices run beside other work, so all of these
    # may be there. Those that are gathered along an inner dimension are copied with this dimension first.
    return (
        Term("gradients of weights", weights.gradients // 3),
        Term("gradients of weights in the dtype of their sum", weights.summed),
        Term("the same with the gathered dimension first", weights.turned),
    )


def attention_numbers(mixer: Mixer, execution: Execution) -> tuple[int, int]:
    """Return the numbers per token that attention keeps for its backward pass, and those of the gradients there."""
    devices, heads = execution.ways(execution.sequence_axes), execution.inner_group("heads").size
    gathers = devices > 1 and isinstance(context_parallel(execution), GatherKept)
    wide = 4 // jnp.dtype(execution.dtype).itemsize  # numbers per float32
    # Of `gather` keys and values of the whole sequence. Of `ring` those that are there and those that arrive.
    copies = devices if gathers else 2 if devices > 1 else 1
    # Gradients of the ring travel in float32: what passes, what arrives and this device's share.
    passing = 3 * wide * (devices > 1 and not gathers)
    if isinstance(mixer, Attention):
        number, size = mixer.query.shape[-2] // heads, mixer.query.shape[-1]
        kept = 2 * max(1, mixer.key.shape[-2] // heads) * size
        queries = 2 * number * size
        # Norms need what they normalise.
        normed = (queries + kept) // 2 * (mixer.query_norm is not None)
        return normed + queries + kept * copies + wide * number, queries + kept * (copies + passing)
    if isinstance(mixer, LatentAttention):
        s = mixer.sizes
        number, latents = s.heads // heads, s.kv_lora + s.rope_dim
        keys = number * (s.nope_dim + s.rope_dim + s.value_dim)
        lora = 2 * (s.q_lora or 0) + 2 * latents
        here = devices if gathers else 1
        return (
            keys * (1 + here) + lora + copies * latents + wide * number,
            keys * (1 + here) + lora + (copies + passing) * latents,
        )
    return 0, 0


def feed_forward_bytes(
    part: FeedForward, execution: Execution, tokens: int, backend: str
) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Return what the feed-forward part holds at its products, and when the gradients of its weights are there."""
    itemsize, inner = jnp.dtype(execution.dtype).itemsize, execution.inner_group("mlp").size
    if not isinstance(part, MoE):
        # gate, up, what is between them and down, and the gradients of the three.
        each = Term("activations of the MLP and their gradients", 6 * tokens * part.gate.shape[-1] // inner * itemsize)
        return (each,), (each,)
    d, f, k = part.experts.gate.shape[-2], part.experts.gate.shape[-1] // inner, part.router.k
    experts = part.router.weight.shape[-1]
    group = execution.expert_group(experts)
    strategy = for_group(execution.strategy, group)
    sizes = [strategy.rows(chunk, k, group) for chunk in strategy.chunk_sizes(tokens)]
    rows, largest = sum(sizes), max(sizes)
    again = REMAT[execution.remat].kernels_keep == "inputs"
    if backend in ("hopper", "blackwell"):
        # Rows of the cotangent; gate, up, and the gradient by what is between, which one pass turns into three.
        products, later = largest * (d + 6 * f), largest * (2 * d + 2 * f)
    elif backend == "blocked":
        # A loop over blocks: gradients by rows.
        products, later = (rows + largest) * d + largest * d, largest * d
    else:
        # XLA's own product returns float32: gate and up, if they are made again, and the gradient by what is between.
        wide = 4 // itemsize
        products = rows * d * again + largest * (f * (wide * (3 if again else 1) + (1 if again else 3)) + d)
        later = rows * d * again + largest * (2 * f + d)
    shared = 0 if part.shared is None else tokens * part.shared.gate.shape[-1] // inner
    moving = strategy_numbers(strategy, group, tokens, k, rows) * d if group.axes else 0
    beside = (
        Term("rows on their way", moving * itemsize),
        Term("activations of the shared expert and their gradients", 6 * shared * itemsize),
        # Logits, scores and gradients of E experts in float32; of K choices an id, a gate, a row, an order and inverses.
        Term("routing", 4 * tokens * (3 * experts + 8 * k)),
    )
    return (
        (Term("rows of experts and their gradients", products * itemsize), *beside),
        (Term("rows of experts and their gradients", later * itemsize), *beside),
    )


def strategy_numbers(strategy, group, tokens, k, rows) -> int:
    """Return the rows of width d that a strategy holds to bring tokens to experts and gradients back."""
    kind = type(strategy).__name__
    return {
        # Tokens of the group, the cotangents of their sums, and gradients by tokens before they are summed.
        "Ring": 3 * group.size * tokens,
        # Sent and received rows, and the cotangents of results there.
        "Ragged": 2 * tokens * k + 2 * rows,
        "Capacity": 3 * rows,
    }.get(kind, 0)
