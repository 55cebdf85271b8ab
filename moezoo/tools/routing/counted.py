"""How a model routes the tokens of a text, and how far another model, or another way to run it, routes them alike."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Float, Int64

from moezoo.config.build import build_execution
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, Source, load, validation_batches
from moezoo.data.tokenizer import Numbers
from moezoo.errors import UserError, check_type
from moezoo.models.base import LanguageModel, as_integers, check_inside
from moezoo.models.layers import layers_with_experts
from moezoo.parallel.execution import Execution
from moezoo.progress import OnBatch
from moezoo.tools.recording import make_expert_ids
from moezoo.tools.routing.tally import SpecificToken, Tally, log_odds
from moezoo.typed import convert, show

_CONTEXT = 24  # tokens before and after one that is shown
_LEAST_SCORE = 1.96  # the 95% level of a z-score: chance may explain a smaller one


class TextRows(NamedTuple):
    """Rows in batches of one `shape` [batch, seq].

    `readers[number](first, rows)` returns rows of batch `number` as NumPy arrays; `decode` turns token ids into text;
    `unit` is what a token is, "byte" or "token".
    """

    readers: Sequence[Callable[[int, int], Batch]]
    shape: tuple[int, int]
    decode: Callable[[Iterable[SupportsIndex]], str]
    unit: str

    def batches(self, on_batch: OnBatch = lambda done, total: None) -> Iterator[Batch]:
        """Yield the batches in order; `on_batch` is called before each and at the end."""
        for number, read in enumerate(self.readers):
            on_batch(number, len(self.readers))
            yield read(0, self.shape[0])
        on_batch(len(self.readers), len(self.readers))


class Context(NamedTuple):
    """The text of a token, and of its document before and after it."""

    before: str
    token: str
    after: str


class TextRouting(NamedTuple):
    """The routing of one model on one text.

    Attributes:
        layers: The numbers of the model's layers with experts, in the order of all arrays.
        tally: The counts, with `load`, `balance`, `dead` and `co_activation`.
        rows: The text.
    """

    layers: tuple[int, ...]
    tally: Tally
    rows: TextRows

    def specific_tokens(self, count: int = 8) -> list[list[list[SpecificToken]]]:
        """Return the tokens specific to each expert of each layer, the best first: `count` at most, of 1.96 or more."""
        tally, found = self.tally, []
        for chosen, first in zip(tally.chosen, tally.first, strict=True):
            scores = np.where(chosen > 0, log_odds(chosen, tally.occurrences), 0)
            best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            scores, chosen, first = (np.take_along_axis(each, best, 1) for each in (scores, chosen, first))
            fields = np.stack([tally.token_ids[best], scores, chosen, tally.occurrences[best], first], 2, dtype=object)
            shown = scores >= _LEAST_SCORE
            found.append([[SpecificToken(*each) for each in fields[e, shown[e]]] for e in range(len(best))])
        return found

    def context(self, place: int) -> Context:
        """Return the text around a token, of its document alone; `place` is that of a `SpecificToken`."""
        number, row, at = map(int, np.unravel_index(place, (len(self.rows.readers), *self.rows.shape)))
        (ids,), _, (segments,), _ = self.rows.readers[number](row, 1)
        before, after = np.arange(max(at - _CONTEXT, 0), at), np.arange(at + 1, len(ids))[:_CONTEXT]
        parts = (part[segments[part] == segments[at]] for part in (before, np.array([at]), after))
        return Context(*(self.rows.decode(ids[part]) for part in parts))


class RoutingAgreement(NamedTuple):
    """How far another model routes the tokens of a text as the first one does.

    Attributes:
        agreement: The share of assignments in common: of the experts that a token goes to in one model, those that it
            goes to in the other, in any order; the mean over tokens. 1 - agreement is the share of choices that differ.
        load: The other model's assignments per expert.
    """

    agreement: Float[np.ndarray, " layer"]
    load: Int64[np.ndarray, "layer experts"]


def routing(
    model: LanguageModel,
    data: Any,
    *,
    execution: Execution | None = None,
    split: Literal["validation", "all"] = "validation",
    source: Source | None = None,
    on_batch: OnBatch = lambda done, total: None,
) -> TextRouting:
    """Return how `model` routes the tokens of a text: one forward pass per batch, of which only counts are kept.

    Args:
        model: The model, on whatever devices it is.
        data: A configuration, of which `data.eval_sequences` rows are read as `moezoo.evaluate` reads them; or integers
            [batch, seq]; or a `moezoo.data.Batch`, whose padding (segment 0) is not counted.
        execution: How the model runs. Default: as the configuration says, or on one device.
        split: The documents of a configuration's data: those for validation, or all.
        source: What `moezoo.data.load` returned for them; by default it is loaded here.
        on_batch: `on_batch(done, total)` is called before each batch and at the end, to show progress.

    Raises:
        UserError: The model has no experts, or model, data and execution do not fit together.
    """
    rows, execution = _prepare(model, data, execution, split, source)
    expert_ids, layers = make_expert_ids(model, execution, rows.shape), layers_with_experts(model.stacks)
    occurrences = np.zeros(model.vocab, np.int64)
    for batch in rows.batches():
        occurrences += np.bincount(batch.tokens[batch.segments > 0], minlength=model.vocab)
    tally = Tally(len(layers), model.config.experts, model.config.experts_per_token, occurrences)
    for batch in rows.batches(on_batch):
        tally.add(batch.tokens, batch.segments > 0, expert_ids(batch))
    return TextRouting(layers, tally, rows)


def compare_routing(
    model: LanguageModel,
    other: LanguageModel,
    data: Any,
    *,
    execution: Execution | None = None,
    other_execution: Execution | None = None,
    split: Literal["validation", "all"] = "validation",
    source: Source | None = None,
    on_batch: OnBatch = lambda done, total: None,
) -> RoutingAgreement:
    """Return how far `other` routes the tokens of a text as `model` does, with the arguments of `routing`.

    To find what a change of dtype or mesh does, give the same model twice, and the other way to run it as
    `other_execution` (by default `execution`).

    Raises:
        UserError: The models have other numbers of experts or layers; otherwise as `routing`.
    """
    rows, execution = _prepare(model, data, execution, split, source)
    check_type("other", other, LanguageModel, "give a model, such as moezoo.load_run returns")
    if other_execution is not None:
        check_type("other_execution", other_execution, Execution, "write other_execution=moezoo.execution(cfg)")
    check_alike(model, other)
    runs = (model, execution), (other, other_execution or execution)
    one, two = (make_expert_ids(*each, rows.shape) for each in runs)
    layers, experts = len(layers_with_experts(model.stacks)), model.config.experts
    shared, load = np.zeros(layers, np.int64), np.zeros((layers, experts), np.int64)
    for batch in rows.batches(on_batch):
        ours, theirs = (each(batch)[:, batch.segments > 0] for each in (one, two))  # [layer, tokens, k]
        shared += (ours[..., None] == theirs[..., None, :]).sum((1, 2, 3))
        load += np.stack([np.bincount(ids.ravel(), minlength=experts) for ids in theirs])
    return RoutingAgreement(shared / np.maximum(load.sum(1), 1), load)


def check_alike(model: LanguageModel, other: LanguageModel) -> None:
    """Raise `UserError` unless two models, which may be shapes, have as many tokens and experts, in the same layers."""
    names = "vocabularies of", "experts per layer:", "experts per token:", "layers with experts:"
    sizes = (
        (m.vocab, m.config.experts, m.config.experts_per_token, layers_with_experts(m.stacks)) for m in (model, other)
    )
    for what, ours, theirs in zip(names, *sizes, strict=True):
        if ours != theirs:
            raise UserError(
                f"the models have {what} {show(ours)} and {show(theirs)}, so their choices cannot be compared; take "
                "another checkpoint of the same model"
            )


def _prepare(model: Any, data: Any, execution: Any, split: Any, source: Any) -> tuple[TextRows, Execution]:
    check_type("model", model, LanguageModel, "give a model, such as moezoo.load_run returns")
    split = convert(Literal["validation", "all"], split, "split")
    if execution is not None:
        check_type("execution", execution, Execution, "write execution=moezoo.execution(cfg)")
    if not isinstance(data, TrainConfig):
        return _rows_of_tokens(data, model), execution or Execution()
    if source is None:
        source = load(data.data, seq_len=data.seq_len, seed=data.seed, vocab=model.vocab, use=split)
    return rows_of_source(source, data), execution or build_execution(data)


def rows_of_source(source: Source, cfg: TrainConfig) -> TextRows:
    """Return the rows that an evaluation of `cfg` reads: `data.eval_sequences` validation rows of each source."""
    size, seq_len, limit = cfg.batch_size, cfg.seq_len, cfg.data.eval_sequences
    parts = [validation_batches(x, seq_len=seq_len, batch_size=size, limit=limit) for x in source.parts.values()]
    starts = ((part, number * size) for part in parts for number in range(len(part)))  # of each batch, in its part
    readers = [lambda first, rows, part=part, start=start: part.read(start + first, rows) for part, start in starts]
    return TextRows(readers, (size, seq_len), source.decode, source.unit)


def _rows_of_tokens(tokens: object, model: LanguageModel) -> TextRows:
    """Return the rows of one batch: a `Batch`, or integers [batch, seq] whose rows are one document each.

    Raises `UserError` for anything else, and for what `model` cannot read.
    """
    if not isinstance(tokens, Batch):
        ids = np.asarray(as_integers("data", tokens))
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        tokens = Batch(ids, np.full(ids.shape, -1), np.ones(ids.shape, np.int32), positions)
    batch = Batch(*map(np.asarray, tokens))
    valid, limit, vocab = batch.segments > 0, model.config.longest, model.vocab
    check_inside("data", batch.tokens[valid], vocab, f"model.vocab={vocab}")
    check_inside("positions of data", batch.positions[valid], limit.tokens, str(limit))
    batch = Batch(*(x.astype(np.int32) for x in batch))
    read = lambda first, rows: Batch(*(x[first : first + rows] for x in batch))  # noqa: E731
    return TextRows([read], batch.tokens.shape, Numbers(vocab).decode, "token")
