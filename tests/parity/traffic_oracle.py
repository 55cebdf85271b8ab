"""The traffic of a training step by the documentation: an oracle for the collectives of the traced program.

`step_traffic` says of every collective of a step to which part it belongs, in which phase it runs, its kind, its mesh
axes, how often it runs, and the bytes that it brings to a device. Each section names the page that it is written from.

It reads a configuration as plain data, and what parameters declare: path, role, logical axes, shape and dtype. It
imports nothing of moezoo that issues or counts a collective or decides where an array lies, so no error is in both.

A line of a section, such as

    book("FR", "all_gather", run.experts, tokens * embed, run.width)

says: in the forward pass (F), and where a layer is recomputed (R), one all-gather over the axes of the experts, to
which each device gives `tokens * embed` numbers of `run.width` bytes. B is backward, O outside of differentiation. A
line counts only in phases that its part has, and only over axes of several devices.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path

from moezoo.parallel.axes import Axes, axes_of, parameter_table

MeshAxes = tuple[str, ...]
# (scope two names deep, phase, collective, mesh axes) -> (count, bytes); axes of reductions in alphabetical order.
Traffic = dict[tuple[str, str, str, MeshAxes], tuple[int, int]]
# book(phases, collective, mesh axes, numbers that a device gives, bytes of each, times=1)
Book = Callable[..., None]
# Whether the array at a path is trained; None for all but buffers and the arrays of containers.
Trained = Callable[[str], bool] | None
# Path in a block -> shape in one layer; a container has the shape of the array that it stands for.
Shapes = dict[str, tuple[int, ...]]

PHASES = {"F": "forward", "R": "recomputed", "B": "backward", "O": "outside"}
WIDTHS = {"float32": 4, "bfloat16": 2}
FLOAT32 = INT32 = 4


def step_traffic(config: Any, model: Any, *, strategy: Any = None, trained: Trained = None) -> Traffic:
    """Return the traffic of a training step (docs/appendix/collectives.md).

    Args:
        config: The training run, a `TrainConfig`; its mesh has no size -1.
        model: The model, or its shapes.
        strategy: The dispatch strategy; None for that of `config`, which must not be a choice.
        trained: Whether the array at a path is trained.
    """
    table: Traffic = {}
    run, sizes, micro_steps = Run(config, strategy or config.dispatch), model.config, config.execution.microbatches
    rows = config.batch_size // micro_steps // run.ways(run.batch)  # of a device in a micro-step
    tokens = rows * config.seq_len // run.ways(run.sequence)
    blocks, leaves, axes = find_blocks(model), tree_leaves_with_path(model), tree_leaves(axes_of(model))
    arrays = [place(run, keystr(path), a, leaf, trained) for (path, leaf), a in zip(leaves, axes, strict=True)]
    embedding, final = ([a for a in arrays if a.path.startswith(f".{part}")] for part in ("embedding", "unembedding"))

    def part(scope: str, phases: str, times: int = micro_steps) -> Book:
        return lambda *line: enter(table, run, scope, phases, times, *line)

    weights(part("embedding/weights", "FB"), run, embedding)
    part("embedding", "F")("F", "psum", run.kept("vocab"), tokens * sizes.embed, run.width)
    part("positions", "F")("F", "all_gather", run.sequence, tokens, INT32, 2)  # positions and segments
    learns, with_experts = any(a.learns for a in embedding), 0
    usual = "balanced" if any(block.window is None for block in blocks) else "contiguous"
    balanced = (config.execution.sequence_order or usual) == "balanced"
    for stack, period in groupby(blocks, key=lambda block: block.stack):
        mine = [a for a in arrays if a.path.startswith(stack)]
        # The backward pass ends at the first part, from the embedding on, in which something is trained.
        learns, times = learns or any(a.learns for a in mine), micro_steps * mine[0].layers
        weights(part("layers/weights", "FRB" if learns else "F", times), run, mine)
        phases = "F" if not learns else "FB" if run.remat == "none" else "FRB"
        for block in period:
            trains = {a.path.removeprefix(block.path) for a in mine if a.learns}
            mixes = part("layers/attention", phases, times)
            chunks = rows * (2 if balanced else 1)  # of a device
            if "attention_norm.scale" not in block.shapes:
                pass  # a feed-forward part alone
            elif "attention.rate" in block.shapes:
                state_space(mixes, run, block.shapes, tokens, chunks)
            elif "attention.filters" in block.shapes:
                gated_convolution(mixes, run, block.shapes, tokens, chunks)
            elif "attention.strength" in block.shapes:
                delta_rule(mixes, run, block.shapes, trains, tokens, chunks)
            else:
                hops = count_hops(run, config.seq_len, None if balanced else block.window)
                attention(mixes, run, block.shapes, trains, tokens, hops)
            if any(path.startswith("feed_forward.") for path in block.shapes):
                feed_forward(part("layers/feed_forward", phases, times), run, block, trains, tokens, sizes)
            with_experts += mine[0].layers if "feed_forward.router.weight" in block.shapes else 0
    weights(part("head/weights", "FB"), run, final + (embedding if sizes.tied_embeddings else []))
    logits(part("head", "FB"), run, tokens, sizes, learns, any(a.learns for a in final if a.role == "scale"))
    routing(part("routing", "F"), run, sizes, with_experts, rows)
    part("loss", "F")("F", "psum", run.tokens, 1, FLOAT32)
    # Once per step: the number of predicted tokens; gradients not stored over all axes that split tokens; the norm.
    part("loss", "O", 1)("O", "psum", run.tokens, 2, INT32)
    for array in (a for a in arrays if a.learns):
        rest = tuple(axis for axis in run.tokens if axis not in array.mesh_axes)
        part("gradient_sums", "O", 1)("O", "psum", rest, array.layers * array.local, run.reduce_width)
    part("gradient_norm", "O", 1)("O", "psum", tuple(run.mesh), 1, FLOAT32)
    if any(a.learns and a.narrow for a in arrays):
        part("rounding", "O", 1)("O", "psum", tuple(run.mesh), 4, INT32)  # two counts of two parts
    if hasattr(config.optimizer, "orthogonal_dtype"):
        muon(part("optimizer/orthogonalise", "O", 1), run, config.optimizer, arrays)
    return table


def enter(
    table: Traffic, run: "Run", scope: str, has: str, runs: int, phases: str, collective: str, axes: MeshAxes,
    numbers: int, width: int, times: int = 1,
) -> None:  # fmt: skip
    """Add a line to the table: `times` collectives in each of `phases` that the part `has`, which runs `runs` times."""
    if not axes or not times:
        return
    each = received(collective, numbers * width, run.ways(axes))
    axes = tuple(sorted(axes)) if collective in ("psum", "pmax") else axes
    for phase in set(phases) & set(has):
        count, total = table.get(row := (scope, PHASES[phase], collective, axes), (0, 0))
        table[row] = (count + runs * times, total + runs * times * each)


def received(collective: str, given: int, devices: int) -> int:
    """Return the bytes that a device receives where each gives `given` (docs/numbers.md, "Metrics")."""
    share = -(-given * (devices - 1) // devices)  # rounded up to whole bytes
    others = {"all_gather": given * (devices - 1), "ppermute": given, "psum": 2 * share, "pmax": 2 * share}
    return others.get(collective, share)


# The layout: docs/layouts.md, "The rules" and "tensor"


class Run:
    """The settings of a run that decide what moves; of mesh and rules only axes of several devices."""

    def __init__(self, config: Any, strategy: Any):
        settings, rules = config.execution, config.rules
        self.mesh = {axis: size for axis, size in config.mesh.sizes.items() if size > 1}
        self.store = {name: self._live(axes) for name, axes in rules.store.items()}
        self._compute = {name: self._live(axes) for name, axes in rules.compute.items()}
        self.batch, self.sequence = self._live(rules.batch), self._live(rules.sequence)
        self.tokens = self.batch + self.sequence  # what splits tokens
        self.experts = self.kept("expert")  # ... and experts, where tokens meet them
        self.strategy, self.name = strategy, type(strategy).__name__.lower()
        self.moves_weights = self.name in ("gather", "dense")
        # The bytes of a number in layers, and in sums of gradients.
        self.width, self.reduce_width = WIDTHS[settings.dtype], WIDTHS[settings.reduce_dtype]
        self.remat, self.context_parallel = settings.remat, settings.context_parallel

    def _live(self, axes: Iterable[str]) -> MeshAxes:
        return tuple(axis for axis in axes if axis in self.mesh)

    def kept(self, logical: str) -> MeshAxes:
        """Return the mesh axes that a dimension stays split over in its layer."""
        return self._compute.get(like(logical), ())

    def ways(self, axes: Iterable[str]) -> int:
        """Return the number of devices along mesh axes."""
        return math.prod(self.mesh[axis] for axis in axes)


class Array(NamedTuple):
    """An array of a model: what it declares, without `layer`, and where it lies."""

    path: str
    role: str
    axes: Axes
    shape: tuple[int, ...]  # of one layer, whole
    layers: int
    width: int  # bytes of a number that is gathered
    learns: bool
    narrow: bool  # stored in fewer bits than float32
    stored: list[MeshAxes]  # for each dimension, the mesh axes that it is stored over
    gathered: list[MeshAxes]  # ... and those of them that it is gathered over in its layer
    shared: MeshAxes  # the mesh axes along which each device takes one of its key-value heads
    entered: MeshAxes  # the mesh axes that split the weight it belongs to, and not this array
    mesh_axes: MeshAxes  # all of `stored`
    local: int  # the numbers of one layer that a device stores


_AS_HEADS = ("key_heads", "value_heads", "state_groups", "state_heads", "channels")


def like(logical: str) -> str:
    """Return the logical axis that the rules name for another one: recurrent layers split their own axes as heads."""
    return "heads" if logical in _AS_HEADS else logical


def place(run: Run, path: str, axes: Axes, array: Any, trained: Trained) -> Array:
    """Return where an array is stored, and what becomes of it in its layer."""
    role, shape, layers = axes.role.value, tuple(array.shape), 1
    if "layer" in axes.stacked:
        axes, layers, shape = replace(axes, stacked=axes.stacked[1:]), shape[0], shape[1:]
    stored, gathered, shared = [], [], ()
    for name, size in zip(axes.names, shape, strict=True):
        over, stays = () if role == "buffer" else run.store.get(like(name), ()), run.kept(name)
        if name == "kv_heads" and size < run.ways(stays):  # too few to be split: every device stores all
            over, shared = (), stays
        elif name == "expert" and run.moves_weights:
            stays = ()
        stored.append(over)
        gathered.append(over[len(stays) :])
    whole, own = ({axis for name in names for axis in run.kept(name)} for names in (axes.within, axes.names))
    learns = role not in ("buffer", "part") if trained is None else trained(path)
    width = array.dtype.itemsize if role == "part" else min(array.dtype.itemsize, run.width)
    mesh_axes = tuple(axis for over in stored for axis in over)
    where = stored, gathered, shared, tuple(whole - own), mesh_axes, math.prod(shape) // run.ways(mesh_axes)
    return Array(path, role, axes, shape, layers, width, learns, array.dtype.itemsize < 4, *where)


# Weights: docs/appendix/collectives.md


def weights(book: Book, run: Run, arrays: list[Array]) -> None:
    """Book the gathers of arrays where they are used, in the dtype of layers, and the sums of their gradients."""
    for array in arrays:
        gradient, numbers, of_experts = "B" if array.learns else "", array.local, "expert" in array.axes.names
        # Whole on devices that compute with a part of the weight it belongs to, or with one of its heads.
        book(gradient, "psum", array.entered or array.shared, numbers, run.reduce_width)
        if array.shared:
            numbers //= array.shape[array.axes.names.index("kv_heads")]
        # What is only added is not needed for gradients. It is gathered again where its sum is not kept.
        added = array.role == "bias" and run.remat in (("dots", "none") if of_experts else ("none",))
        # What meets split widths whole is kept in this form.
        added |= array.path.endswith(("token_gate", "latent.up")) and bool(run.kept("mlp")) and run.remat == "none"
        # Devices use it on different tokens along these axes.
        summed = run.tokens + (run.experts if run.moves_weights and of_experts else ())
        for over in reversed(array.gathered):
            parts = [(splits, tuple(axes)) for splits, axes in groupby(over, key=lambda axis: axis in summed)]
            for splits_tokens, axes in reversed(parts):
                book("F" if added else "FR", "all_gather", axes, numbers, array.width)
                numbers *= run.ways(axes)
                book(gradient if splits_tokens else "", "reduce_scatter", axes, numbers, run.reduce_width)


# Attention: docs/appendix/collectives.md, "Over tensor"; docs/long_context.md, "What travels"


class Block(NamedTuple):
    """One kind of layer of a stack."""

    stack: str  # path of the stack
    path: str
    window: int | None  # the tokens that a query sees, at most; None for all
    on_inputs: bool  # whether gates multiply what experts read
    shapes: Shapes


def find_blocks(model: Any) -> list[Block]:
    """Return the blocks of a model, stack by stack."""
    found = []
    for path, _, shape in parameter_table(model):
        if at := re.match(r"(\.stacks\[(\d+)\])\.blocks\[(\d+)\]\.", path):
            if not found or found[-1].path != at[0]:
                block = model.stacks[int(at[2])].blocks[int(at[3])]
                window = getattr(block.attention, "window", None)
                most = getattr(window, "length", window)  # of a stretch, or of a window
                on_inputs = getattr(block.feed_forward, "gates_on", "") == "inputs"
                found.append(Block(at[1], at[0], most, on_inputs, {}))
            found[-1].shapes[path.removeprefix(at[0])] = shape[1:]
    return found


def attention(book: Book, run: Run, shapes: Shapes, trains: set[str], tokens: int, hops: int) -> None:
    """Book sums over devices that share heads, and how queries meet keys elsewhere; `trains` has what is trained."""
    heads, embed = run.kept("heads"), shapes["attention.out"][-1]
    expands = True  # whether gradients need keys of the whole sequence where results of products are kept
    book(of_results(shapes), "psum", heads, tokens * embed, run.width)  # the results of all heads
    if "attention.kv_down" in shapes:
        (latent,) = shapes["attention.kv_norm.scale"]
        kept = [tokens * latent, tokens * (shapes["attention.kv_down"][-1] - latent)]  # latent and shared key
        queries = shapes["attention.query_up"][0] if "attention.query_up" in shapes else embed
        entering = [tokens * queries, *kept]
        expands = any(path.startswith(("attention.key_up", "attention.value_up")) for path in trains)
    else:
        _, kv_heads, head_dim = shapes["attention.key"]
        # Keys, and values, which are as wide as what heads return.
        kept = [tokens * max(1, kv_heads // run.ways(heads)) * n for n in (head_dim, shapes["attention.out"][1])]
        entering = [tokens * embed]
        for norm in ("attention.query_norm.scale", "attention.key_norm.scale"):
            if norm in shapes:
                if shapes["attention.query_norm.scale"] != (head_dim,):  # over whole projections: sums of squares
                    book("FRB", "psum", heads, tokens, FLOAT32)
                book("B" if norm in trains else "", "psum", heads, *shapes[norm], run.reduce_width)
    for numbers in entering:  # the gradients of what meets split heads
        book("B", "psum", heads, numbers, run.width)
    for number, numbers in enumerate(kept):
        if run.context_parallel == "gather":
            again = "R" if expands or number or run.remat != "dots" else ""  # a shared key is no result of a product
            book("F" + again, "all_gather", run.sequence, numbers, run.width)
            book("B", "reduce_scatter", run.sequence, numbers * run.ways(run.sequence), run.width)
        else:
            book("F" if run.remat == "dots" else "FR", "ppermute", run.sequence, numbers, run.width, hops)
            book("B", "ppermute", run.sequence, numbers, run.width, hops + (hops > 1))
            book("B", "ppermute", run.sequence, numbers, FLOAT32, hops)  # gradients


def of_results(shapes: Shapes) -> str:
    """Return when results of all heads are summed: again where the feed-forward part of a layer reads them."""
    return "FR" if any(path.startswith("feed_forward.") for path in shapes) else "F"


def delta_rule(book: Book, run: Run, shapes: Shapes, trains: set[str], tokens: int, chunks: int) -> None:
    """Book sums over devices that share heads, and what chunks need of those before: inputs of filters, and states.

    A device has so many `chunks` of texts: one of each of its texts, or two in balanced order
    (docs/long_context.md, "Recurrent layers").
    """
    heads, embed = run.kept("heads"), shapes["attention.out"][-1]
    book(of_results(shapes), "psum", heads, tokens * embed, run.width)  # the results of all heads
    # The gradients of what meets split heads: tokens, and what is between two matrices of low rank.
    ranks = [shapes[path][-1] for path in ("attention.decay.down", "attention.gate.down") if path in shapes]
    for numbers in (embed, *ranks):
        book("B", "psum", heads, tokens * numbers, run.width)
    norm = "attention.norm.scale"
    book("B" if norm in trains else "", "psum", heads, *shapes[norm], run.reduce_width)
    reach = shapes["attention.convolutions[0].weight"][0] - 1
    for path in ("attention.query", "attention.key", "attention.value"):
        travels(book, run, chunks * reach * math.prod(shapes[path][1:]) // run.ways(heads), run.width)
    key_dim, (value_heads, value_dim) = shapes["attention.key"][-1], shapes["attention.value"][1:]
    for dim in (key_dim, value_dim):  # the factor and the term of each map
        travels(book, run, chunks * value_heads // run.ways(heads) * key_dim * dim, FLOAT32)


def state_space(book: Book, run: Run, shapes: Shapes, tokens: int, chunks: int) -> None:
    """Book the same for a mixer by state space duality: a state's factor is a number per head."""
    heads, embed = run.kept("heads"), shapes["attention.out"][-1]
    book(of_results(shapes), "psum", heads, tokens * embed, run.width)  # the results of all heads
    book("B", "psum", heads, tokens * embed, run.width)  # the gradient of tokens
    reach = shapes["attention.convolutions[0].weight"][0] - 1
    for path in ("attention.read", "attention.write", "attention.value"):
        travels(book, run, chunks * reach * math.prod(shapes[path][1:]) // run.ways(heads), run.width)
    state_dim, (value_heads, value_dim) = shapes["attention.write"][-1], shapes["attention.value"][1:]
    for numbers in (1, state_dim * value_dim):
        travels(book, run, chunks * value_heads // run.ways(heads) * numbers, FLOAT32)


def gated_convolution(book: Book, run: Run, shapes: Shapes, tokens: int, chunks: int) -> None:
    """Book sums over devices that share channels, and the last inputs of filters, as `delta_rule` does."""
    heads, (taps, channels) = run.kept("heads"), shapes["attention.filters"]
    for phases in ("FR", "B"):  # the results of all channels, and the gradient of what enters them
        book(phases, "psum", heads, tokens * channels, run.width)
    travels(book, run, chunks * (taps - 1) * channels // run.ways(heads), run.width)


def travels(book: Book, run: Run, numbers: int, width: int) -> None:
    """Book that each device gets `numbers` of each other device that shares its sequences."""
    book("FR", "all_gather", run.sequence, numbers, width)
    book("B", "reduce_scatter", run.sequence, numbers * run.ways(run.sequence), width)


def count_hops(run: Run, length: int, window: int | None) -> int:
    """Return the hops of a ring; `window` is None in balanced order too, where no ring ends early."""
    devices = run.ways(run.sequence)
    return devices - 1 if window is None else min(devices - 1, math.ceil((window - 1) / (length // devices)))


# MLPs and experts: docs/appendix/collectives.md, "Over tensor"; docs/dispatch.md, "What each one moves"


def feed_forward(book: Book, run: Run, block: Block, trains: set[str], tokens: int, sizes: Any) -> None:
    """Book the sums over devices that share a width, and the exchange of tokens between experts."""
    shapes, k = block.shapes, sizes.experts_per_token
    width, normed = run.kept("mlp"), "after_feed_forward_norm.scale" in shapes
    if "feed_forward.shared.token_gate" in trains:  # whole
        book("B", "psum", width, sizes.embed, run.reduce_width)
    # Experts and the MLP beside them, where each has norms of its own.
    parts = 1 + ("feed_forward.norms.after_experts.scale" in shapes)
    # Of the backward pass only a norm after the layer needs its result.
    book("FR" if normed else "F", "psum", width, tokens * sizes.embed, run.width, parts)
    book("B", "psum", width, tokens * sizes.embed, run.width, parts)  # the gradient of tokens
    if "feed_forward.latent.up" in shapes:  # experts read other tokens than the MLP beside them; the matrix is whole
        latent = shapes["feed_forward.latent.up"][0]
        book("B", "psum", width, tokens * latent, run.width)
        book("B" if "feed_forward.latent.up" in trains else "", "psum", width, latent * sizes.embed, run.reduce_width)
    if "feed_forward.router.weight" in shapes:
        book("B", "psum", width, tokens * k, FLOAT32)  # the gradient of gates
        if block.on_inputs:  # each expert of a token reads a copy, whose gate is 1
            tokens, k = tokens * k, 1
        chunks = min(run.strategy.chunks, tokens)
        ends = [tokens * i // chunks for i in range(chunks + 1)]
        learns, reads = not block.on_inputs, normed or "feed_forward.latent.up" in trains
        moved = sizes.experts, shapes["feed_forward.experts.up"][1]
        drops = [exchange(book, run, end - start, k, learns, *moved, reads) for start, end in pairwise(ends)]
        book("F" if any(drops) else "", "pmax", width, 1, INT32)  # the number of dropped assignments


def exchange(
    book: Book, run: Run, tokens: int, k: int, learns: bool, experts: int, embed: int, reads: bool
) -> bool:  # fmt: skip
    """Book what a chunk of tokens moves between devices with different experts; return whether it can drop any.

    `k`: the experts of a token; `learns`: whether gates that travel have a gradient; `embed`: the numbers that experts
    read of a token; `reads`: whether a norm or a matrix reads the results, which it needs again for its gradient.
    """
    results, again = "FR" if reads else "F", 1 + learns  # gradients of gates need the results again
    group, devices = run.experts, run.ways(run.experts)
    replicated = not set(group) <= set(run.tokens)
    if replicated:  # each device takes a share of the same tokens
        tokens = -(-tokens // devices)
    most = devices * tokens * min(k, experts // devices)  # room for what can come
    rows, drops = tokens * k, False
    if run.name in ("ring", "ragged") and run.strategy.buffer_factor is not None:
        room = math.ceil(run.strategy.buffer_factor * tokens * k)
        rows, drops = min(rows, room), room < most and (run.name == "ring" or devices > 1)
    elif run.name == "capacity":
        factor = run.strategy.capacity_factor
        each = tokens if factor is None else min(tokens, math.ceil(factor * tokens * k / experts))
        rows, drops = experts * each, each < tokens
    if run.name == "ring":
        book("FR", "all_gather", group, tokens * embed, run.width)  # tokens
        book("FR", "all_gather", group, tokens * 2 * k, FLOAT32)  # experts and gates
        book(results, "reduce_scatter", group, devices * tokens * embed, run.width)  # partial sums
        book("B", "all_gather", group, tokens * embed, run.width)  # the gradients of these three
        book("B" if learns else "", "reduce_scatter", group, devices * tokens * 2 * k, FLOAT32)
        book("B", "reduce_scatter", group, devices * tokens * embed, run.width)
    elif run.name == "ragged":
        book("FR", "all_gather", group, experts, INT32)  # rows for each expert
        book("FB", "ragged_all_to_all", group, rows * embed, run.width, 2)  # there and back
        book("R", "ragged_all_to_all", group, rows * embed, run.width, again)
    elif run.name == "capacity":
        book("FB", "all_to_all", group, rows * embed, run.width, 2)
        book("R", "all_to_all", group, rows * embed, run.width, again)
    if replicated:
        book(results, "all_gather", group, tokens * embed, run.width)  # the results of all shares
        book("F" if drops else "", "psum", group, 1, INT32)
        book("B", "psum", group, devices * tokens * embed, run.width)  # the gradients of tokens and gates
        book("B" if learns else "", "psum", group, devices * tokens * k, FLOAT32)
    return drops


# Logits and losses: docs/appendix/collectives.md


def logits(book: Book, run: Run, tokens: int, sizes: Any, learns: bool, scale_learns: bool) -> None:
    """Book what devices exchange that share the vocabulary; 2^22 logits, or those of 512 tokens, exist at a time."""
    vocab = run.kept("vocab")
    chunk = min(tokens, max(512, 2**22 // (sizes.vocab // run.ways(vocab))))  # tokens
    chunks = math.ceil(tokens / chunk)
    book("F", "pmax", vocab, chunk, FLOAT32, chunks)  # the largest logit of each token
    book("F", "psum", vocab, 2 * chunk, FLOAT32, chunks)  # the denominator and the logit of the label
    book("B" if learns else "", "psum", vocab, chunks * chunk * sizes.embed, run.width)  # the gradient of tokens
    book("B" if scale_learns else "", "psum", vocab, sizes.embed, run.reduce_width)  # ... of the last norm's scale


def routing(book: Book, run: Run, sizes: Any, layers: int, rows: int) -> None:
    """Book the sums of routing statistics: one per array of numbers of all layers with experts, each of 4 bytes."""
    load = probabilities = sizes.experts
    balance = rows_in_use = tokens = z = drops = 1
    sums = [(run.tokens, (load, probabilities, tokens, z, drops))]
    if sizes.load_balance_over == "sequence":  # first over the parts of each row
        sums = [(run.sequence, (rows * load, rows * probabilities, rows * tokens, z, drops))]
        sums += [(run.batch, (balance, rows_in_use, load, tokens, z, drops))]
    for axes, numbers in ((axes, numbers) for axes, arrays in sums for numbers in arrays):
        book("F", "psum", axes, layers * numbers, FLOAT32)


# Muon: docs/numbers.md, "Optimiser and schedule"


def muon(book: Book, run: Run, optimizer: Any, arrays: list[Array]) -> None:
    """Book how split matrices become whole: for each layer, all of one shape and split together."""
    groups: Counter[Any] = Counter()  # -> the matrices of a layer of which a device has a part
    for array in (a for a in arrays if a.learns and is_muons(optimizer, a)):
        stacked, inputs, outputs = matrix_dimensions(optimizer, array.axes)
        matrices = math.prod(array.shape[d] // run.ways(array.stored[d]) for d in stacked)
        sides = []
        for dims in (inputs, outputs):
            over = tuple(axis for d in dims for axis in array.stored[d])
            sides.append((math.prod(array.shape[d] for d in dims), not over, over))
        sides.sort(key=lambda side: side[:2])  # the shorter one first; of equal ones, one that is split
        stack = array.path.partition(".blocks")[0]
        groups[stack, array.layers, *sides, frozenset(array.mesh_axes)] += matrices
    width = WIDTHS[optimizer.orthogonal_dtype]
    for (_, layers, (rows, _, row_axes), (columns, _, column_axes), _), matrices in groups.items():
        numbers = rows * columns // run.ways(row_axes + column_axes)  # of one matrix, on a device
        for over in filter(None, (row_axes, column_axes)):
            if matrices == 1:
                book("O", "all_gather", over, numbers, width, layers)
            else:  # whole matrices to devices and back, with zeros up to a multiple of the devices
                matrices = -(-matrices // run.ways(over))
                book("O", "all_to_all", over, matrices * run.ways(over) * numbers, width, 2 * layers)
            numbers *= run.ways(over)


def is_muons(optimizer: Any, array: Array) -> bool:
    """Return whether Muon updates an array: by default weights of layers, except routers and gates of tokens."""
    default = array.role == "weight" and not {"vocab", "router", "token_gate"} & set(array.axes.names)
    muon, adamw = (
        any(re.fullmatch(re.escape(each).replace(r"\*", ".*"), array.path) for each in patterns)
        for patterns in (optimizer.muon, optimizer.adamw)
    )
    return muon or (default and not adamw)


def matrix_dimensions(optimizer: Any, axes: Axes) -> tuple[list[int], list[int], list[int]]:
    """Return the dimensions that number matrices, of inputs, and of outputs; heads may have a matrix each."""
    first, last = len(axes.stacked), len(axes.stacked + axes.inputs)
    outputs = list(range(last, len(axes.names)))
    heads = [d for d in outputs if like(axes.names[d]) in ("heads", "kv_heads")]
    if heads == outputs or not (optimizer.per_head or set(axes.inputs) <= {"q_lora", "kv_lora"}):
        heads = []
    return [*range(first), *heads], list(range(first, last)), [d for d in outputs if d not in heads]
