"""`moezoo routing`: show which experts the tokens of a text go to, and what changes that."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.cli.command import ConfiguredCommand
from moezoo.cli.model_keys import load_model, named_run
from moezoo.cli.text_keys import TextKeys, configure_text, load_text
from moezoo.config import overrides
from moezoo.config.options import key, take
from moezoo.errors import UserError
from moezoo.typed import Range, show

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
    top: int = key("the most specific tokens per expert to show", default=8, valid=Range(at_least=0))
    out: str | None = key(
        "the folder to write: routing.html, routing.json and pictures (by default RUN/routing, or ./routing for a "
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


class _Compared(NamedTuple):
    """What is compared with the model: its name, how to load it (None for the same model), and how it runs."""

    name: str
    load: Callable[[], Any] | None
    execution: Any


def main(arguments: Sequence[str]) -> None:
    """Read the text, print a line per layer, and write the files."""
    from moezoo.config.build import build_execution
    from moezoo.config.compose import folder_path
    from moezoo.config.run_folders import find, run_folder, steps
    from moezoo.parallel.cache import use_cache
    from moezoo.parallel.mesh import start
    from moezoo.progress import BatchCounter, bar_on
    from moezoo.tools.routing.counted import compare_routing, routing
    from moezoo.tools.routing.files import check_folder, write
    from moezoo.tools.routing.text import Found, lines

    keys, changes = take(Keys, arguments)
    cfg = configure_text(keys, changes)
    others = {
        text: configure_text(keys, overrides.replace(changes, overrides.words_of("", text))) for text in keys.against
    }
    run = None if keys.run_dir is None else run_folder(folder_path(keys.run_dir, "run_dir"))
    out = Path(keys.out).expanduser() if keys.out is not None else (run or Path()) / "routing"
    check_folder(out, "out")
    start(max(each.mesh.devices for each in (cfg, *others.values())))  # JAX cannot add devices later
    execution = build_execution(cfg)
    compared = [_Compared(text, None, build_execution(other)) for text, other in others.items()]
    use, source = load_text(keys, cfg, changes)
    place = [f"mesh.{axis}={size}" for axis, size in cfg.mesh.sizes.items()]
    if keys.other is not None:
        _check_other(keys, keys.other, cfg)
        compared.append(_Compared(keys.other, lambda: _load(keys.other, place, execution), execution))
    step, older = None, []
    if run is not None:
        checkpoints, step = find(folder_path(named_run(keys), "run_dir"), "run_dir")
        older = [each for each in steps(checkpoints) if each < step]
        compared += [
            _Compared(
                f"step {each}", lambda each=each: _load(str(checkpoints / str(each)), place, execution), execution
            )
            for each in older
        ]
    use_cache(cfg.cache_dir, execution.mesh)
    model = load_model(keys, changes, execution)
    options: Any = {"execution": execution, "split": use, "source": source}
    with bar_on(sys.stderr) as bar:
        options["on_batch"] = BatchCounter(bar, lambda line: print(line, file=sys.stderr))
        text = routing(model, cfg, **options)
        agreements = {
            name: compare_routing(model, model if load is None else load(), cfg, other_execution=how, **options)
            for name, load, how in compared
        }
    found = Found(keys.run_dir or keys.folder or "", step, use, source, text, agreements, older, keys.top)
    print("\n".join(lines(found)))
    for path in write(found, run, out):
        print(f"{'written':<11} {path}")


def _load(path: str, place: Sequence[str], execution: Any) -> Any:
    """Return the model of a run or a folder."""
    from moezoo.hub.loading import from_pretrained
    from moezoo.training.saved import load_run

    return from_pretrained(path, execution) if _is_folder(path) else load_run(path, *place)[0]


def _is_folder(path: str) -> bool:
    """Whether `path` is a Hugging Face folder; otherwise it should be a run."""
    return (Path(path).expanduser() / "config.json").exists()


def _check_other(keys: Keys, other: str, cfg: Any) -> None:
    """Raise `UserError` unless the second model has the same sizes and tokenizer, as far as files show them."""
    from moezoo.config.compose import folder_path, read_run
    from moezoo.config.run_folders import find
    from moezoo.data.tokenizer import is_same_tokenizer
    from moezoo.hub.folders import find_tokenizer, hub_model_config
    from moezoo.training.saved import saved_config

    if not _is_folder(other):
        read_run(other, "other")  # its message names this key
        find(folder_path(other, "other"), "other")
    saved = None if _is_folder(other) else saved_config(other)
    model = hub_model_config(other) if saved is None else saved.model
    own_path = keys.folder or keys.run_dir or ""
    for name in ("layers", "experts", "experts_per_token", "vocab"):
        ours, theirs = getattr(cfg.model, name), getattr(model, name)
        if ours != theirs:
            raise UserError(
                f"other={show(other)} has model.{name}={theirs}, {show(own_path)} has {ours}; name a model of the same "
                "sizes, such as another checkpoint"
            )
    own = find_tokenizer(keys.folder) if keys.folder else saved_config(own_path).data.tokenizer_file()
    its = find_tokenizer(other) if saved is None else saved.data.tokenizer_file()
    if (own is None) != (its is None) or (own and its and not is_same_tokenizer(own, its)):
        raise UserError(
            f"other={show(other)} has {show(str(its)) if its else 'no tokenizer'}, {show(own_path)} has "
            f"{show(str(own)) if own else 'no tokenizer'}, which make other tokens; name a model of the same tokenizer"
        )


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
