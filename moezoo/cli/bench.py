"""`moezoo bench`: measure a part of moezoo beside what else could do the same work."""

import argparse
import datetime
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console

from moezoo.bench import attention, compiling, parts, results, strategies
from moezoo.bench.shapes import ACCELERATOR, LAPTOP, SHAPES
from moezoo.bench.train_step import train_steps
from moezoo.cli.command import Command
from moezoo.errors import UserError, nearest
from moezoo.moe.dispatch import STRATEGIES
from moezoo.parallel.mesh import prepare

_TIMED = ("dtype", "seconds", "samples", "json", "out")
_KERNEL = ("shapes", "routing", "passes", "dtype", "only", "seconds", "samples", "json", "out")
# Every part, and the options it takes.
PARTS = {
    "grouped_matmul": _KERNEL,
    "moe_layer": _KERNEL,
    "train_step": ("steps", "dtype", "seconds", "samples", "json", "out"),
    "strategies": ("dispatch", "mesh", "settings", "updates", "json", "out"),
    "attention": ("tokens", "heads", "dims", "documents", "window", "absent", *_TIMED),
    "compile": ("shapes", "absent", "dtype"),
}
# A training step in one word each: overrides of `moezoo.compose`.
STEPS = ("mesh=single dispatch=ring", "mesh=ep8 dispatch=ring", "mesh=ep8 dispatch=gather", "mesh=fsdp8 dispatch=ring")
MESHES = ("single", "fsdp8", "ep8", "fsdp2_ep4", "fsdp4_ep2")
# What an option that is not given stands for; others are a part's own affair.
_DEFAULTS = {
    "routing": ["uniform", "zipf"],
    "passes": ["forward", "backward", "both"],
    "steps": list(STEPS),
    "dispatch": list(STRATEGIES),
    "mesh": list(MESHES),
    "settings": "",
    "updates": 20,
    "tokens": list(attention.LENGTHS),
    "heads": "2x2",
    "dims": "32x32",
    "documents": 1,
    "seconds": 5.0,
    "samples": 15,
}


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists what there is")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """All that can be set."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description="Measure a part of moezoo beside what else could do the same work, by turns in one run.",
        epilog="What each figure means is in docs/benchmarks.md.",
    )
    parser.add_argument("part", metavar="PART", help=", ".join(PARTS))

    def several(name: str, metavar: str, text: str) -> None:
        parser.add_argument(f"--{name}", nargs="+", metavar=metavar, help=text)

    several("shapes", "NAME", "names of moezoo.bench.shapes, or laptop, accelerator")
    several("routing", "NAME", "uniform, zipf (default: both)")
    several("passes", "NAME", "forward, backward, both (default: all)")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: float32 on a CPU, else bfloat16)")
    several("only", "WORD", "implementations whose name holds one of these words")
    several("steps", "OVERRIDES", f"train_step: what to compose (default: {', '.join(map(repr, STEPS))})")
    several("dispatch", "NAME", "strategies: which, and overrides in the same word if need be (default: all)")
    several("mesh", "NAME", f"strategies: on which meshes (default: {', '.join(MESHES)})")
    parser.add_argument("--settings", metavar="OVERRIDES", help="strategies: what else to compose, for all of them")
    parser.add_argument("--updates", type=int, metavar="N", help="strategies: of the parameters (default: 20)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="attention: lengths of a row")
    parser.add_argument("--heads", metavar="KxG", help="attention: key-value heads, query heads of each (default: 2x2)")
    parser.add_argument("--dims", metavar="HxV", help="attention: dimensions of keys and of values (default: 32x32)")
    parser.add_argument("--documents", type=int, metavar="N", help="attention: in a row (default: 1)")
    parser.add_argument("--window", type=int, metavar="N", help="attention: tokens that a query sees (default: all)")
    several("absent", "KIND", "compile: for what (default: h200 v5p); attention: compile for it, do not run")
    parser.add_argument("--seconds", type=float, help="time for each implementation and pass (default: 5)")
    parser.add_argument("--samples", type=int, help="samples of each at most (default: 15)")
    parser.add_argument("--json", action="store_const", const=True, help="print the rows as JSON and nothing else")
    parser.add_argument("--out", metavar="FOLDER", help="where rows and picture go (default: a new one under runs/)")
    return parser


def _take(options: argparse.Namespace) -> None:
    """Refuse what the part does not take, and fill in what was not given."""
    taken = PARTS[options.part]
    for name, value in vars(options).items():
        if name not in ("part", *taken) and value is not None:
            raise UserError(f"--{name} is not of {options.part}, which takes {' '.join(f'--{t}' for t in taken)}")
    for name, default in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def _check(options: argparse.Namespace) -> None:
    _check_known("--routing", options.routing, ("uniform", "zipf"))
    _check_known("--passes", options.passes, ("forward", "backward", "both"))
    _check_known("--dtype", [options.dtype] if options.dtype else [], ("float32", "bfloat16"))
    _check_known("--shapes", options.shapes or [], (*SHAPES, "laptop", "accelerator"))
    for name in ("seconds", "samples", "updates", "documents", "window"):
        if (given := getattr(options, name)) is not None and given <= 0:
            raise UserError(f"--{name} {given}: must be more than 0")
    if min(options.tokens) <= 0:
        raise UserError(f"--tokens {min(options.tokens)}: must be more than 0")
    if options.out:
        try:
            Path(options.out).mkdir(parents=True, exist_ok=True)
            if any(Path(options.out).iterdir()):
                raise UserError(f"--out {options.out} is not empty; name a new folder")
        except FileExistsError:
            raise UserError(f"--out {options.out} is a file; name a new folder") from None
        except OSError as error:
            raise UserError(f"--out {options.out}: cannot be made ({error.strerror}); name another folder") from error


def _check_known(what: str, names: Sequence[str], valid: Collection[str]) -> None:
    for name in names:
        if name not in valid:
            raise UserError(f"{what} {name}: not known; {nearest(name, valid)}")


def _results(options: argparse.Namespace) -> Iterator[Any]:
    if options.part == "train_step":
        yield from train_steps(options.steps, options.dtype, options.seconds, options.samples, _log)
        return
    prepare(1)
    on_cpu = jax.default_backend() == "cpu"
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    make = {"grouped_matmul": parts.product, "moe_layer": parts.layer}[options.part]
    for name in _names(options, "laptop" if on_cpu else "accelerator"):
        shape = SHAPES[name]
        for routing in options.routing:
            candidates, chosen = {}, False
            for who, candidate in make(shape, routing, dtype):
                if who not in (parts.MATMUL, parts.BATCHED):
                    if not any(w in who for w in options.only or [who]):
                        continue
                    chosen = True
                if isinstance(candidate, str):
                    _log(f"{name} {routing}: {who} left out: {candidate}")
                else:
                    candidates[who] = candidate()
            if not chosen:
                raise UserError(
                    f"--only {' '.join(options.only or [])}: no implementation of {options.part} has such a name"
                )
            flops = shape.product_flops if options.part == "grouped_matmul" else shape.layer_flops
            for row in results.compare(
                candidates,
                options.passes,
                part=options.part,
                shape=shape.letters,
                routing=routing,
                dtype=dtype,
                forward_flops=float(flops),
                seconds=options.seconds,
                samples=options.samples,
            ):
                _log(f"{name} {routing} {row['pass']} {row['implementation']}: {row['ms']:.1f} ms")
                yield row


def _compile(options: argparse.Namespace) -> None:
    prepare(1)
    programs = []
    targets, dtype = options.absent or ["h200", "v5p"], options.dtype or "bfloat16"
    for result in compiling.compile_all(targets, _names(options, "accelerator"), dtype):
        _log(f"compiled {result.part} {result.name} for {result.target}")
        programs.append(result)
    compiling.print_compiled(programs, _console())


def _attention(options: argparse.Namespace) -> list[attention.Measurement]:
    prepare(1)
    heads, dims = (_two_numbers(name, getattr(options, name)) for name in ("heads", "dims"))
    on_cpu = jax.default_backend() == "cpu" and not options.absent
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    sizes = attention.Sizes(*heads, *dims, options.documents, options.window, dtype)
    if options.absent:
        return list(attention.compile_attention(options.absent, options.tokens, sizes, _log))
    return list(attention.compare_attention(options.tokens, sizes, options.seconds, options.samples, _log))


def _two_numbers(name: str, text: str) -> tuple[int, int]:
    numbers = text.split("x")
    if len(numbers) != 2 or not all(n.isdecimal() and int(n) for n in numbers):
        raise UserError(f"--{name} {text}: must be two numbers more than 0, such as {_DEFAULTS[name]}")
    return int(numbers[0]), int(numbers[1])


def _names(options: argparse.Namespace, otherwise: str) -> list[str]:
    groups = {"laptop": list(LAPTOP), "accelerator": list(ACCELERATOR)}
    return [name for word in options.shapes or [otherwise] for name in groups.get(word, [word])]


def _console() -> Any:
    return Console(width=None if sys.stdout.isatty() else 120)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave(rows: list[Any], options: argparse.Namespace, print_table: Any, picture: Any) -> None:
    """Rows as a table or as JSON, and in a folder with a picture."""
    if options.json:
        print(results.to_json(rows))
        if not options.out:
            return
    else:
        print_table(rows, _console())
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(options.out or f"runs/bench_{options.part}_{now}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(results.to_json(rows) + "\n")
    picture(rows, folder / "speed.png")
    _log(f"left {folder}/rows.json and {folder}/speed.png")


class _Bench(Command):
    """Unlike the other commands it takes --flags, which say what it prints and selects."""

    def call(self, arguments: Sequence[str], prog: str) -> None:
        """Run the part that the first argument names."""
        options = make_parser(prog).parse_args(arguments)
        _check_known("part", [options.part], PARTS)
        _take(options)
        _check(options)
        if options.part == "compile":
            _compile(options)
        elif options.part == "attention":
            rows = _attention(options)
            if not options.absent:
                _leave(rows, options, attention.print_table, attention.picture)
            elif options.json:
                print(results.to_json(rows))
            else:
                attention.print_table(rows, _console())
        elif options.part == "strategies":
            rows = strategies.compare_strategies(
                options.dispatch, options.mesh, options.settings, options.updates, _log
            )
            _leave(rows, options, strategies.print_table, strategies.picture)
        else:
            _leave(list(_results(options)), options, results.print_table, results.picture)


COMMAND = _Bench("bench", "measure a part beside what else could do the same work")
