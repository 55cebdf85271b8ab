"""`moezoo evaluate`: compute the validation loss of a run's model."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from moezoo.cli.command import ConfiguredCommand
from moezoo.config.options import key, take


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's own options."""

    run_dir: str = key("the folder of a run, or one of its checkpoints/STEP", "FOLDER")


def configure(*arguments: str) -> Any:
    """Return the run's configuration with overrides applied."""
    from moezoo.training.saved import saved_config

    keys, changes = take(Keys, arguments)
    return saved_config(keys.run_dir, *changes)


def main(arguments: Sequence[str]) -> None:
    """Load the run's last checkpoint and print its validation loss."""
    from moezoo.config.build import build_execution
    from moezoo.models.choice import compare_strategies
    from moezoo.parallel.cache import use_cache
    from moezoo.progress import BatchCounter, bar_on
    from moezoo.training.evaluate import evaluate
    from moezoo.training.report import choice_lines
    from moezoo.training.saved import load_run

    keys, changes = take(Keys, arguments)
    model, cfg = load_run(keys.run_dir, *changes)
    execution = build_execution(cfg).exact
    use_cache(cfg.cache_dir, execution.mesh)
    compared = compare_strategies(model.stacks, cfg.batch_size, cfg.seq_len, execution, "evaluate")
    for line in choice_lines(cfg.dispatch, {"evaluate": compared}):
        print(line, file=sys.stderr)
    with bar_on(sys.stderr) as bar:
        result = evaluate(model, cfg, BatchCounter(bar, lambda line: print(line, file=sys.stderr)))
    unit = result.unit
    print(
        f"validation  {result.loss:.6f} nats per {unit}, {result.bits:.6f} bits per {unit}, perplexity "
        f"{result.perplexity:.4f}, over {result.tokens:,} {unit}s"
    )


COMMAND = ConfiguredCommand(
    "evaluate",
    "compute the validation loss of a run's model",
    main,
    description="Evaluate the newest checkpoint of a run on its validation data.\n"
    "Keys that you do not set have the values of the run; keys of training alone have no effect.",
    keys=Keys,
    configure=configure,
    examples=(
        "run_dir=runs/NAME",
        "run_dir=runs/NAME mesh=single dispatch=gather data.eval_sequences=0",
        "run_dir=runs/NAME data=text data.validation=FILE data.eval_sequences=0",
    ),
    groups=("mesh", "rules", "dispatch", "data"),
)
