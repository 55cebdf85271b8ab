"""Our model, run layer by layer outside the scan, with every module's input and output kept."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moezoo.execution import Execution
from moezoo.moe.block import Experts, MoE
from moezoo.moe.router import Routed
from moezoo.nn.attention import Place, place_keys
from moezoo.nn.language_model import LanguageModel, Unembedding


class Noted(NamedTuple):
    """What entered a module and what it returned; None for an input that has no counterpart."""

    input: np.ndarray | None
    output: np.ndarray


# A module's path, and the number of the layer in the model that it belongs to; None outside layers.
Where = tuple[str, int | None]

# transformers' module with a part's parameters returns what ours returns one level up: the weighted sum over a token's
# experts, where our `Experts` returns a row for each; logits, where ours has a matrix.
_RESULT_OF_A_PART = {MoE: "experts", Unembedding: "weight"}


def run(model: LanguageModel, tokens: np.ndarray) -> dict[Where, Noted]:
    """What enters and leaves each module when the model reads `tokens` on one device, in the order they finish."""
    noted: dict[Where, Noted] = {}
    execution = Execution()
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)

    def apply(call: Any, module: Any, x: Array, path: str, layer: int | None = None) -> Array:
        result, inside = call(module, x)
        noted.update(((f"{path}{below}", layer), Noted(*one)) for below, one in inside.items())
        return result

    with jax.default_matmul_precision("highest"):
        context = place_keys(Place(positions, jnp.ones_like(ids)), execution)
        x = apply(_recording(lambda m, x: m(x)), model.embedding, ids, "embedding")
        number = 0
        for stack_number, stack in enumerate(model.stacks):
            call = _recording(lambda m, x: m(x, context, execution).x)  # compiled once a stack
            for index in range(stack.count):
                layer = jax.tree.map(lambda a, index=index: a[index], stack.layer)
                x = apply(call, layer, x, f"stacks[{stack_number}].layer", number)
                number += 1
        apply(_recording(lambda m, x: m(x)), model.unembedding, x, "unembedding")
    return noted


def _recording(call: Any) -> Any:
    """`call(module, x)` compiled, with what enters and leaves every module inside it, by path below it."""
    paths: list[str] = []  # in the order in which modules finish, where JAX would return a dict sorted

    @jax.jit
    def compiled(module: Any, x: Array) -> tuple[Array, list[Any]]:
        inside: dict[str, tuple[Any, Any]] = {}
        result = call(_recorded(module, "", inside), x)
        paths[:] = inside
        return result, list(inside.values())

    def recorded(module: Any, x: Array) -> tuple[Array, dict[str, Any]]:
        result, inside = compiled(module, x)
        return result, dict(zip(paths, jax.device_get(inside), strict=True))

    return recorded


def _recorded(module: Any, path: str, noted: dict[str, tuple[Any, Any]]) -> Any:
    """`module` with itself and every module inside it noting what it is given and returns."""
    inside = {
        name: child
        for name, child in vars(module).items()
        if isinstance(child, eqx.Module) and not isinstance(child, Experts)
    }
    if inside:
        children = [_recorded(child, f"{path}.{name}", noted) for name, child in inside.items()]
        module = eqx.tree_at(lambda m: [getattr(m, name) for name in inside], module, children)
    return _Recorded(module, path, noted)


class _Recorded:
    """A module whose calls are noted; else it is that module."""

    def __init__(self, module: Any, path: str, noted: dict[str, tuple[Any, Any]]):
        self._module, self._path, self._noted = module, path, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any, *arguments: Any) -> Any:
        result = self._module(x, *arguments)
        output = _array(result)
        if (part := _RESULT_OF_A_PART.get(type(self._module))) is not None:
            self._noted[f"{self._path}.{part}"] = (None, output)
        self._noted[self._path] = (x, output)
        return result


def _array(result: Any) -> Array:
    """A module's result as one array; of a router the weight of each expert for each token, zero if not chosen."""
    if isinstance(result, Routed):
        chosen, weights = result.assignment
        experts = result.sums.counts.shape[-1]
        return (jax.nn.one_hot(chosen, experts, dtype=weights.dtype) * weights[..., None]).sum(1)
    return result[0] if isinstance(result, tuple) else result
