"""`moezoo evaluate`: the loss of a run's model, or of a Hugging Face folder's, on data, or its metrics in tasks."""

import sys
from collections.abc import Sequence
from typing import Any

from moezoo.cli.command import ConfiguredCommand
from moezoo.cli.harness import EvaluateKeys, configure_tasks, evaluate_tasks, showing_batches
from moezoo.cli.model_keys import load_model
from moezoo.cli.text_keys import configure_text, load_text
from moezoo.config.options import take


def configure(*arguments: str) -> Any:
    """Return the configuration of the model, and of its text where it names no tasks."""
    keys, changes = take(EvaluateKeys, arguments)
    return configure_tasks(keys, changes) if keys.tasks is not None else configure_text(keys, changes)


def main(arguments: Sequence[str]) -> None:
    """Load the model and print its loss, or the metrics of tasks."""
    from moezoo.config.build import build_execution
    from moezoo.models.choice import compare_strategies
    from moezoo.parallel.cache import use_cache
    from moezoo.parallel.mesh_execution import on_mesh
    from moezoo.training.evaluate import evaluate
    from moezoo.training.report import choice_lines

    keys, changes = take(EvaluateKeys, arguments)
    if keys.tasks is not None:
        return evaluate_tasks(keys, changes)
    cfg = configure_text(keys, changes)
    execution = on_mesh(build_execution(cfg))
    use, source = load_text(keys, cfg, changes)  # before the model, which may take long to load
    model = load_model(keys, changes, execution)
    use_cache(cfg.cache_dir, execution.mesh)
    rows = cfg.batch_size // execution.micro_batches
    compared = compare_strategies(model.stacks, rows, cfg.seq_len, execution.exact, "evaluate")
    for line in choice_lines(cfg.dispatch, {"evaluate": compared}):
        print(line, file=sys.stderr)
    with showing_batches(execution.mesh) as on_batch:
        result = evaluate(model, cfg, on_batch, split=use, source=source)
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
    "compute the loss of a model on data, or run tasks of lm_eval",
    main,
    description="Evaluate the newest checkpoint of a run, or its best, or the model of a Hugging Face folder: loss, "
    "perplexity and bits per byte; or, with tasks=, the metrics of tasks of the evaluation harness lm_eval.\n"
    "Keys that you do not set have the values of the run; data of files have the "
    "tokenizer and end token of the run or folder. Keys of training alone have no effect.",
    keys=EvaluateKeys,
    configure=configure,
    examples=(
        "run_dir=runs/NAME",
        "run_dir=runs/NAME checkpoint=best data.eval_sequences=0",
        "run_dir=runs/NAME mesh=single dispatch=gather data.eval_sequences=0",
        "run_dir=runs/NAME data=text data.validation=FILE data.eval_sequences=0",
        "folder=FOLDER data=text data.path=notes/ seq_len=1024 data.eval_sequences=0",
        "folder=FOLDER data=jsonl data.path=a.jsonl split=validation mesh=ep8 dtype=stored",
        "folder=FOLDER tasks=hellaswag,arc_easy num_fewshot=5 batch_size=16 mesh=ep8 out=results.json",
        "run_dir=runs/NAME tasks=mine tasks_path=tasks/ chat=true",
    ),
    groups=("mesh", "rules", "dispatch", "data"),
)
