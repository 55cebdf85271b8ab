"""The command line of the benchmarks."""

import argparse
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moezoo.errors import UserError, nearest

PARTS = ("grouped_matmul", "moe_layer", "train_step", "compile")
# A training step in one word each: overrides of `moezoo.compose`.
STEPS = ("mesh=single dispatch=ring", "mesh=ep8 dispatch=ring", "mesh=ep8 dispatch=gather", "mesh=fsdp8 dispatch=ring")


def parser() -> argparse.ArgumentParser:
    """All that can be set."""
    made = argparse.ArgumentParser(
        description="Measure a part of moezoo beside what else could do the same work, by turns in one run.",
        epilog="What each figure means is in docs/benchmarks.md.",
    )
    made.add_argument("part", metavar="PART", help=", ".join(PARTS))
    made.add_argument(
        "--shapes", nargs="+", metavar="NAME", help="names of moezoo.bench.shapes, or laptop, accelerator"
    )
    made.add_argument("--routing", nargs="+", metavar="NAME", default=["uniform", "zipf"], help="uniform, zipf")
    made.add_argument("--passes", nargs="+", metavar="NAME", help="forward, backward, both (default: all)")
    made.add_argument("--dtype", help="float32 or bfloat16 (default: float32 on a CPU, else bfloat16)")
    made.add_argument("--only", nargs="+", metavar="WORD", help="implementations whose name holds one of these words")
    made.add_argument("--steps", nargs="+", metavar="OVERRIDES", help=f"train_step: what to compose (default: {STEPS})")
    made.add_argument("--absent", nargs="+", metavar="KIND", default=["h200", "v5p"], help="compile: for what")
    made.add_argument("--seconds", type=float, default=5.0, help="time for each implementation and pass (default: 5)")
    made.add_argument("--samples", type=int, default=15, help="samples of each at most (default: 15)")
    made.add_argument("--json", action="store_true", help="print the rows as JSON and nothing else")
    made.add_argument("--out", metavar="FOLDER", help="where rows and picture go (default: a new one under runs/)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code, 2 after a mistake."""
    options = parser().parse_args(arguments)
    try:
        _check(options)
        if options.part == "compile":
            _compile(options)
            return 0
        results = list(_results(options))
        _show(results, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the table has gone; Python flushes once more at exit, and would complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _check(options: argparse.Namespace) -> None:
    from moezoo.bench.shapes import SHAPES

    _known("part", [options.part], PARTS)
    _known("--routing", options.routing, ("uniform", "zipf"))
    _known("--passes", options.passes or [], ("forward", "backward", "both"))
    _known("--dtype", [options.dtype] if options.dtype else [], ("float32", "bfloat16"))
    _known("--shapes", options.shapes or [], (*SHAPES, "laptop", "accelerator"))
    for name in ("seconds", "samples"):
        if getattr(options, name) <= 0:
            raise UserError(f"--{name} {getattr(options, name)}: must be more than 0")
    if options.part == "train_step" and (options.shapes or options.passes):
        raise UserError("--shapes and --passes are not of train_step, which takes --steps 'model=mixtral mesh=ep8'")
    if options.part != "train_step" and options.steps:
        raise UserError(f"--steps is of train_step, not of {options.part}, which takes --shapes")
    if options.part == "compile" and (options.json or options.out or options.only):
        raise UserError("--json, --out and --only are not of compile, which prints a table of all it compiles")
    if options.part == "train_step" and options.only:
        raise UserError("--only is not of train_step, which takes --steps 'model=mixtral mesh=ep8'")
    if options.out:
        try:
            Path(options.out).mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"--out {options.out} exists; name a new folder") from None
        except OSError as error:
            raise UserError(f"--out {options.out}: cannot be made ({error.strerror}); name another folder") from error


def _known(what: str, names: Sequence[str], valid: Sequence[str]) -> None:
    for name in names:
        if name not in valid:
            raise UserError(f"{what} {name}: not known; {nearest(name, valid)}")


def _results(options: argparse.Namespace) -> Iterator[Any]:
    if options.part == "train_step":
        from moezoo.bench.train_step import train_steps

        yield from train_steps(options.steps or STEPS, options.dtype, options.seconds, options.samples, _tell)
        return
    from moezoo.bench import parts, results
    from moezoo.bench.shapes import SHAPES
    from moezoo.mesh import prepare

    prepare(1)
    import jax

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
                    _tell(f"{name} {routing}: {who} left out: {candidate}")
                else:
                    candidates[who] = candidate()
            if not chosen:
                raise UserError(
                    f"--only {' '.join(options.only or [])}: no implementation of {options.part} has such a name"
                )
            flops = shape.product_flops if options.part == "grouped_matmul" else shape.layer_flops
            for row in results.compare(
                candidates,
                options.passes or ("forward", "backward", "both"),
                part=options.part,
                shape=shape.letters,
                routing=routing,
                dtype=dtype,
                forward_flops=float(flops),
                seconds=options.seconds,
                samples=options.samples,
            ):
                _tell(f"{name} {routing} {row['pass']} {row['implementation']}: {row['ms']:.1f} ms")
                yield row


def _compile(options: argparse.Namespace) -> None:
    from moezoo.bench import compiling
    from moezoo.mesh import prepare

    prepare(1)
    results = []
    for result in compiling.compile_all(options.absent, _names(options, "accelerator"), options.dtype or "bfloat16"):
        _tell(f"compiled {result.part} {result.name} for {result.target}")
        results.append(result)
    compiling.print_compiled(results, _console())


def _names(options: argparse.Namespace, otherwise: str) -> list[str]:
    from moezoo.bench.shapes import ACCELERATOR, LAPTOP

    groups = {"laptop": list(LAPTOP), "accelerator": list(ACCELERATOR)}
    return [name for word in options.shapes or [otherwise] for name in groups.get(word, [word])]


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(rows: list[Any], options: argparse.Namespace) -> None:
    from moezoo.bench import results

    if options.json:
        print(results.to_json(rows))
        if not options.out:
            return
    else:
        results.print_table(rows, _console())
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(options.out or f"runs/bench_{options.part}_{now}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(results.to_json(rows) + "\n")
    results.picture(rows, folder / "speed.png")
    _tell(f"left {folder}/rows.json and {folder}/speed.png")
