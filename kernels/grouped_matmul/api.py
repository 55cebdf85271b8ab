"""`grouped_matmul`, `gated` and `routed_mlp`: their contracts, the choice of a backend, and the gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError
from moezoo.kernels import blocks
from moezoo.kernels.grouped_matmul import blocked, few, ragged_dot, reference, routed
from moezoo.kernels.grouped_matmul.backend import Activation, Backend, ExpertWeights
from moezoo.kernels.permute import permute, unpermute
from moezoo.parallel.collectives import GROUPED_MATMUL, vary_like
from moezoo.parallel.dispatch import Plan
from moezoo.parallel.kernels import (
    Chosen,
    ChosenBackends,
    Keep,
    KernelOrder,
    Target,
    add_backend,
    choose,
    passed_over,
    run,
    runs_on_hopper,
    runs_on_tpu,
)
from moezoo.parallel.stacks import InStack, on_cpu
from moezoo.parallel.stored import Composed, Frozen, Stored, Widened, by_matrix, materialise


@functools.cache
def _nvidia(chip: str, name: str, gpu: Target | None = None) -> Any:
    """Return a function for a generation of tensor cores. A call imports it: it takes 0.2 s to import Pallas."""

    def call(*operands: Any, **options: Any) -> Any:
        from moezoo.kernels.grouped_matmul import chips, tensor_cores, tensor_cores_gated, tensor_cores_mlp

        file = {"gated": tensor_cores_gated, "routed_mlp": tensor_cores_mlp}.get(name, tensor_cores)
        own = getattr(chips, chip.upper())
        if gpu is not None:
            own = own._replace(tiles=blocks.measured(own.tiles, chip, gpu, chips.Tiles.refusal))
        return getattr(file, name)(own, *operands, **options)

    return call


def _tensor_cores(chip: str, capability: str) -> Backend:
    names = ("multiply", "outer", "gated", "routed_mlp")
    # Kernels must not be traced for other chips: for some chips the compiler aborts the process.
    runs_on = lambda target: target == Target("cuda", capability)  # noqa: E731
    with_tiles = lambda one, gpu: one._replace(**{name: _nvidia(chip, name, gpu) for name in names})  # noqa: E731
    kernels = {name: _nvidia(chip, name) for name in names}
    return Backend(**kernels, runs_on=runs_on, dtypes=("bfloat16",), for_gpu=with_tiles)


def _persistent(gpu: Target | None = None) -> Any:
    """Return `multiply` by programs that compute one tile after another, imported as `_nvidia` does."""

    def multiply(*operands: Any, **options: Any) -> Any:
        from moezoo.kernels.grouped_matmul import persistent

        sizes = persistent.Sizes()
        if gpu is not None:
            sizes = blocks.measured(sizes, "hopper_persistent", gpu, persistent.Sizes.refusal)
        return persistent.multiply(sizes, *operands, **options)

    return multiply


def _megablox(name: str) -> Any:
    """Return a function of the kernels for TPUs by its name, imported as `_nvidia` does."""

    def call(*operands: Any, **options: Any) -> Any:
        from moezoo.kernels.grouped_matmul import megablox

        return getattr(megablox, name)(*operands, **options)

    return call


# A new backend is a file, and a name here.
BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.multiply, reference.outer),
    "hopper": _tensor_cores("hopper", "9.0"),
    "hopper_persistent": Backend(
        _persistent(),
        _nvidia("hopper", "outer"),
        runs_on=runs_on_hopper,
        dtypes=("bfloat16",),
        for_gpu=lambda one, gpu: one._replace(multiply=_persistent(gpu), outer=_nvidia("hopper", "outer", gpu)),
    ),
    "blackwell": _tensor_cores("blackwell", "10.0"),
    "blocked": Backend(
        blocked.multiply,
        blocked.outer,
        routed_mlp=routed.routed_mlp,  # pyright: ignore[reportArgumentType]
        in_stack=True,
        for_gpu=lambda backend, gpu: _with_blocks(backend, blocks.measured(blocked.ON_GPUS, "blocked", gpu)),
    ),
    "ragged_dot": Backend(ragged_dot.multiply, ragged_dot.outer),
    "megablox": Backend(_megablox("multiply"), _megablox("outer"), runs_on=runs_on_tpu, dtypes=("bfloat16", "float32")),
}


def _with_blocks(backend: Backend, sizes: blocked.Blocks) -> Backend:
    return backend._replace(
        multiply=functools.partial(blocked.multiply, blocks=sizes.products),
        outer=functools.partial(blocked.outer, blocks=sizes.products),
        routed_mlp=functools.partial(routed.routed_mlp, sizes=sizes.experts),  # pyright: ignore[reportArgumentType]
    )


def _backend(chosen: Chosen) -> Backend:
    one = BACKENDS[chosen.name]
    return one if chosen.gpu is None or one.for_gpu is None else one.for_gpu(one, chosen.gpu)


def register(name: str, backend: Backend) -> None:
    """Add a backend for this process: `execution.grouped_matmul` and `implementation` then take its name.

    Raises `UserError` for what is no backend, and for a name that another backend has.
    """
    add_backend("grouped_matmul", BACKENDS, name, backend, Backend)


def _own_order(target: Target) -> Sequence[str]:
    # XLA's own product is one kernel on a TPU; elsewhere it multiplies every row by every group's matrix.
    return (*{"tpu": ("ragged_dot",), "cuda": ("hopper", "blackwell")}.get(target.platform, ()), "blocked")


def chosen_backend(
    target: Target, names: tuple[str, ...] = (), dtype: DTypeLike = jnp.bfloat16, weights: Any = ()
) -> str:
    """Return the name of the backend that runs on `target` with operands of `dtype`, and `weights` or their shapes.

    It is the first of `names`, or of the kernel's own order.

    Raises:
        UserError: A name is not a backend, or none of them runs there.
    """
    return _choose(KernelOrder(names, target), dtype, weights)[0][1].name


def reasons(chosen: str, target: Target, names: tuple[str, ...], dtype: DTypeLike) -> list[str]:
    """Return why backends before the one that `chosen_backend` returns are passed over."""
    few_bits = "takes whole stacks, not weights of few bits"
    return passed_over(chosen, names, _own_order(target), BACKENDS, target, dtype, lambda _: few_bits)


def _choose(implementation: str | KernelOrder | None, dtype: DTypeLike, *weights: Any) -> ChosenBackends:
    runs_on = {name: functools.partial(lambda backend, at: backend.takes(at, dtype), b) for name, b in BACKENDS.items()}
    # The other backends need the array of all matrices, which has two to four times the bytes of a `Frozen`.
    is_frozen = lambda x: isinstance(x, Frozen)  # noqa: E731
    by_one = any(map(is_frozen, jax.tree.leaves(weights, is_leaf=is_frozen)))
    own = (lambda _: ("blocked",)) if by_one else _own_order
    return choose("grouped_matmul", runs_on, implementation, own, f" with {jnp.dtype(dtype).name}")


def _is_open(implementation: str | KernelOrder | None) -> bool:
    """Return whether no backend is named."""
    return implementation is None or (isinstance(implementation, KernelOrder) and not implementation.names)


def grouped_matmul(
    rows: Float[Array, "rows inputs"],
    weights: Float[Array, "groups inputs outputs"] | Stored,
    group_sizes: Int[Array, " groups"],
    *,
    implementation: str | KernelOrder | None = None,
) -> Float[Array, "rows outputs"]:
    """Multiply the rows of each group by the group's matrix.

    Products are accumulated in float32. Inside `shard_map` the result varies wherever an operand does, and no
    collective runs in the forward pass; the gradient of an operand that does not vary over an axis is summed over it
    (psum). Gradients are of first order, in reverse mode.

    | backend | runs on | work |
    |---|---|---|
    | `hopper` | NVIDIA GPUs of compute capability 9.0, in bfloat16; the default there | the rows in groups |
    | `hopper_persistent` | as `hopper`, by name only: a program computes several tiles | the rows in groups |
    | `blackwell` | NVIDIA GPUs of compute capability 10.0, in bfloat16; the default there | the rows in groups |
    | `blocked` | everything; the default except there and on TPUs | the rows in groups |
    | `ragged_dot` | everything; the default on TPUs: one kernel of XLA | `groups` times as much except on TPUs |
    | `megablox` | TPUs, in bfloat16 and float32; by name only | the rows in groups |
    | `reference` | everything; naive, for comparison | `groups` times as much |

    Args:
        rows: The rows of group 0, then of group 1, and so on. Rows beyond the last group may hold anything, NaN
            included.
        weights: One matrix per group, or a container that stands for them; in the dtype of `rows`. For a `Frozen`,
            `blocked` is the default everywhere, because the other backends make the whole stack.
        group_sizes: The rows per group, integers, 0 included. Their sum is at most the number of rows.
        implementation: A backend's name, or the order that `MeshExecution.kernel` gives. None for the default of the
            platform that the program is compiled for.

    Returns:
        The products in the dtype of `rows`. Rows beyond the last group are exactly zero and take no part in any
        gradient. The gradient of a group without rows is exactly zero.

    Raises:
        UserError: The backend does not exist or does not run here, or the numbers of sizes and matrices differ.
    """
    chosen = _choose(implementation, rows.dtype, weights)
    if weights.shape[0] != group_sizes.shape[0] or not weights.shape[0]:
        raise UserError(
            f"grouped_matmul: {group_sizes.shape[0]} group sizes for {weights.shape[0]} matrices; give one for each, "
            "and at least one"
        )
    group_sizes = jnp.asarray(group_sizes, jnp.int32)
    if isinstance(weights, Composed):
        again = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation=implementation)
        return weights.group_product(rows, again)
    weights = (by_matrix if isinstance(weights, InStack | Frozen) else materialise)(weights, rows.dtype)
    operands = (rows, weights, group_sizes)
    alike = jax.tree.leaves(operands)
    # A gradient must vary exactly as its operand. All are made to vary alike first; the transpose of that cast is the
    # sum over devices that a replicated operand needs.
    operands = jax.tree.map(lambda x: vary_like(x, *alike), operands)
    product = functools.partial(_product, chosen)
    is_few = _is_open(implementation) and few.suits(rows.shape[0], weights)
    result = on_cpu(few.multiply, product, *operands) if is_few else product(*operands)
    # Rematerialisation saves the result of a loop only under a name.
    return checkpoint_name(result, GROUPED_MATMUL)


def gated(
    rows: Float[Array, "rows inputs"],
    gate: Float[Array, "groups inputs outputs"] | Stored | None,
    up: Float[Array, "groups inputs outputs"] | Stored,
    group_sizes: Int[Array, " groups"],
    *,
    activation: Activation,
    gate_bias: Float[Array, "groups outputs"] | None = None,
    up_bias: Float[Array, "groups outputs"] | None = None,
    keep: Keep = "products",
    implementation: str | KernelOrder | None = None,
) -> Float[Array, "rows outputs"]:
    """Compute activation(rows x gate + gate_bias, rows x up + up_bias), with each group's matrices and biases.

    Dtypes, varying axes and gradients are those of `grouped_matmul`. Backends without a kernel for this compose it of
    calls of `grouped_matmul`, and all do without a gate: then the product with `up` is also that with `gate`.

    Args:
        rows: As for `grouped_matmul`.
        gate: One matrix per group; None for an activation that is not gated.
        up: One matrix per group.
        group_sizes: As for `grouped_matmul`.
        activation: A function of two arrays [rows, outputs]. Its value and gradient at zero must be finite.
        gate_bias: One bias per group, or None.
        up_bias: One bias per group, or None.
        keep: What a kernel keeps for the backward pass, as for `routed_mlp`.
        implementation: As for `grouped_matmul`.

    Returns:
        The activations in the dtype of `rows`. Rows beyond the last group are exactly zero, whatever `activation`
        returns for zeros.

    Raises:
        UserError: As for `grouped_matmul`.
    """
    chosen = _choose(implementation, rows.dtype, gate, up)
    options: Any = {"activation": activation, "keep": keep}
    composed = functools.partial(_gated, activation=activation)
    is_composed = isinstance(gate, Composed) or isinstance(up, Composed)
    if gate is None or is_composed or not any(_backend(one).gated for _, one in chosen):
        return composed(implementation, rows, gate, up, group_sizes, gate_bias, up_bias)

    def own(one: Chosen) -> Callable[..., Array]:
        kernel = _backend(one).gated
        return functools.partial(composed, one.name) if kernel is None else functools.partial(kernel, **options)

    matrices = (materialise(weights, rows.dtype) for weights in (gate, up))
    operands = (rows, *matrices, jnp.asarray(group_sizes, jnp.int32), gate_bias, up_bias)
    alike = jax.tree.leaves(operands)
    return checkpoint_name(run(chosen, own, *jax.tree.map(lambda x: vary_like(x, *alike), operands)), GROUPED_MATMUL)


def routed_mlp(
    tokens: Float[Array, "tokens embed"],
    gates: Float[Array, "tokens k"],
    plan: Plan,
    gate: Float[Array, "groups embed mlp"] | Stored | None,
    up: Float[Array, "groups embed mlp"] | Stored,
    down: Float[Array, "groups mlp embed"] | Stored,
    *,
    activation: Activation,
    gate_bias: Float[Array, "groups mlp"] | None = None,
    up_bias: Float[Array, "groups mlp"] | None = None,
    keep: Keep = "products",
    implementation: str | KernelOrder | None = None,
) -> Float[Array, "tokens embed"]:
    """Compute, for each token, sum_k gates[k] * expert_k(token), with expert(x) = gated(x) x down.

    Dtypes and varying axes are those of `grouped_matmul`; the sum over k is in float32 and in the order of choices.
    Backends without a kernel for this compose it of `permute`, `gated`, `grouped_matmul` and `unpermute`, and all do
    without a gate.

    Args:
        tokens: The tokens, in the dtype of the weights.
        gates: The gates, float32.
        plan: The rows of each group, and the token that each row holds.
        gate: One matrix per group; None as for `gated`.
        up: One matrix per group.
        down: One matrix per group.
        activation: As for `gated`.
        gate_bias: One bias per group, or None.
        up_bias: One bias per group, or None.
        keep: What a kernel keeps for the backward pass: the two products of each row, or only its inputs. Then it
            computes the products again, block by block, which takes less than to run the whole forward pass again.
        implementation: As for `grouped_matmul`.

    Returns:
        The sums in the dtype of `tokens`; zero for a token without rows.

    Raises:
        UserError: As for `grouped_matmul`.
    """
    chosen = _choose(implementation, tokens.dtype, gate, up, down)
    composed = functools.partial(_routed_mlp, activation=activation, keep=keep)
    # On accelerators these few rows take the composed path too.
    matrices = [w for w in (gate, up, down) if w is not None]
    are_few = _is_open(implementation) and all(few.suits(plan.assignment.shape[0], w) for w in matrices)
    is_sum = any(isinstance(w, Composed) for w in matrices)

    def has_kernel(one: Backend) -> bool:
        return one.routed_mlp is not None and (one.in_stack or not is_sum)

    if gate is None or are_few or not any(has_kernel(_backend(one)) for _, one in chosen):
        weights = ExpertWeights(gate, up, down, gate_bias, up_bias)  # pyright: ignore[reportArgumentType] containers
        return composed(implementation, tokens, gates, plan, weights)

    def own(chosen: Chosen) -> Callable[..., Array]:
        one = _backend(chosen)
        if not has_kernel(one):
            return functools.partial(composed, chosen.name)
        kernel = functools.partial(one.routed_mlp, activation=activation, keep=keep)  # pyright: ignore[reportArgumentType]
        return kernel if one.in_stack else lambda *rest: kernel(*rest[:-1], _arrays(rest[-1], tokens.dtype))

    gate, up, down = (by_matrix(weights, tokens.dtype) for weights in (gate, up, down))
    weights = ExpertWeights(gate, up, down, gate_bias, up_bias)  # pyright: ignore[reportArgumentType] containers
    operands = (tokens, gates, plan, weights)
    alike = jax.tree.leaves(operands)
    return checkpoint_name(run(chosen, own, *jax.tree.map(lambda x: vary_like(x, *alike), operands)), GROUPED_MATMUL)


def _arrays(weights: ExpertWeights, dtype: DTypeLike) -> ExpertWeights:
    return jax.tree.map(lambda w: materialise(w, dtype), weights, is_leaf=lambda w: isinstance(w, Stored))


def _routed_mlp(implementation, tokens, gates, plan, weights, *, activation, keep):
    gate, up, down, gate_bias, up_bias = weights
    options = {"group_sizes": plan.group_sizes, "implementation": implementation}
    rows = permute(tokens, plan)
    inner = gated(rows, gate, up, activation=activation, gate_bias=gate_bias, up_bias=up_bias, keep=keep, **options)
    return unpermute(grouped_matmul(inner, down, **options), gates, plan)


def _gated(implementation, rows, gate, up, group_sizes, gate_bias, up_bias, *, activation):
    product = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation=implementation)

    def biased(weights: Array | Stored, bias: Array | None) -> Array:
        y = product(rows, weights)
        # As a product, so that the gradient of a bias is summed group by group in a fixed order.
        return y if bias is None else y + product(jnp.ones_like(rows[:, :1]), bias[:, None])

    first = None if gate is None else biased(gate, gate_bias)
    second = biased(up, up_bias)
    result = activation(second if first is None else first, second)
    used = lax.iota(jnp.int32, rows.shape[0])[:, None] < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(used, result, jnp.zeros((), result.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(chosen, rows, weights, group_sizes):
    return run(chosen, functools.partial(_multiply, 1), rows, weights, group_sizes)


def _multiply(contract: Literal[1, 2], chosen: Chosen) -> Callable[..., Array]:
    """Return the product that sums over dimension `contract` of the weights: 1 forward, 2 for the gradient of rows."""
    one = _backend(chosen)
    return lambda rows, weights, sizes: one.multiply(
        rows, weights if one.in_stack else materialise(weights, rows.dtype), sizes, contract
    )


def _backward(chosen, residuals, cotangent):
    rows, weights, group_sizes = residuals
    outer = lambda one: functools.partial(_backend(one).outer, dtype=weights.dtype)  # noqa: E731
    by_rows = run(chosen, functools.partial(_multiply, 2), cotangent, weights, group_sizes)
    # A `Widened` stands for weights of few bits, which are never trained.
    by_weights = None if isinstance(weights, Widened) else run(chosen, outer, rows, cotangent, group_sizes)
    return by_rows, by_weights, None


_product.defvjp(lambda chosen, *operands: (_product(chosen, *operands), operands), _backward)
