"""What a device holds while it runs the layers of a stack in training, read from one traced layer and its gradient."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, PyTree

from moezoo.models.layers import learn_stack
from moezoo.nn.positions import make_context
from moezoo.parallel.axes import Stack, axes_of
from moezoo.parallel.collectives import vary, vary_like
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.liveness import SAME, Held, widest
from moezoo.parallel.mesh import no_context_mesh
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.traces import equations, scan_counts
from moezoo.parallel.traffic import Phase
from moezoo.parallel.weight_mover import WeightMover

_PHASES: tuple[Phase, ...] = ("forward", "backward")


class LayerMemory(NamedTuple):
    """The memory of one period of layers of a stack and of one micro-batch, in bytes on one device.

    Attributes:
        saved: What it saves on the device for the backward pass, routing sums included.
        sums: The routing sums.
        backward: The widest point of its backward pass, without what was saved, gradients of parameters, and the
            gradient that passes from layer to layer.
    """

    saved: int
    sums: int
    backward: Held


def layer_memory(stack: Stack, trained: Stack, execution: MeshExecution, rows: int, length: int) -> LayerMemory:
    """Return the memory of one period of a stack. Results are remembered.

    Args:
        stack: The shapes of its arrays, whole.
        trained: Which of them are trained.
        execution: How the layers run.
        rows: The sequences of a micro-batch, over all devices together, or over those of a stage.
        length: The tokens of each, over all devices together.
    """
    leaves, structure = jax.tree.flatten(stack)
    shapes = tuple((x.shape[1:], jnp.dtype(x.dtype)) for x in leaves)
    return _traced(shapes, structure, tuple(jax.tree.leaves(trained)), execution, rows, length)


@functools.lru_cache(maxsize=256)
def _traced(
    shapes: Any, structure: Any, learns: tuple[bool, ...], execution: MeshExecution, rows: int, length: int
) -> LayerMemory:
    stack: Stack = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct((1, *shape), of) for shape, of in shapes])
    stack = Stack(stack.blocks, 1)
    trained = jax.tree.unflatten(jax.tree.structure(stack), learns)
    axes, sums = execution.token_axes, list[Any]()

    def local(stack: Stack, x: Array, coordinates: Coordinates, back: Array) -> Array:
        learned, fixed = eqx.partition(WeightMover(execution).vary(stack), trained)
        context = make_context(coordinates, execution, execution.sequence_order)

        def run(x: Array, learned: Stack) -> tuple[PyTree, PyTree]:
            y, found = learn_stack(eqx.combine(learned, fixed), x, context, execution, 0)
            sums.extend(jax.tree.leaves(found))
            losses, counts = eqx.partition(found, eqx.is_inexact_array)
            return (y, losses), counts

        with jax.named_scope("layers"):
            y, pull, counts = jax.vjp(run, vary(x, axes), learned, has_aux=True)
            results = pull((vary_like(back, y[0]), jax.tree.map(jnp.ones_like, y[1])))
        # One number per device, so that the program needs every result.
        numbers = (x.astype(jnp.float32).sum() for x in jax.tree.leaves((y, counts, results)))
        return functools.reduce(jnp.add, (vary(x, execution.live_axes) for x in numbers))[None]

    embed = stack.blocks[0].width
    x, token = (
        jax.ShapeDtypeStruct((rows, length, embed), execution.dtype),
        jax.ShapeDtypeStruct((rows, length), "int32"),
    )
    # Layer by layer: outside of a stage an execution with stages splits whole models only.
    stored = jax.tree.map(lambda x, axes: execution.placement(axes, x.shape).spec, stack, axes_of(stack))
    specs: Any = (stored, *(execution.tokens_spec,) * 3)
    assert execution.mesh is not None
    sizes, names = zip(*((size, name) for name, size in execution.mesh.shape.items()), strict=True)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    with no_context_mesh():
        program = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(execution.live_axes))
        coordinates: Any = (token, token)
        traced = jax.make_jaxpr(program)(stack, x, Coordinates(*coordinates), x)
    (found,) = layer_memories(traced, execution.target.platform if execution.target else "tpu")
    return found._replace(sums=sum(map(_bytes, sums)))


def layer_memories(traced: ClosedJaxpr, platform: str) -> list[LayerMemory]:
    """Return the memory of the loops over layers of a traced program and its gradient, in the order of its stacks.

    There is one loop per stack, so not with stages. Routing sums are not told apart.
    """
    # What mixers prepare before may need a loop too: it stacks nothing.
    forward, backward = ([x for x in layer_loops(traced, phase) if _stacked(x)] for phase in _PHASES)
    # The backward pass begins with the last loop, and ends where nothing before is trained.
    pairs = itertools.zip_longest(reversed(forward), backward)
    nothing = Held(0, {})
    found = [
        LayerMemory(saved_by(one), 0, nothing if back is None else held_in(back, traced, platform))
        for one, back in pairs
    ]
    return found[::-1]


def layer_loops(traced: ClosedJaxpr, phase: Phase) -> Iterator[JaxprEqn]:
    """Yield the loops over layers of a traced program that belong to a phase; with stages, those over ticks."""
    outer = None
    for each in equations(traced):
        inside = outer is not None and each.path.startswith(f"{outer}/")
        if each.equation.primitive.name == "scan" and (each.scope, each.phase) == ("layers", phase) and not inside:
            outer = each.path
            yield each.equation


def held_in(loop: JaxprEqn, traced: ClosedJaxpr, platform: str) -> Held:
    """Return what a loop of a traced program holds, with what the program makes before for all iterations to read."""
    makers = _makers_beside(loop.outvars[0], traced.jaxpr)
    read = {_source(x, makers) for x in loop.invars[: scan_counts(loop)[0]]}
    shared = sum(_bytes(x.aval) for x in read if x in makers)
    bytes, parts = widest(loop, platform)
    return Held(bytes + shared, {**parts, "arrays that all layers read": shared})


def _makers_beside(result: Any, program: Any) -> dict[Any, JaxprEqn]:
    """Return what makes each array of the program, or of one inside of it, in which `result` is made."""
    makers: dict[Any, JaxprEqn] = {x: each for each in program.eqns for x in each.outvars}
    if result in makers:
        return makers
    inner = (x for each in program.eqns for x in jax.tree.leaves(list(each.params.values())))
    programs = (getattr(x, "jaxpr", x) for x in inner if isinstance(x, ClosedJaxpr | Jaxpr))
    return next(filter(None, (_makers_beside(result, x) for x in programs)), {})


def _source(x: Any, makers: Mapping[Any, JaxprEqn]) -> Any:
    """Return the array that `x` is in another type or shape; None for a number."""
    while not isinstance(x, Literal):
        if x not in makers or makers[x].primitive.name not in SAME:
            return x
        x = makers[x].invars[0]
    return None


def saved_by(loop: JaxprEqn) -> int:
    """Return the bytes that an iteration stacks outside of the host's memory: the results after what it carries."""
    here = (x for x in _stacked(loop) if x.memory_space != jax.memory.Space.Host)
    return sum(map(_bytes, here)) // loop.params["length"]


def _stacked(loop: JaxprEqn) -> list[Any]:
    return [x.aval for x in loop.outvars[scan_counts(loop)[1] :]]


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize
