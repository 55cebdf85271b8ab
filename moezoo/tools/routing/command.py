"""`moezoo routing`: show which experts the tokens of a text go to, and what changes that."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moezoo.cli.command import ConfiguredCommand
from moezoo.cli.model_keys import ModelKeys, configure_model, load_model, named_run
from moezoo.cli.text_keys import TextKeys, configure_text, load_text
from moezoo.config import overrides
from moezoo.config.options import key, take
from moezoo.errors import UserError, locating
from moezoo.typed import Count, show

# What may differ between two ways to run one model on one text; `execution.param_dtype` is of the model.
_HOW = ("mesh", "rules", "dispatch", "execution")


@dataclasses.dataclass(frozen=True)
class Keys(TextKeys):
    """The command's own options."""

    against: tuple[str, ...] = key(
        "another way to run the model, with these keys besides: the share of choices that it changes; several may be "
        "given",
        '"KEY=VALUE ..."',
        default=(),
    )
    other: str | None = key(
        "a second model of the same sizes and tokenizer, to compare: a run, one of its checkpoints/STEP, or a Hugging "
        "Face folder",
        "FOLDER",
        default=None,
    )
    top: Count = key("the most specific tokens per expert to show", default=8)
    out: str | None = key(
        "the folder to write: routing.md, routing.json and pictures (by default RUN/routing, or ./routing for a "
        "Hugging Face folder)",
        "FOLDER",
        default=None,
    )

    def __post_init__(self):
        super().__post_init__()
        for text in self.against:
            for word in overrides.words_of("against", text):
                name = word.partition("=")[0]
                if name.partition(".")[0] not in _HOW or name == "execution.param_dtype":
                    raise UserError(
                        f"against={show(text)}: {show(word)} is no way to run the model; give keys of "
                        f"{', '.join(_HOW)}, or name a second model with other=FOLDER"
                    )


def configure(*arguments: str) -> Any:
    """Return the configuration of the model and its text."""
    return configure_text(*take(Keys, arguments))


def main(arguments: Sequence[str]) -> None:
    """Read the text, print a line per layer, and write the files."""
    from moezoo.config.build import build_execution
    from moezoo.config.compose import folder_path
    from moezoo.config.run_folders import find, run_folder, steps
    from moezoo.parallel.cache import use_cache
    from moezoo.parallel.mesh import start
    from moezoo.progress import BatchCounter, bar_on
    from moezoo.tools.routing.counted import compare_routing, routing
    from moezoo.tools.routing.report import lines, numbers, write
    from moezoo.training.files import check_writable, writing_to

    keys, changes = take(Keys, arguments)
    cfg = configure_text(keys, changes)
    ways = {way: configure_text(keys, overrides.replace(changes, overrides.words_of("", way))) for way in keys.against}
    run = None if keys.run_dir is None else run_folder(folder_path(keys.run_dir, "run_dir"))
    out = Path(keys.out).expanduser() if keys.out is not None else (run or Path()) / "routing"
    with writing_to("out", out):
        check_writable(out)
    start(max(each.mesh.devices for each in (cfg, *ways.values())))  # JAX cannot add devices later
    execution = build_execution(cfg)
    use, source = load_text(keys, cfg, changes)
    # What is compared -> its model, None for the same one, and how it runs.
    compared: dict[str, Any] = {way: (None, build_execution(each)) for way, each in ways.items()}
    if keys.other is not None:
        compared[keys.other] = _check_other(keys, keys.other, cfg), execution
    name, step, older = keys.run_dir or keys.folder or "", None, []
    if run is not None:
        checkpoints, step = find(folder_path(named_run(keys), "run_dir"), "run_dir")
        name, older = f"{name}, step {step:,}", [each for each in steps(checkpoints) if each < step]
        compared |= {f"step {each}": (ModelKeys(str(checkpoints / str(each))), execution) for each in older}
    use_cache(cfg.cache_dir, execution.mesh)
    model, place = load_model(keys, changes, execution), [f"mesh.{axis}={n}" for axis, n in cfg.mesh.sizes.items()]
    options: Any = {"execution": execution, "split": use, "source": source}
    with bar_on(sys.stderr) as bar:
        options["on_batch"] = BatchCounter(bar, lambda line: print(line, file=sys.stderr))
        text, agreements = routing(model, cfg, **options), {}
        for what, (its, how) in compared.items():
            other = model if its is None else load_model(its, place, execution)
            agreements[what] = compare_routing(model, other, cfg, other_execution=how, **options)
    loads = {each: agreements[f"step {each}"].load for each in older}
    loads |= {} if step is None else {step: text.tally.load}
    report = numbers(name, f"data={source.name}, {use} documents", text, agreements, loads, keys.top)
    print("\n".join(lines(report)))
    for path in write(report, text, loads, out):
        print(f"{'written':<11} {path}")


def _check_other(keys: Keys, other: str, cfg: Any) -> ModelKeys:
    """Return the keys of the second model; `cfg` has the sizes of the first.

    Raises `UserError` unless both have the same sizes and tokenizer, as far as files show them.
    """
    from moezoo.config.build import blueprint_of
    from moezoo.config.compose import folder_path
    from moezoo.config.run_folders import find
    from moezoo.data.tokenizer import is_same_tokenizer
    from moezoo.hub.folders import find_tokenizer
    from moezoo.tools.routing.counted import check_alike

    def tokenizer(model: ModelKeys) -> Path | None:
        return find_tokenizer(model.folder) if model.folder else configure_model(model, ()).data.tokenizer_file()

    is_folder = (Path(other).expanduser() / "config.json").exists()
    if not is_folder:
        find(folder_path(other, "other"), "other")
    second = ModelKeys(folder=other) if is_folder else ModelKeys(run_dir=other)
    with locating(f"other={show(other)}"):
        check_alike(blueprint_of(cfg).shapes, blueprint_of(configure_model(second, ())).shapes)
    own, its = map(tokenizer, (keys, second))
    if (own is None) != (its is None) or (own and its and not is_same_tokenizer(own, its)):
        ours, theirs = (show(str(path)) if path else "no tokenizer" for path in (own, its))
        raise UserError(
            f"other={show(other)} has {theirs}, {show(keys.folder or keys.run_dir)} has {ours}, which make other "
            "tokens; name a model of the same tokenizer"
        )
    return second


COMMAND = ConfiguredCommand(
    "routing",
    "show which experts the tokens of a text go to",
    main,
    description="Show how a model routes a text: the load of each expert, experts that are chosen together, the most "
    "specific tokens of each expert, and how far other checkpoints, another model, or another dtype or mesh route the "
    "text alike.\nThe text is that of `moezoo evaluate` with the same keys. Written are a page, its numbers as JSON, "
    "and pictures.",
    keys=Keys,
    configure=configure,
    examples=(
        "run_dir=runs/NAME",
        'run_dir=runs/NAME against=execution.dtype=bfloat16 against="mesh=ep8 dispatch=ring"',
        "run_dir=runs/NAME/checkpoints/1000 other=runs/OTHER data=text data.path=FILE split=all",
        "folder=FOLDER data=text data.path=notes/ seq_len=1024 out=notes_routing",
    ),
    groups=("mesh", "rules", "dispatch", "data"),
)
