"""The experts that a model chooses for each token of a batch, on any mesh."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, PyTree

from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel, check_tokens
from moezoo.models.block import Block
from moezoo.models.choice import choose_dispatch
from moezoo.models.layers import layer_addresses, run_layers
from moezoo.moe.router import Routed, Router
from moezoo.nn.few_bits import cut_pieces
from moezoo.nn.positions import make_context
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh, place
from moezoo.training.feed import Feed


def make_expert_ids(
    model: LanguageModel, execution: Execution, shape: tuple[int, int]
) -> Callable[[Batch], Int32[np.ndarray, "layer batch seq k"]]:
    """Return a function from a batch of `shape` [batch, seq], NumPy arrays, to the experts of its tokens.

    It drops nothing, and is compiled once. `layer` are those with experts; padding goes to expert number `experts`.
    Raises `UserError` for a model without experts, or where the mesh does not split the batches.
    """
    addresses = [each for each in layer_addresses(model.stacks) if each.routing_row is not None]
    if not addresses:
        raise UserError(
            f"the model has no layer with experts (all {model.config.layers} have an MLP), so nothing is routed; "
            "choose a model with experts, or make one with init_from=FOLDER upcycle.experts=8"
        )
    here = on_mesh(execution.in_turn)
    check_tokens(*shape, here, batch_key="batch_size")
    here = choose_dispatch(model.stacks, *shape, here.exact, "evaluate")
    mesh = make_mesh(MeshShape()) if here.mesh is None else here.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    order = here.token_order(shape[1])
    placed = place(cut_pieces(model, here), here)
    feed, program = Feed(NamedSharding(mesh, here.tokens_spec), shape, order), _make_program(here)

    def expert_ids(batch: Batch) -> np.ndarray:
        # Wait for each batch, as an evaluation does.
        found = jax.device_get(jax.block_until_ready(program(placed, feed(batch))))
        return np.stack([found[each.stack][each.kind][each.index] for each in addresses])[:, :, np.argsort(order)]

    return expert_ids


@functools.lru_cache(maxsize=8)
def _make_program(execution: MeshExecution) -> Any:
    """Return the program from a model and a `Batch` to expert ids [layer, batch, seq, k] by stack and kind.

    All models that run in one way share it, so those of one kind are compiled once.
    """

    def local(model: LanguageModel, batch: Batch) -> PyTree:
        context = make_context(Coordinates(batch.positions, batch.segments), execution, execution.sequence_order)
        x, found = model.embed(batch.tokens, execution), list[Array]()

        def record(part: Any) -> Any:
            return _Recorder(part, found) if isinstance(part, Router) else part

        def collect(block: Block, _: PyTree) -> Array | None:
            return None if block.moe is None else found.pop().reshape(*batch.tokens.shape, -1)

        stacks = jax.tree.map(record, model.stacks, is_leaf=lambda part: isinstance(part, Router))
        return run_layers(stacks, x, context, execution, collect=collect).kept

    @jax.jit
    def program(model: LanguageModel, batch: Batch) -> PyTree:
        specs: Any = execution.specs(model), Batch(*(execution.tokens_spec,) * 4)
        return execution.run(local, (model, batch), specs, PartitionSpec(None, *execution.tokens_spec))

    return program


class _Recorder(eqx.Module):
    """A router that appends the expert ids of its call to `found`, from which the loop over layers takes them."""

    router: Router
    found: list[Array] = eqx.field(static=True)

    @property
    def weight(self) -> Any:
        """The weight of the router, which has the number of experts."""
        return self.router.weight

    def __call__(self, *arguments: Any) -> Routed:
        routed = self.router(*arguments)
        self.found.append(routed.assignment.expert_ids)
        return routed
