"""How a model routes the tokens of a text, and how far another model, or another way to run it, routes them alike."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from moezoo.config.build import build_execution
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, Source, load
from moezoo.errors import UserError, check_type
from moezoo.models.base import LanguageModel
from moezoo.parallel.execution import Execution
from moezoo.progress import OnBatch
from moezoo.tools.routing.expert_ids import ExpertIds
from moezoo.tools.routing.rows import TextRows, rows_of_source, rows_of_tokens
from moezoo.tools.routing.specific import SpecificToken, specific_tokens
from moezoo.tools.routing.tally import Counter, Tally, count_shared
from moezoo.typed import convert, show

_CONTEXT = 24  # tokens before and after one that is shown


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
        """Return the tokens that are most specific to each expert of each layer (`moezoo.tools.routing.specific`)."""
        return specific_tokens(self.tally, count)

    def context(self, place: int) -> Context:
        """Return the text around a token, of its document alone; `place` is that of a `SpecificToken`."""
        row, at = divmod(place, self.rows.shape[1])
        batch = self.rows.row(row)
        start = max(at - _CONTEXT, 0)
        span = slice(start, at + _CONTEXT + 1)
        ids, same = batch.tokens[0, span], batch.segments[0, span] == batch.segments[0, at]
        at -= start
        parts = ids[:at][same[:at]], ids[at : at + 1], ids[at + 1 :][same[at + 1 :]]
        return Context(*map(self.rows.decode, parts))


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
    expert_ids = ExpertIds(model, execution, rows.shape)
    occurrences = np.zeros(model.vocab, np.int64)
    for batch in rows.batches():
        occurrences += np.bincount(batch.tokens[batch.segments > 0], minlength=model.vocab)
    counter = Counter(len(expert_ids.layers), expert_ids.experts, expert_ids.k, occurrences)
    for batch in _counted(rows, on_batch):
        counter.add(batch.tokens, batch.segments > 0, expert_ids(batch))
    return TextRouting(expert_ids.layers, counter.tally, rows)


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
    one = ExpertIds(model, execution, rows.shape)
    two = ExpertIds(other, other_execution or execution, rows.shape)
    for what, ours, theirs in (
        ("vocabularies of", one.vocab, two.vocab),
        ("experts per layer:", one.experts, two.experts),
        ("experts per token:", one.k, two.k),
        ("layers with experts:", one.layers, two.layers),
    ):
        if ours != theirs:
            raise UserError(
                f"the models have {what} {show(ours)} and {show(theirs)}, so their choices cannot be compared; take "
                "another checkpoint of the same model"
            )
    shared, tokens = np.zeros(len(one.layers), np.int64), 0
    found = np.zeros((len(one.layers), one.experts), np.int64)
    for batch in _counted(rows, on_batch):
        valid = batch.segments > 0
        ours, theirs = (each(batch)[:, valid] for each in (one, two))
        tokens += int(valid.sum())
        shared += count_shared(ours, theirs).sum(1)
        found += np.stack([np.bincount(ids.ravel(), minlength=one.experts) for ids in theirs])
    return RoutingAgreement(shared / max(tokens * one.k, 1), found)


def _prepare(model: Any, data: Any, execution: Any, split: Any, source: Any) -> tuple[TextRows, Execution]:
    check_type("model", model, LanguageModel, "give a model, such as moezoo.load_run returns")
    split = convert(Literal["validation", "all"], split, "split")
    if execution is not None:
        check_type("execution", execution, Execution, "write execution=moezoo.execution(cfg)")
    if not isinstance(data, TrainConfig):
        return rows_of_tokens(data, model), execution or Execution()
    if source is None:
        source = load(data.data, seq_len=data.seq_len, seed=data.seed, vocab=model.vocab, use=split)
    return rows_of_source(source, data), execution or build_execution(data)


def _counted(rows: TextRows, on_batch: OnBatch) -> Iterator[Batch]:
    for done, batch in enumerate(rows.batches()):
        on_batch(done, rows.count)
        yield batch
    on_batch(rows.count, rows.count)
