"""What one device computes, moves in its memory and receives in a call of a model, and the least time that it takes.

Nothing is measured and no factor is fitted: rates are peaks, and work is what no implementation of the traced program
leaves out. Assumptions: routing is even, each row of a batch is one document, what a collective brings is written to
memory, and a layer's weights do not stay on the chip from one pass to the next.

| FLOPs of | source |
|---|---|
| products with weights, and those of the optimizer | the traced program, in each phase |
| experts | the same, for the rows that are in use; all rows for `capacity` and `dense`, which pad |
| scores and averages of attention | the keys that queries see; backward twice, and recomputed once or not at all |
| the same in decoding | the traced program, which reads all slots of the cache |
| the delta rule | the traced program of its kernel, which reads tokens in chunks |
| the same in decoding | as the model's |
| short convolutions | two per tap and channel; backward twice, and recomputed except with `remat=none` |

| bytes of | how often |
|---|---|
| weights | once in each product that reads them, of experts that have rows; gradients once in each that makes them |
| collectives | what is received, written once |
| saved activations | the input of each layer that is differentiated, and of each tick, written and read once |
| embeddings | the rows of this device's tokens, read once |
| update | trained parameters, their gradients and moments, read and written once |
| cache | written by a prefill, read by a decoding step, which writes recurrent states as well |

Other activations and logits may stay on the chip, so they do not count. A tick in which a pipeline stage has no work
takes as long as the others, and counts as they do. The FLOPs of the model do not contain it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from moezoo.config.build import blueprint_of, blueprint_on
from moezoo.config.settings import KERNELS, TrainConfig, check_config
from moezoo.generation.generate import Continued
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import Capacity, Dense
from moezoo.moe.mixture import layer_rows
from moezoo.nn.base import TokenFlops
from moezoo.parallel.axes import Role, count_parameters, is_stored, parameter_table
from moezoo.parallel.execution import REMAT
from moezoo.parallel.mesh import no_context_mesh
from moezoo.parallel.traces import Equation, collective_traffic, equations
from moezoo.parallel.traffic import CallName, Phase, TrafficTable
from moezoo.tools.calls import CALLS, Call
from moezoo.tools.plan.hardware import Slice
from moezoo.tools.sharding.activations import cache_rows
from moezoo.typed import convert


class Work(NamedTuple):
    """What one device does in one call.

    Attributes:
        flops: Phase -> FLOPs of products. Evaluation and generation are all `outside`.
        model_flops: A device's share of `model_flops` in training, and of its forward pass where stages evaluate;
            otherwise the sum of `flops`.
        hbm: What moves -> the bytes read from memory or written to it, at least.
        traffic: The collectives.
    """

    flops: dict[Phase, float]
    model_flops: float
    hbm: dict[str, float]
    traffic: TrafficTable


class Bound(NamedTuple):
    """The least seconds that one call takes on a slice.

    Attributes:
        compute: All products at the peak rate of bfloat16.
        hbm: All bytes at the peak rate of memory.
        links: Cut -> seconds (`moezoo.tools.plan.hardware`).
        alone: The collectives one after the other, each as fast as it can be.
    """

    compute: float
    hbm: float
    links: dict[str, float]
    alone: float

    @property
    def step_seconds(self) -> float:
        """The largest of all: compute, memory and links work at the same time, without a pause."""
        return max(self.compute, self.hbm, *self.links.values())

    @property
    def bound_by(self) -> str:
        """The name of the largest: "compute", "HBM", or a cut."""
        named = {"compute": self.compute, "HBM": self.hbm, **self.links}
        return max(named, key=lambda name: named[name])

    @property
    def summed(self) -> float:
        """The seconds if nothing overlaps: products, then bytes of memory, then each collective."""
        return self.compute + self.hbm + self.alone


def bound(work: Work, where: Slice, mesh: Mapping[str, int]) -> Bound:
    """Return the least seconds of `work` on a slice. Mesh and errors are those of `Slice.link_seconds`."""
    kinds: dict[Any, TrafficTable] = {}
    for row, traffic in work.traffic.items():
        kinds.setdefault((row.collective, row.axes), TrafficTable()).add(row, traffic)
    alone = sum(max(where.link_seconds(mesh, table).values(), default=0.0) for table in kinds.values())
    compute, hbm = sum(work.flops.values()) / where.chip.flops, sum(work.hbm.values()) / where.chip.hbm_speed
    return Bound(compute, hbm, where.link_seconds(mesh, work.traffic), alone)


def work_of(cfg: TrainConfig, call: CallName = "train", *, blueprint: Blueprint | None = None) -> Work:
    """Return what one device does in a call, read from the traced program. No device is used.

    Args:
        cfg: The configuration.
        call: What runs, as in `moezoo.tools.sharding.describe.describe`.
        blueprint: As in `moezoo.training.build.build_step`.

    Raises:
        UserError: The parts of the configuration do not fit together, or a mesh axis is -1.
    """
    check_config(cfg)
    convert(CallName, call, "call")
    blueprint = blueprint_on(cfg, given=blueprint)
    # Backends do the same products; of these, the trace shows all outside loops of unknown length.
    names: dict[str, Any] = {**dict.fromkeys(KERNELS), "grouped_matmul": ("ragged_dot",)}
    kernels = dataclasses.replace(cfg.execution, **names)
    with no_context_mesh():
        program = CALLS[call](dataclasses.replace(cfg, execution=kernels), blueprint)
        traced = program.trace()
    device = _Device(cfg, blueprint, call, program)
    traffic, flops, hbm = collective_traffic(traced.jaxpr, "tpu"), device.flops(traced), device.hbm(traced)
    share = sum(flops.values())
    if call == "train" or program.execution.stages > 1:  # in ticks without work, nothing is the model's
        share = model_flops(cfg) / cfg.mesh.devices / (1 if call == "train" else 3)
    return Work(flops, share, hbm | {"collectives": float(traffic.bytes)}, traffic)


class _Weight(NamedTuple):
    """A device's part of a weight where it is used: its shape in one layer, and the bytes of a number."""

    shape: tuple[int, ...]
    width: float
    of_experts: bool

    @property
    def bytes(self) -> float:
        return math.prod(self.shape) * self.width


class _Device:
    """One device in one call."""

    def __init__(self, cfg: TrainConfig, blueprint: Blueprint, call: CallName, program: Call):
        self.cfg, self.model, self.call, self.program = cfg, blueprint.shapes, call, program
        self.execution, tokens = program.execution, math.prod(program.local_tokens)
        group, k = self.execution.expert_group(cfg.model.experts), cfg.model.experts_per_token
        self.room = layer_rows(self.execution.strategy, tokens, k, group)
        needed = (-(-tokens // group.size) if group.replicated else tokens) * k
        self.rows = self.room if isinstance(self.execution.strategy, Capacity | Dense) else min(needed, self.room)
        passes, order = cfg.execution.microbatches if call == "train" else 1, self.execution.pipeline
        # Of the layers that run whole: with stages, a device has the micro-batches of its stage.
        self.tokens = tokens * passes * self.execution.micro_batches // self.execution.stages
        # Of the layers in stages: a tick without work computes as the others do.
        self.in_ticks = 0 if order is None else tokens * passes * order.ticks(self.execution.stages)
        # For each stack, tokens times periods, of those that run whole and of those that run in ticks.
        self.whole, self.ticks = (
            [self.tokens * stack.count for stack in self.model.stacks],
            [0] * len(self.model.stacks),
        )
        if (piped := self.execution.piped(self.model)) is not None:
            self.whole[piped.stack] -= self.tokens * piped.periods
            self.ticks[piped.stack] = self.in_ticks * piped.depth
        mask = blueprint.mask
        # The backward pass ends at the first part, from the embedding on, in which something is trained.
        learns = [any(jax.tree.leaves((mask.embedding, mask.stacks[: n + 1]))) for n in range(len(self.model.stacks))]
        self.reached = [call == "train" and each for each in learns]

    def flops(self, traced: Any) -> dict[Phase, float]:
        """Return the FLOPs of each phase."""
        found: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        again, heads = False, self.execution.inner_group("heads").size
        for one in _outside_kernels(traced):
            if self.call != "decode" and _attends(one):
                again |= one.phase == "recomputed"
            elif one.equation.primitive.name in _PRODUCTS and one.times is not None:
                used = self.rows / self.room if one.scope.endswith("experts") else 1.0
                found[one.phase] += one.times * used * _flops(one)
        if self.call != "decode":
            padding = self.cfg.seq_len / self.program.length  # prompts have more tokens than attend
            if any(self.ticks):  # the trace shows that ticks attend again; in them layers do as everywhere
                again = REMAT[self.execution.remat].kernels_keep == "inputs"
            seen = [2 * (self.cfg.model.heads // heads) * dims for dims in _seen(self.cfg, self.model)]  # of a query
            self._add(found, seen, again, padding)
        per_token = [_token_flops(stack) for stack in self.model.stacks]
        self._add(found, [each.convolution / heads for each in per_token], self.execution.remat != "none")
        if self.call == "decode":
            self._add(found, [each.recurrence / heads for each in per_token], again=False)
        return found

    def _add(self, found: dict[Phase, float], of_stacks: list[float], again: bool, padding: float = 1) -> None:
        """Add FLOPs per token and period, of each stack, to those of the phases; `again` if layers recompute them."""
        whole, ticks = ([n * per for n, per in zip(part, of_stacks, strict=True)] for part in (self.whole, self.ticks))
        reached = sum(each for each, learns in zip(whole, self.reached, strict=True) if learns)
        run_again = sum(each for each, learns in zip(ticks, self.reached, strict=True) if learns)
        found["forward" if any(self.reached) else "outside"] += padding * sum(whole) + sum(ticks)
        found["backward"] += 2 * (reached + run_again)
        found["recomputed"] += reached * again + run_again * (1 + again)

    def hbm(self, traced: Any) -> dict[str, float]:
        """Return the bytes of memory of each kind, without those of collectives."""
        width = self.cfg.model.embed * jnp.dtype(self.execution.dtype).itemsize
        embeddings = self.tokens * width / self.execution.inner_group("vocab").size
        found = {"weights": self._weight_bytes(traced), "embeddings": embeddings}
        if self.call == "train":
            stacks = list(zip(self.model.stacks, self.reached, self.whole, self.ticks, strict=True))
            layers = sum(len(stack.blocks) * (whole + ticks) for stack, learns, whole, ticks in stacks if learns)
            layers += self.in_ticks * any(learns and ticks for _, learns, _, ticks in stacks)
            memory = self.program.memory
            found["saved activations"] = 2.0 * layers * width
            # Trained parameters have the bytes of their gradients.
            found["update"] = 2.0 * (2 * memory["gradients"] + memory["optimizer state"])
        if isinstance(traced.out_info, Continued):
            rows = list(cache_rows(self.model, traced.out_info.cache, self.execution))
            found["cache"] = float(sum(row.bytes_per_device for row in rows))
            if self.call == "decode":
                found["cache"] += sum(row.bytes_per_device for row in rows if "slots" not in row.axes)
        return found

    def _weight_bytes(self, traced: Any) -> float:
        """Return the bytes of weights that products read, known by their shapes, and of gradients that they make."""
        weights = {weight.shape: weight for weight in self._weights()}
        orders = {tuple(sorted(shape)) for shape in weights}
        total = 0.0
        for one in _outside_kernels(traced):
            if one.equation.primitive.name not in _PRODUCTS or one.times is None:
                continue
            operands: list[Any] = [x.aval for x in one.equation.invars[:2]]
            read = [weights[x.shape] for x in operands if x.shape in weights]
            result: Any = one.equation.outvars[0].aval
            for weight in read[:1]:
                used = min(1.0, self.rows / weight.shape[0]) if weight.of_experts else 1.0
                total += one.times * used * weight.bytes
            if not read and one.phase == "backward" and tuple(sorted(result.shape)) in orders:
                total += one.times * result.size * result.dtype.itemsize
        return total

    def _weights(self) -> Iterator[_Weight]:
        """Yield each parameter as a layer uses it; a container has the bytes that it stores."""
        ways, widest = self.execution.ways, jnp.dtype(self.execution.dtype).itemsize
        leaves = jax.tree.leaves(self.model, is_leaf=is_stored)
        for (_, axes, shape), leaf in zip(parameter_table(self.model), leaves, strict=True):
            placement = self.execution.placement(axes, shape)
            names, taken = axes.names, placement.taken or ((),) * len(shape)
            over = zip(shape, placement.stored, placement.gathered, taken, strict=True)
            local = [max(1, size * ways(whole) // ways(stored) // ways(own)) for size, stored, whole, own in over]
            local = local[1:] if "layer" in names else local
            width = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(leaf)) / math.prod(shape)
            yield _Weight(tuple(local), min(width, widest), "expert" in names)
            if "vocab" in names:  # as the matrix of logits too, where embeddings are tied
                yield _Weight(tuple(reversed(local)), min(width, widest), False)


_PRODUCTS = ("dot_general", "ragged_dot_general")


def _outside_kernels(traced: Any) -> Iterator[Equation]:
    """Yield the equations of a traced program, kernels in place of what is in them."""
    kernel = None
    for one in equations(traced.jaxpr, "tpu"):
        if kernel is not None and one.path.startswith(kernel):
            continue
        kernel = f"{one.path}/" if one.equation.primitive.name == "pallas_call" else None
        yield one


def _attends(one: Equation) -> bool:
    """Return whether an equation is a kernel of attention or a part of one, outside of decoding.

    Of the products there, only those of queries and keys, and of weights and values, are batched by sequence and head.
    """
    scopes = one.scope.split("/")
    if "attention" not in scopes or "delta_rule" in scopes:
        return False
    kind = one.equation.primitive.name
    batched = kind == "dot_general" and len(one.equation.params["dimension_numbers"][1][0]) > 1
    return batched or kind == "pallas_call" or one.times is None


def _flops(one: Equation) -> float:
    """Return the FLOPs of one product: two for each of its multiplications."""
    arrays: list[Any] = [one.equation.invars[0].aval, one.equation.outvars[0].aval]
    left, result = arrays
    if one.equation.primitive.name == "ragged_dot_general":
        return 2.0 * left.size * result.shape[-1]  # each number of a row meets one matrix, or another row
    contracted = one.equation.params["dimension_numbers"][0][0]
    return 2.0 * result.size * math.prod(left.shape[dim] for dim in contracted)


def _seen(cfg: TrainConfig, model: Any) -> list[float]:
    """Return the multiplications per query and head with the keys and values that it sees, itself included.

    They are, for each stack, the mean over queries, summed over a period.
    """
    seen = []
    for stack in model.stacks:
        attends = [block.attention for block in stack.blocks if any(block.attention.head_sizes)]
        seen.append(sum(sum(mixer.head_sizes) * mixer.mean_seen(cfg.seq_len) for mixer in attends))
    return seen


def _token_flops(stack: Any) -> TokenFlops:
    """Return the FLOPs of a token in a period, besides those of products with weights and of attention."""
    return TokenFlops(*map(sum, zip(*(block.attention.token_flops() for block in stack.blocks), strict=True)))


def model_flops(cfg: TrainConfig) -> float:
    """Return the FLOPs of the model in a step, over all devices: those of rematerialisation do not count.

    They are 6 per token and active parameter in a product, plus those of attention over the keys that a query sees, and
    of recurrent layers as if each token were read alone (`Mixer.token_flops`). Scales of norms and biases are in no
    product.
    """
    m, tokens, shapes = cfg.model, cfg.batch_size * cfg.seq_len, blueprint_of(cfg).shapes
    active = count_parameters(shapes, m.experts_per_token)[1] - sum(
        math.prod(shape) * (m.experts_per_token if "expert" in axes.names else m.experts) // m.experts
        for _, axes, shape in parameter_table(shapes)
        if axes.role in (Role.SCALE, Role.BIAS)
    )
    seen = sum(stack.count * dims for stack, dims in zip(shapes.stacks, _seen(cfg, shapes), strict=True))
    recurrent = sum(stack.count * sum(_token_flops(stack)) for stack in shapes.stacks)
    return 3.0 * tokens * (2 * (active - m.looked_up) + 2 * m.heads * seen + recurrent)
