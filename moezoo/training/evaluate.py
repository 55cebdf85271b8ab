"""Evaluate a model: the mean cross-entropy of held-out tokens, or of all, on any mesh."""

import itertools
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from moezoo.config.build import blueprint_of, build_execution
from moezoo.config.settings import TrainConfig, check_config
from moezoo.data import Batch, Source, load, validation_batches
from moezoo.data.epochs import validation_rows
from moezoo.data.token_text import count_bytes
from moezoo.errors import UserError, check_type
from moezoo.models.base import LanguageModel
from moezoo.models.choice import choose_dispatch
from moezoo.nn.few_bits import cut_pieces
from moezoo.parallel.axes import parameter_table
from moezoo.parallel.cache import function_cache
from moezoo.parallel.collectives import psum
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh, place
from moezoo.progress import OnBatch
from moezoo.training.build import describe_difference
from moezoo.training.feed import Feed
from moezoo.training.loss import losses
from moezoo.typed import convert

_LARGEST = 700.0  # nats; e to the power of more exceeds a float


class Evaluation(NamedTuple):
    """The result of an evaluation.

    - `loss`: cross-entropy in nats per predicted `unit`;
    - `tokens`: the number of predicted tokens;
    - `dropped`: assignments that no expert computed;
    - `unit`: "token" or "byte";
    - `rows`: the number of rows that were read, of `all_rows` there are: windows, or rows of whole documents;
    - `text`: the bytes of text that the predicted tokens stand for, or why they are not known;
    - `by_source`: the same of each source of a mixture, by name.
    """

    loss: float
    tokens: int
    dropped: int
    unit: str
    rows: int
    all_rows: int
    text: int | str = "only an evaluation on its own counts bytes"
    by_source: Mapping[str, "Evaluation"] = types.MappingProxyType({})

    @property
    def bits(self) -> float:
        """The cross-entropy in bits per predicted `unit`."""
        return self.loss / math.log(2)

    @property
    def perplexity(self) -> float:
        """e to the power of the loss: as uncertain as a choice between so many equally likely units."""
        return math.exp(self.loss) if self.loss < _LARGEST else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The cross-entropy of all predicted tokens in bits, per byte of `text`; None where that is not known."""
        return self.bits * self.tokens / self.text if isinstance(self.text, int) and self.text else None


def make_sums(model: LanguageModel, execution: MeshExecution) -> "jax.stages.Wrapped":
    """Return the program of one batch for models like `model` and an `exact` execution, which drops no assignment.

    It takes a model and a `Batch` [micro-batches, batch, seq], one without stages, and returns sums: nats, predicted
    tokens, dropped assignments.
    """
    assert execution.mesh is not None

    def local(model: LanguageModel, batch: Batch) -> tuple[Array, Array, Array]:
        out = losses(model, batch, execution)
        with jax.named_scope("loss"):
            tokens = psum((batch.labels >= 0).sum(dtype=jnp.int32), execution.token_axes)
        return out.cross_entropy, tokens, out.routing.dropped.sum()

    specs: Any = (execution.specs(model), Batch(*(execution.micro_batches_spec,) * 4))
    return jax.jit(jax.shard_map(local, mesh=execution.mesh, in_specs=specs, out_specs=PartitionSpec()))


class Evaluator:
    """Evaluates models of one kind on one mesh and one source; compiled once: `evaluator(model)` -> Evaluation."""

    def __init__(self, model: LanguageModel, source: Source, cfg: TrainConfig, execution: Execution):
        """Prepare for models like `model`, which may be shapes."""
        here = on_mesh(execution.exact)
        self._count = here.micro_batches
        rows = cfg.batch_size // self._count
        here = choose_dispatch(model.stacks, rows, cfg.seq_len, here, "evaluate")
        assert here.mesh is not None
        self._source, self._cfg = source, cfg
        self._feed = Feed(
            NamedSharding(here.mesh, here.micro_batches_spec),
            (self._count, rows, cfg.seq_len),
            here.token_order(cfg.seq_len),
        )
        # Of all rows of a batch those that this process reads, micro-batch by micro-batch.
        self._rows = (np.arange(self._count)[:, None] * rows + self._feed.rows).reshape(-1)
        self.sums = make_sums(model, here)

    def __call__(self, model: LanguageModel, on_batch: OnBatch = lambda done, total: None) -> Evaluation:
        """Evaluate `model`, laid out for the execution, on `data.eval_sequences` rows of the validation split.

        Of a mixture, on so many rows of each source; the loss is then the mean over all predicted tokens.

        What `on_batch` raises ends the evaluation.
        """
        cfg, unit = self._cfg, self._source.unit
        sizes = {"seq_len": cfg.seq_len, "batch_size": cfg.batch_size, "limit": cfg.data.eval_sequences}
        parts = {name: validation_batches(part, **sizes, rows=self._rows) for name, part in self._source.parts.items()}
        done, count = itertools.count(), sum(map(len, parts.values()))
        sums = {}
        for name, batches in parts.items():
            nats, tokens, dropped = 0.0, 0, 0
            for batch in batches:
                on_batch(next(done), count)
                cut = jax.tree.map(lambda x: x.reshape(self._count, -1, cfg.seq_len), batch)
                # Wait for each batch: on the CPU, collectives of several can wait for each other forever (jax 0.10).
                a, b, c = jax.device_get(jax.block_until_ready(self.sums(model, self._feed(cut))))
                nats, tokens, dropped = nats + float(a), tokens + int(b), dropped + int(c)
            sums[name] = nats, tokens, dropped, batches.rows, batches.all_rows
        on_batch(count, count)

        def result(nats: float, tokens: int, dropped: int, rows: int, all_rows: int) -> Evaluation:
            return Evaluation(nats / max(tokens, 1), tokens, dropped, unit, rows, all_rows)

        by_source = {name: result(*its) for name, its in sums.items()} if self._source.weighted else {}
        return result(*map(sum, zip(*sums.values(), strict=True)))._replace(by_source=by_source)


def evaluate(
    model: LanguageModel,
    cfg: TrainConfig,
    on_batch: OnBatch = lambda done, total: None,
    *,
    split: Literal["validation", "all"] = "validation",
    source: Source | None = None,
) -> Evaluation:
    """Evaluate `model`, on whatever devices it is, with the data, mesh, rules and dispatch of `cfg`.

    Args:
        model: The model that `cfg.model` describes.
        cfg: A configuration; `data.eval_sequences` rows are read, evenly spaced, or all for 0; of a mixture, for
            each source.
        on_batch: `on_batch(done, total)` is called before each batch and at the end, to show progress; what it raises
            ends the call.
        split: The documents: those for validation, or all, those to train on included.
        source: What `moezoo.data.load` returned for `cfg.data` and this split; by default it is loaded here.

    Raises:
        UserError: These do not fit the model, or the model is not the one that `cfg.model` describes.
    """
    split = convert(Literal["validation", "all"], split, "split")
    check_type("model", model, LanguageModel, "give a model, such as moezoo.load_run returns")
    check_config(cfg)
    expected = blueprint_of(cfg).shapes
    ours, theirs = ([(path, shape) for path, _, shape in parameter_table(each)] for each in (model, expected))
    if ours != theirs:
        raise UserError(
            f"evaluate: the model is not that of cfg.model ({describe_difference(model, expected)}); write "
            "dataclasses.replace(cfg, model=model.config), or take both from moezoo.load_run"
        )
    execution = build_execution(cfg)
    if source is None:
        source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=model.vocab, use=split)
    with function_cache(cfg.cache_dir):
        model = place(cut_pieces(model, execution), execution)
        result = Evaluator(model, source, cfg, execution)(model, on_batch)
    texts = {name: _count_text(part, cfg) for name, part in source.parts.items()}
    unknown = [text for text in texts.values() if isinstance(text, str)]
    known = [text for text in texts.values() if isinstance(text, int)]
    by_source = {name: own._replace(text=texts[name]) for name, own in result.by_source.items()}
    return result._replace(text=unknown[0] if unknown else sum(known), by_source=by_source)


def _count_text(source: Source, cfg: TrainConfig) -> int | str:
    """Return the bytes of text of an evaluation of a source that is no mixture, or why they are not known."""
    try:
        table = source.token_bytes()
    except UserError as reason:
        return str(reason)
    rows = validation_rows(source, cfg.seq_len)
    return count_bytes(rows.rows(0), source.validation, rows.choose(cfg.data.eval_sequences), table)
