"""Our model, run layer by layer outside the scan; the input and output of every module are kept."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moezoo.models.base import LanguageModel, Unembedding
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Routed
from moezoo.nn.attention import TokenPositions, gather_positions
from moezoo.parallel.execution import Execution


class ModuleRecord(NamedTuple):
    """What entered a module and what it returned; None for an input that has no counterpart."""

    input: np.ndarray | None
    output: np.ndarray


# A module's path, and the number of the layer in the model that it belongs to; None outside layers.
Where = tuple[str, int | None]

# transformers' module with a part's parameters returns what ours returns one level up: the weighted sum over a token's
# experts, where our `Experts` returns a row for each; logits, where ours has a matrix.
_RESULT_OF_A_PART = {MoE: "experts", Unembedding: "weight"}


def record_model(model: LanguageModel, tokens: np.ndarray) -> dict[Where, ModuleRecord]:
    """What enters and leaves each module when the model reads `tokens` on one device, in the order they finish."""
    records: dict[Where, ModuleRecord] = {}
    execution = Execution()
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)

    def apply(call: Any, module: Any, x: Array, path: str, layer: int | None = None) -> Array:
        result, inside = call(module, x)
        records.update(((f"{path}{below}", layer), ModuleRecord(*one)) for below, one in inside.items())
        return result

    with jax.default_matmul_precision("highest"):
        context = gather_positions(TokenPositions(positions, jnp.ones_like(ids)), execution)
        x = apply(_compile_recording(lambda m, x: m(x)), model.embedding, ids, "embedding")
        number = 0
        for stack_number, stack in enumerate(model.stacks):
            call = _compile_recording(lambda m, x: m(x, context, execution).x)  # compiled once a stack
            for index in range(stack.count):
                layer = jax.tree.map(lambda a, index=index: a[index], stack.layer)
                x = apply(call, layer, x, f"stacks[{stack_number}].layer", number)
                number += 1
        apply(_compile_recording(lambda m, x: m(x)), model.unembedding, x, "unembedding")
    return records


def _compile_recording(call: Any) -> Any:
    """`call(module, x)` compiled, with what enters and leaves every module inside it, by path below it."""
    paths: list[str] = []  # in the order in which modules finish, where JAX would return a dict sorted

    @jax.jit
    def program(module: Any, x: Array) -> tuple[Array, list[Any]]:
        inside: dict[str, tuple[Any, Any]] = {}
        result = call(_wrap(module, "", inside), x)
        paths[:] = inside
        return result, list(inside.values())

    def call_and_record(module: Any, x: Array) -> tuple[Array, dict[str, Any]]:
        result, inside = program(module, x)
        return result, dict(zip(paths, jax.device_get(inside), strict=True))

    return call_and_record


def _wrap(module: Any, path: str, records: dict[str, tuple[Any, Any]]) -> Any:
    """`module` with itself and every module inside it noting what it is given and returns."""
    inside = {
        name: child
        for name, child in vars(module).items()
        if isinstance(child, eqx.Module) and not isinstance(child, Experts)
    }
    if inside:
        children = [_wrap(child, f"{path}.{name}", records) for name, child in inside.items()]
        module = eqx.tree_at(lambda m: [getattr(m, name) for name in inside], module, children)
    return _Wrapped(module, path, records)


class _Wrapped:
    """A module that records its calls and otherwise behaves as that module."""

    def __init__(self, module: Any, path: str, records: dict[str, tuple[Any, Any]]):
        self._module, self._path, self._records = module, path, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any, *arguments: Any) -> Any:
        result = self._module(x, *arguments)
        output = _array(result)
        if (part := _RESULT_OF_A_PART.get(type(self._module))) is not None:
            self._records[f"{self._path}.{part}"] = (None, output)
        self._records[self._path] = (x, output)
        return result


def _array(result: Any) -> Array:
    """A module's result as one array; of a router each token's gate for each expert, zero if not chosen."""
    if isinstance(result, Routed):
        expert_ids, gates = result.assignment
        num_experts = result.sums.counts.shape[-1]
        return (jax.nn.one_hot(expert_ids, num_experts, dtype=gates.dtype) * gates[..., None]).sum(1)
    return result[0] if isinstance(result, tuple) else result
