"""The experts that a model chooses for each token of a batch, on any mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, PyTree

from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel, check_tokens
from moezoo.models.choice import choose_dispatch
from moezoo.models.layers import layer_addresses, run_layers
from moezoo.moe.router import Routed
from moezoo.nn.few_bits import cut_pieces
from moezoo.nn.positions import make_context
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh, place
from moezoo.tools.parity.recording import Record, recording
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
    feed = Feed(NamedSharding(mesh, here.tokens_spec), shape, order)

    def expert_ids(batch: Batch) -> np.ndarray:
        # Wait for each batch, as an evaluation does.
        found = jax.device_get(jax.block_until_ready(_run(placed, feed(batch), here)))
        return np.stack([found[each.stack][each.kind][0][each.index] for each in addresses])[:, :, np.argsort(order)]

    return expert_ids


@functools.partial(jax.jit, static_argnames="execution")
def _run(model: LanguageModel, batch: Batch, execution: MeshExecution) -> PyTree:
    """Return expert ids [layer, batch, seq, k] by stack and kind. Models of one kind are compiled once."""

    def local(model: LanguageModel, batch: Batch) -> PyTree:
        def collect(_: Any, records: tuple[Record, ...]) -> list[Array]:
            ids = (one.output.assignment.expert_ids for one in records if isinstance(one.output, Routed))
            return [each.reshape(*batch.tokens.shape, -1) for each in ids]

        context = make_context(Coordinates(batch.positions, batch.segments), execution, execution.sequence_order)
        x = model.embed(batch.tokens, execution)
        return run_layers(recording(model.stacks), x, context, execution, collect=collect).kept

    specs: Any = execution.specs(model), Batch(*(execution.tokens_spec,) * 4)
    return execution.run(local, (model, batch), specs, PartitionSpec(None, *execution.tokens_spec))
