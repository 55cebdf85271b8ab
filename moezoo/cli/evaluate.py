"""`moezoo evaluate`: compute the loss of a run's model, or of a Hugging Face folder's, on data."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Literal

from moezoo.cli.command import ConfiguredCommand
from moezoo.cli.model_keys import ModelKeys, configure_model, load_model
from moezoo.config.options import key, take
from moezoo.errors import UserError
from moezoo.typed import show


@dataclasses.dataclass(frozen=True)
class Keys(ModelKeys):
    """The command's own options."""

    split: Literal["validation", "all"] | None = key(
        "the documents: those held out for validation, or all (by default validation for a run; for a folder all, or "
        "those of data.validation)",
        "validation|all",
        default=None,
    )


def configure(*arguments: str) -> Any:
    """Return the run's configuration, or the default one with the folder's model and tokenizer; overrides applied."""
    from moezoo.config.compose import given_keys
    from moezoo.data.file_settings import fill_in
    from moezoo.hub.folders import text_settings
    from moezoo.hub.opening import folder_argument

    keys, changes = take(Keys, arguments)
    cfg = configure_model(keys, changes)
    if keys.folder is None:
        return cfg
    folder = folder_argument(keys.folder)
    data = fill_in(
        cfg.data, given_keys(*changes), lambda *ours: text_settings(folder, "folder", cfg.model.vocab, *ours)
    )
    return dataclasses.replace(cfg, data=data)


def _check_tokens(cfg: Any, source: Any, folder: str, changes: Sequence[str]) -> None:
    """Raise `UserError` if the tokens of `source` are known to be of another tokenizer than the folder's."""
    from moezoo.config.compose import given_keys
    from moezoo.data.tokenizer import is_same_tokenizer
    from moezoo.hub.folders import find_tokenizer

    own, made_by = find_tokenizer(folder), cfg.data.tokenizer_file()
    if own is None or any(key.endswith(".tokenizer") for key in given_keys(*changes)):
        return
    shown = show(f"folder={folder}")
    if source.unit == "byte":
        raise UserError(
            f"data={source.name} has bytes for tokens, but {shown} has a tokenizer.json; choose data=text "
            "data.path=FILE_OR_FOLDER"
        )
    if made_by is not None and not is_same_tokenizer(own, made_by):
        raise UserError(
            f"data={source.name}: {show(str(made_by))} made these tokens, and tokenizer.json of {shown} differs; make "
            "them again with moezoo prepare-data"
        )


def main(arguments: Sequence[str]) -> None:
    """Load the model and print its loss."""
    from moezoo.config.build import build_execution
    from moezoo.data import load
    from moezoo.models.choice import compare_strategies
    from moezoo.parallel.cache import use_cache
    from moezoo.progress import BatchCounter, bar_on
    from moezoo.training.evaluate import evaluate
    from moezoo.training.report import choice_lines

    keys, changes = take(Keys, arguments)
    cfg = configure(*arguments)
    execution = build_execution(cfg)
    use = keys.split or ("all" if keys.folder and not cfg.data.has_own_validation else "validation")
    # Before the model, which may take long to load.
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab, use=use)
    if keys.folder:
        _check_tokens(cfg, source, keys.folder, changes)
    model = load_model(keys, changes, execution)
    use_cache(cfg.cache_dir, execution.mesh)
    compared = compare_strategies(model.stacks, cfg.batch_size, cfg.seq_len, execution.exact, "evaluate")
    for line in choice_lines(cfg.dispatch, {"evaluate": compared}):
        print(line, file=sys.stderr)
    with bar_on(sys.stderr) as bar:
        counter = BatchCounter(bar, lambda line: print(line, file=sys.stderr))
        result = evaluate(model, cfg, counter, split=use, source=source)
    print(f"{use:11} {_describe(result, source)} of {cfg.seq_len}")
    for name, own in result.by_source.items():
        print(f"{name:11} {_describe(own, source.parts[name])} of {cfg.seq_len}")
    if result.bits_per_byte is None:
        print(f"bits per byte are not known: {result.text or 'the predicted tokens stand for no text'}")


def _describe(result: Any, source: Any) -> str:
    """Return the line of an `Evaluation` of a source, up to the kind of its rows."""
    unit, per_byte = result.unit, result.bits_per_byte
    packings = {part.packing for part in source.parts.values()}
    rows = {("stream",): "windows", ("whole",): "rows of whole documents, each"}.get((*packings,), "rows")
    more = "" if per_byte is None or unit == "byte" else f", {per_byte:.6f} bits per byte"
    return (
        f"{result.loss:.6f} nats per {unit}, {result.bits:.6f} bits per {unit}, perplexity {result.perplexity:.4f}"
        f"{more}, over {result.tokens:,} {unit}s in {result.rows:,} of {result.all_rows:,} {rows}"
    )


COMMAND = ConfiguredCommand(
    "evaluate",
    "compute the loss of a model on data",
    main,
    description="Evaluate the newest checkpoint of a run, or the model of a Hugging Face folder: loss, perplexity and "
    "bits per byte.\nKeys that you do not set have the values of the run; data of files have the tokenizer and end "
    "token of the run or folder. Keys of training alone have no effect.",
    keys=Keys,
    configure=configure,
    examples=(
        "run_dir=runs/NAME",
        "run_dir=runs/NAME mesh=single dispatch=gather data.eval_sequences=0",
        "run_dir=runs/NAME data=text data.validation=FILE data.eval_sequences=0",
        "folder=FOLDER data=text data.path=notes/ seq_len=1024 data.eval_sequences=0",
        "folder=FOLDER data=jsonl data.path=a.jsonl split=validation mesh=ep8 dtype=stored",
    ),
    groups=("mesh", "rules", "dispatch", "data"),
)
