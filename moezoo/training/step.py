"""The training step: one `jax.shard_map` over the whole mesh, from a batch to new parameters.

    gather -> layers -> loss -> backward (micro-step by micro-step) -> sum over devices -> norm -> update

Every collective is written out:

- weights are gathered in their layer (`WeightMover.gather`); the transpose reduce-scatters their gradients;
- tokens or expert weights move as the dispatch strategy defines;
- the loss and each array of routing statistics take one sum per micro-step;
- the gradient of each replicated leaf takes one sum per step, and so does the global norm.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, UInt32

from moezoo.data import Batch
from moezoo.host.machine import give_back_freed_memory
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.choice import choose_dispatch
from moezoo.moe.routing import Balance, Routing, balance_of
from moezoo.optim import Guard, GuardSettings, Optimizer, Work
from moezoo.optim.base import Pace
from moezoo.optim.guard import select
from moezoo.parallel.collectives import psum, vary_like
from moezoo.parallel.dropout import Dropout
from moezoo.parallel.memory import local_bytes
from moezoo.parallel.mesh import no_context_mesh
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.placement import EVERYWHERE
from moezoo.parallel.weight_mover import WeightMover
from moezoo.training.feed import Feed
from moezoo.training.gradients import global_norm, reduce_gradients
from moezoo.training.loss import losses
from moezoo.training.rounding import count_lost


class State(NamedTuple):
    """Everything that a step changes: the model, the optimiser's state, the guard, and the number of steps done."""

    model: LanguageModel
    optimizer: Any
    guard: Guard
    step: Int[Array, ""]


class Metrics(NamedTuple):
    """The metrics of one step, over all its tokens.

    - `loss`: cross-entropy in nats per predicted token, the mean over all of them;
    - `load_balance_loss`, `z_loss`: with their coefficients, the mean over micro-steps, each by its tokens;
    - `gradient_norm`: before clipping;
    - `learning_rate`: as used in this step;
    - `balance`, `dropped`, `load`: how evenly experts are used; assignments lost, and made, over all micro-steps;
    - `skipped`, `skipped_in_a_row`: steps skipped in the run so far, and since the last accepted one;
    - `lost`: changes that rounding undid (`moezoo.training.rounding.count_lost`), none in a skipped step; None where
      trained parameters are float32.
    """

    loss: Float[Array, ""]
    load_balance_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    balance: Balance
    dropped: Int[Array, " layer"]
    load: Int[Array, "layer experts"]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    lost: UInt32[Array, "2 2"] | None


class _Sums(NamedTuple):
    """The sums over micro-steps."""

    nats: Float[Array, ""]
    load_balance_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    dropped: Int[Array, " layer"]
    load: Int[Array, "layer experts"]


def _sums(nats: Array, routing: Routing, share: Array) -> _Sums:
    """Return what a micro-step with this share of the tokens adds to the sums of its step."""
    balance, z = share * routing.load_balance_loss.mean(), share * routing.z_loss.mean()
    return _Sums(nats, balance, z, routing.dropped, routing.load)


def gradients_of(
    model: LanguageModel,
    batch: Batch,
    trained: PyTree,
    placements: PyTree,
    execution: MeshExecution,
    dropout: Dropout | None = None,
) -> tuple[PyTree, _Sums, Int[Array, ""]]:
    """Return gradients of the trained part of `model`, sums of losses, and the number of predicted tokens.

    The objective is the cross-entropy per predicted token of the whole step, plus the routing losses of micro-steps,
    each times its share of the tokens of the step that are no padding.

    Args:
        model: This device's part of the model, inside `shard_map`.
        batch: This device's arrays [micro-batches, batch, seq]: one for each micro-step or, of a stage, some.
        trained: A tree of booleans that selects the trained arrays.
        placements: The placements of the trained arrays.
        execution: How to run the model.
        dropout: What low-rank pairs drop in this step; each micro-step drops its own.
    """
    own = execution.micro_batches // execution.stages
    micro_steps = batch.tokens.shape[0] // own
    numbers = execution.first_micro_batch(len(batch.tokens)) + jnp.arange(len(batch.tokens))
    passes = jax.tree.map(lambda x: x.reshape(micro_steps, own, *x.shape[1:]), (batch, numbers))
    with jax.named_scope("loss"):
        counts = [which.sum(dtype=jnp.int32) for which in (batch.labels >= 0, batch.segments > 0)]
        predicted, tokens = psum(jnp.stack(counts), execution.token_axes)
    scale = 1 / jnp.maximum(predicted, 1).astype(jnp.float32)
    # From here on parameters are typed as varying, so gradients stay local until they are summed once, below.
    parameters, buffers = eqx.partition(WeightMover(execution).vary(model), trained)

    def objective(parameters: PyTree, one: Batch, numbers: Int[Array, " own"]) -> tuple[Float[Array, ""], _Sums]:
        nats, routing = losses(eqx.combine(parameters, buffers), one, execution, dropout, numbers)
        here = routing.load[0].sum() // model.routing_config.experts_per_token
        sums = _sums(nats, routing, here.astype(jnp.float32) / jnp.maximum(tokens, 1).astype(jnp.float32))
        return nats * scale + sums.load_balance_loss + sums.z_loss, sums

    differentiate = jax.grad(objective, has_aux=True)
    if micro_steps == 1:
        gradients, sums = differentiate(parameters, *jax.tree.map(lambda x: x[0], passes))
    else:

        def add(total: PyTree, one: tuple[Batch, Array]) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, differentiate(parameters, *one)), None

        _, sums = jax.eval_shape(differentiate, parameters, *jax.tree.map(lambda x: x[0], passes))
        zeros = (
            jax.tree.map(lambda p: vary_like(jnp.zeros(p.shape, p.dtype), p), parameters),
            jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums),
        )
        (gradients, sums), _ = jax.lax.scan(add, zeros, passes)
    return reduce_gradients(gradients, placements, execution.reduce_dtype), sums, predicted


class CompiledStep:
    """A compiled step, called with a state and a batch. `program` takes the pace of the run as a third argument."""

    def __init__(self, program: "jax.stages.Compiled", pace: Pace, everywhere: NamedSharding):
        """Keep the pace, which every device gets as `everywhere` says."""
        self.program, self._pace, self._everywhere = program, pace, everywhere

    @functools.cached_property
    def _placed(self) -> Pace:  # not before the first call: a program for absent devices has none
        return jax.device_put(self._pace, self._everywhere)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        return self.program(state, batch, self._placed)


class Step:
    """The training step of one model, mesh and batch shape.

    `run = step.compile()` compiles it; `state, metrics = run(state, batch)` runs it and donates `state`. These must
    be laid out by `state_shardings` and `batch_shardings`; `check_shardings` refuses others. `feed()` makes such
    batches, with tokens in the order of the execution.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        optimizer: Optimizer,
        execution: MeshExecution,
        batch: Batch,
        guard: GuardSettings = GuardSettings(),  # noqa: B008  (it is immutable)
        seed: int = 0,
    ):
        """Prepare the step; nothing is compiled yet.

        Args:
            blueprint: The model, and which of its arrays are trained. One that is not has no gradient, no moment and no
                part in the norm; only its gathers move bytes.
            optimizer: The optimiser of its parameters.
            execution: How to run the model; it must have a mesh.
            batch: Arrays, or shapes, [micro-batches, sequences, seq]: one for each micro-step or, with stages, as many
                as pass through them at once.
            guard: Which steps are skipped.
            seed: What decides, with the number of a step, what an adapter drops.

        Raises:
            UserError: As `moezoo.parallel.axes.trainable_mask` does.
        """
        self.blueprint, self.trained, (_, rows, length) = blueprint, blueprint.mask, batch.tokens.shape
        self._seed = seed
        model = blueprint.shapes
        execution = choose_dispatch(model.stacks, rows, length, execution, "train", self.trained)
        self.execution, self.optimizer, self._guard = execution, optimizer, guard
        placements = execution.placements(model)
        moments = optimizer.placements(eqx.filter(model, self.trained), eqx.filter(placements, self.trained))
        everywhere: Any = EVERYWHERE
        self.placements = State(placements, moments, Guard(*(everywhere,) * len(Guard._fields)), everywhere)
        mesh, split = execution.mesh, execution.micro_batches_spec
        assert mesh is not None
        state_specs: Any = jax.tree.map(lambda placement: placement.spec, self.placements)
        self.state_shardings = jax.tree.map(lambda placement: NamedSharding(mesh, placement.spec), self.placements)
        self.batch_shardings = Batch(*(NamedSharding(mesh, split),) * 4)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        whole = jax.shard_map(
            self._local,
            mesh=mesh,
            in_specs=(state_specs, Batch(*(split,) * 4), PartitionSpec()),
            out_specs=(state_specs, PartitionSpec()),
        )
        self.function = jax.jit(whole, donate_argnums=0, out_shardings=(self.state_shardings, self._everywhere))
        state = jax.eval_shape(self.begin, model)
        self.arguments = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            (state, batch, optimizer.pace),
            (self.state_shardings, self.batch_shardings, jax.tree.map(lambda _: self._everywhere, optimizer.pace)),
        )

    def feed(self) -> Feed:
        """Return what puts batches onto the devices of the step."""
        shape = self.arguments[1].tokens.shape
        return Feed(self.batch_shardings.tokens, shape, self.execution.token_order(shape[-1]))

    @property
    def memory(self) -> dict[str, int]:
        """What a device holds for a whole step, activations aside -> the bytes of it."""
        return self._memory(*self.arguments[0][:2])

    def memory_in(self, dtype: DTypeLike) -> dict[str, int]:
        """Return what `memory` would be with parameters of `dtype`."""
        model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), self.blueprint.shapes)
        return self._memory(model, jax.eval_shape(self.optimizer.init, eqx.filter(model, self.trained)))

    def _memory(self, model: LanguageModel, moments: PyTree) -> dict[str, int]:
        placements = self.placements
        learning = (eqx.filter(tree, self.trained) for tree in (model, placements.model))
        return {
            "parameters": local_bytes(model, placements.model),
            "gradients": local_bytes(*learning),
            "optimizer state": local_bytes(moments, placements.optimizer),
        }

    @property
    def update_work(self) -> tuple[Work, ...]:
        """What each group of parameters does in an update."""
        return self.optimizer.work(eqx.filter(self.arguments[0].model, self.trained), self.execution.ways)

    def begin(self, model: LanguageModel) -> State:
        """Return the first state of a fresh model; call it under `jax.eval_shape` or `jax.jit`, as `build_state`."""
        return State(model, self.optimizer.init(eqx.filter(model, self.trained)), Guard.fresh(), jnp.int32(0))

    def _local(self, state: State, batch: Batch, pace: Pace) -> tuple[State, Metrics]:
        execution, optimizer = self.execution, self.optimizer
        placements = eqx.filter(self.placements.model, self.trained)
        dropout, drop_rate = None, self.blueprint.adapter.dropout
        if drop_rate:
            dropout = Dropout.start(drop_rate, self._seed, state.step, execution.token_numbers(*batch.tokens.shape[1:]))
        gradients, sums, predicted = gradients_of(state.model, batch, self.trained, placements, execution, dropout)
        parameters, buffers = eqx.partition(state.model, self.trained)
        norm = global_norm(gradients, placements, execution.live_axes)
        rate = optimizer.rate(state.step, pace)
        loss = sums.nats / jnp.maximum(predicted, 1).astype(jnp.float32)
        accepted = state.guard.accepts(loss, norm, self._guard)
        guard = state.guard.after(accepted, loss, norm)
        choose = functools.partial(select, accepted)
        with jax.named_scope("optimizer"):
            new, moments, changes = optimizer.update(gradients, state.optimizer, parameters, rate, norm, choose)
        lost = count_lost(parameters, changes, placements, execution.live_axes)
        metrics = Metrics(
            loss=loss,
            load_balance_loss=sums.load_balance_loss,
            z_loss=sums.z_loss,
            gradient_norm=norm,
            learning_rate=rate,
            balance=balance_of(sums.load),
            dropped=sums.dropped,
            load=sums.load,
            skipped=guard.skipped,
            skipped_in_a_row=guard.in_a_row,
            lost=None if lost is None else choose(lost, jnp.zeros_like(lost)),
        )
        after = eqx.combine(new, buffers).after_step(sums.load)
        buffers = choose(eqx.filter(after, self.trained, inverse=True), buffers)
        return State(eqx.combine(new, buffers), moments, guard, state.step + 1), metrics

    @functools.cached_property
    def traced(self) -> "jax.stages.Traced":
        """The traced step; collectives are counted in `traced.jaxpr`."""
        with _no_garbage_collection(), no_context_mesh():
            return self.function.trace(*self.arguments)

    def compile(self) -> CompiledStep:
        """Compile the step for the platform of the mesh. Other steps or another rate make the same program."""
        traced = self.traced
        with _no_garbage_collection():
            lowered = traced.lower()
        compiled = lowered.compile()
        give_back_freed_memory()
        return CompiledStep(compiled, self.optimizer.pace, self._everywhere)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause it: tracing makes many objects that stay, and every collection visits all of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_shardings(tree: PyTree, shardings: PyTree) -> None:
    """Raise `ValueError` for an array that is not laid out by `shardings`; JAX would move it silently."""

    def leaf(path: Any, x: jax.Array, sharding: NamedSharding) -> None:
        if not x.sharding.is_equivalent_to(sharding, x.ndim):
            raise ValueError(f"{jax.tree_util.keystr(path)} has sharding {x.sharding}, expected {sharding}")

    jax.tree_util.tree_map_with_path(leaf, tree, shardings)
