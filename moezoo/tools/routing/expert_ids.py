"""The experts that a model chooses for each token of a batch, on any mesh."""

import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
from einops import rearrange
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, PyTree

from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel, check_tokens
from moezoo.models.block import Block, LayerOutput
from moezoo.models.choice import choose_dispatch
from moezoo.models.layers import layer_addresses, run_layers
from moezoo.moe.router import Routed, Router
from moezoo.nn.few_bits import cut_pieces
from moezoo.nn.positions import make_context
from moezoo.parallel.axes import Stack
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh, place
from moezoo.training.feed import Feed


class ExpertIds:
    """Runs a model's layers and returns the chosen experts: `expert_ids(batch)`; compiled once, for one shape.

    `layers` are the numbers of the model's layers with experts. The model has `experts` of them in each, and a token
    goes to `k`.
    """

    def __init__(self, model: LanguageModel, execution: Execution, shape: tuple[int, int]):
        """Lay the model out for an execution that drops nothing, and batches of `shape` [batch, seq].

        Raises `UserError` for a model without experts, or where the mesh does not split the batches.
        """
        addresses = [each for each in layer_addresses(model.stacks) if each.routing_row is not None]
        if not addresses:
            raise UserError(
                f"the model has no layer with experts (all {model.config.layers} have an MLP), so nothing is routed; "
                "choose a model with experts, or make one with init_from=FOLDER upcycle.experts=8"
            )
        self.layers = tuple(each.number for each in addresses)
        self.experts, self.k, self.vocab = model.config.experts, model.config.experts_per_token, model.vocab
        here = on_mesh(execution.in_turn)
        check_tokens(*shape, here, batch_key="batch_size")
        here = choose_dispatch(model.stacks, *shape, here.exact, "evaluate")
        mesh = make_mesh(MeshShape()) if here.mesh is None else here.mesh
        assert isinstance(mesh, jax.sharding.Mesh)
        order = here.token_order(shape[1])
        self._addresses, self._back = addresses, np.argsort(order)
        self._model = place(cut_pieces(model, here), here)
        self._feed = Feed(NamedSharding(mesh, here.tokens_spec), shape, order)
        self._program = _make_program(here)

    def __call__(self, batch: Batch) -> Int32[np.ndarray, "layer batch seq k"]:
        """Return the experts of each token in each layer with experts; `experts` at padding.

        `batch` has NumPy arrays; raises `UserError` as `Feed` does.
        """
        # Wait for each batch, as an evaluation does.
        found = jax.device_get(jax.block_until_ready(self._program(self._model, self._feed(batch))))
        rows = [found[each.stack][each.kind][each.index] for each in self._addresses]
        return np.stack(rows)[:, :, self._back]


@functools.lru_cache(maxsize=8)
def _make_program(execution: MeshExecution) -> Any:
    """Return the program from a model and a `Batch` to expert ids [layer, batch, seq, k] by stack and kind.

    All models that run in one way share it, so those of one kind are compiled once.
    """

    def local(model: LanguageModel, batch: Batch) -> PyTree:
        context = make_context(Coordinates(batch.positions, batch.segments), execution, execution.sequence_order)
        x = model.embed(batch.tokens, execution)
        stacks = tuple(Stack(tuple(map(_Recording, stack.blocks)), stack.count) for stack in model.stacks)
        return run_layers(stacks, x, context, execution, collect=lambda _, expert_ids: expert_ids).kept

    @jax.jit
    def program(model: LanguageModel, batch: Batch) -> PyTree:
        specs: Any = execution.specs(model), Batch(*(execution.tokens_spec,) * 4)
        return execution.run(local, (model, batch), specs, PartitionSpec(None, *execution.tokens_spec))

    return program


class _Recording(eqx.Module):
    """A block that returns its tokens' expert ids in place of what its mixer keeps for a cache."""

    block: Block

    @property
    def attention(self) -> Any:
        """The mixer of the block, which the loop asks to prepare."""
        return self.block.attention

    @property
    def moe(self) -> Any:
        """The block's mixture of experts, or None."""
        return self.block.moe

    def __call__(self, x: Array, *arguments: Any) -> LayerOutput:
        if self.block.moe is None:
            return LayerOutput(self.block(x, *arguments).x, None, None)
        router: Any = _Recorder(self.block.moe.router)
        out = eqx.tree_at(lambda block: block.feed_forward.router, self.block, router)(x, *arguments)
        return LayerOutput(out.x, None, rearrange(router.expert_ids, "(b s) k -> b s k", b=x.shape[0]))


class _Recorder:
    """A router that keeps the expert ids of its call."""

    def __init__(self, router: Router):
        self._router, self.weight, self.expert_ids = router, router.weight, None

    def __call__(self, *arguments: Any) -> Routed:
        routed = self._router(*arguments)
        self.expert_ids = routed.assignment.expert_ids
        return routed
