"""`moezoo bench`: measure a part of moezoo next to alternatives that do the same work."""

import argparse
import contextlib
import datetime
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from moezoo.bench.shapes import ACCELERATOR, LAPTOP, SHAPES
from moezoo.cli.command import Command
from moezoo.config import overrides
from moezoo.errors import UserError, nearest
from moezoo.training.files import making

_TIMED = ("dtype", "seconds", "samples", "json", "out")
_KERNEL = ("shapes", "routing", "passes", "dtype", "only", "seconds", "samples", "json", "out")
# The options of each part.
PARTS = {
    "grouped_matmul": _KERNEL,
    "moe_layer": _KERNEL,
    "train_step": ("steps", "dtype", "seconds", "samples", "json", "out"),
    "profile": ("overrides", "seconds", "samples", "json", "out"),
    "strategies": ("dispatch", "mesh", "settings", "updates", "json", "out"),
    "layouts": ("layouts", "models", "settings", "updates", "json", "out"),
    "attention": ("tokens", "heads", "dims", "documents", "window", "absent", *_TIMED),
    "generate": ("calls", "models", "layouts", "seconds", "samples", "json", "out"),
    "compile": ("shapes", "steps", "absent", "dtype"),
}
_SUMMARIES = (
    "grouped_matmul   the grouped product alone, in all backends and alternatives",
    "moe_layer        a layer of experts with permutation and activation, but without a router",
    "train_step       whole training steps",
    "profile          where the time of a training step goes; takes KEY=VALUE... as moezoo train does",
    "strategies       the first updates of one run, by every dispatch strategy on several meshes",
    "layouts          the first updates of one run, under every rule set and by every dispatch strategy",
    "attention        backends of attention by length: time and temporary memory",
    "generate         greedy generation next to transformers, or under several layouts",
    "compile          kernels, or training steps, compiled for devices that this machine does not have",
)
# A training step in one word each: overrides of `moezoo.compose`.
STEPS = ("mesh=single dispatch=ring", "mesh=ep8 dispatch=ring", "mesh=ep8 dispatch=gather", "mesh=fsdp8 dispatch=ring")
MESHES = ("single", "fsdp8", "ep8", "fsdp2_ep4", "fsdp4_ep2")
# The first layout on a mesh is the reference of the others there. `pure_fsdp` names no expert axis, `cp_as_ep` differs
# from `fsdp_ep` only where there is a context axis, and only `tensor` names that axis; `serve` is not for training.
LAYOUTS = (
    "rules=fsdp_ep dispatch=ring mesh=fsdp2_ep4",
    "rules=fsdp_ep dispatch=dense mesh=fsdp2_ep4",
    "rules=fsdp_ep dispatch=capacity mesh=fsdp2_ep4",
    "rules=fsdp_ep dispatch=gather mesh=fsdp2_ep4",
    "rules=fsdp_ep dispatch=ragged mesh=fsdp2_ep4",
    "rules=shard_exp_on_fsdp dispatch=ring mesh=fsdp2_ep4",
    "rules=ep_as_cp dispatch=ring mesh=fsdp2_ep4",
    "rules=ep_as_dp dispatch=ring mesh=fsdp2_ep4",
    "rules=fsdp_ep dispatch=ring mesh=fsdp8",
    "rules=pure_fsdp dispatch=ring mesh=fsdp8",
    "rules=fsdp_ep dispatch=ring mesh.fsdp=2 mesh.expert=2 mesh.context=2",
    "rules=cp_as_ep dispatch=ring mesh.fsdp=2 mesh.expert=2 mesh.context=2",
    "rules=tensor dispatch=ring mesh.fsdp=2 mesh.expert=2 mesh.tensor=2",
)
# DeepSeek-V2-Lite with its router, experts, experts per token and shared experts; 3 layers, and narrow (most by 16).
NARROW = (
    "deepseek_v2_lite model.vocab=256 model.embed=128 model.layers=3 model.heads=4 model.kv_lora=32 model.nope_dim=32 "
    "model.rope_dim=16 model.value_dim=32 model.mlp=684 model.expert_mlp=88 model.init_std=0.02 execution.dtype=float32"
)
MODELS = {"mixtral": "mixtral", "deepseek": "deepseek", "narrow": NARROW}
# Models of about 100 million parameters, for `generate`.
_WIDE = "model.vocab=8192 model.embed=512 model.layers=8 model.heads=8 model.max_length=4096"
GENERATED = {
    "mixtral_115m": f"mixtral {_WIDE} model.kv_heads=4 model.head_dim=64 model.expert_mlp=1024",
    "deepseek_109m": f"deepseek {_WIDE} model.q_lora=256 model.kv_lora=128 model.nope_dim=64 model.rope_dim=32 "
    "model.value_dim=64 model.mlp=2048 model.expert_mlp=256 model.experts=32",
}
CALLS = ("1x32x64", "8x32x64", "1x1024x32", "8x256x32")
_COUNTS = {2: "two", 3: "three"}
# The defaults of options; each part chooses the default of any other option.
_DEFAULTS = {
    "routing": ["uniform", "zipf"],
    "passes": ["forward", "backward", "both"],
    "steps": list(STEPS),
    "dispatch": overrides.groups()["dispatch"],
    "mesh": list(MESHES),
    "layouts": list(LAYOUTS),
    "models": list(MODELS),
    "calls": list(CALLS),
    "settings": "",
    "updates": 20,
    "heads": "2x2",
    "dims": "32x32",
    "documents": 1,
    "seconds": 5.0,
    "samples": 15,
}


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} PART [KEY=VALUE ...] [OPTION ...]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure a part of moezoo next to alternatives that do the same work, alternately in one process.\n"
        "PART is one of\n\n  " + "\n  ".join(_SUMMARIES),
        epilog="docs/benchmarks.md defines every number.",
    )
    parser.add_argument("part", metavar="PART", help=argparse.SUPPRESS)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=argparse.SUPPRESS)
    titles = {
        "measured": "all parts except strategies and layouts (profile: no --dtype)",
        "kernels": "grouped_matmul, moe_layer and compile",
        "train_step": "train_step and compile",
        "strategies": "strategies",
        "layouts": "layouts and generate",
        "trained": "strategies and layouts",
        "attention": "attention",
        "generate": "generate",
        "results": "results, of all parts except compile",
    }
    sections = {name: parser.add_argument_group(title) for name, title in titles.items()}

    def add(section: str, name: str, metavar: str, text: str, **options: Any) -> None:
        sections[section].add_argument(f"--{name}", metavar=metavar, help=text, **options)

    def several(section: str, name: str, metavar: str, text: str, **options: Any) -> None:
        add(section, name, metavar, text, nargs="+", **options)

    add("measured", "dtype", "NAME", "float32 or bfloat16 (default: float32 on a CPU, otherwise bfloat16)")
    add("measured", "seconds", "S", "time per implementation and pass (default: 5); not for compile", type=float)
    add("measured", "samples", "N", "most samples per implementation and pass (default: 15); not for compile", type=int)
    several("kernels", "shapes", "NAME", f"{', '.join(SHAPES)}; or laptop, accelerator (default: for these devices)")
    several("kernels", "routing", "NAME", "uniform, zipf (default: both); not for compile")
    several("kernels", "passes", "NAME", "forward, backward, both (default: all three); not for compile")
    several("kernels", "only", "WORD", "implementations whose name contains one of these words; not for compile")
    several("train_step", "steps", "OVERRIDES", "configurations to compose (default: "
            f"{', '.join(map(repr, STEPS))}; compile: kernels instead of steps)")  # fmt: skip
    several("strategies", "dispatch", "NAME", 'strategies, with overrides if needed: "ring dispatch.chunks=2" '
            "(default: all)")  # fmt: skip
    several("strategies", "mesh", "NAME", f"meshes (default: {', '.join(MESHES)})")
    several("layouts", "layouts", "OVERRIDES", 'rules, strategy, mesh, optimizer, execution.context_parallel, '
            'execution.sequence_order: "rules=ep_as_dp dispatch=ragged mesh=ep8" (default: every rule set and every '
            'strategy, on four meshes; of generate: one device, next to transformers)')  # fmt: skip
    several("layouts", "models", "NAME", 'presets, with overrides if needed: "olmoe model.layers=2"; narrow: a narrow '
            f"deepseek_v2_lite (default: {', '.join(MODELS)}; of generate: {', '.join(GENERATED)})")  # fmt: skip
    several(
        "generate", "calls", "SHAPE", "rows x prompt tokens x new tokens of a call (default: " + ", ".join(CALLS) + ")"
    )
    add("trained", "settings", "OVERRIDES", "overrides of all configurations that are compared")
    add("trained", "updates", "N", "updates of the parameters (default: 20)", type=int)
    several("attention", "tokens", "N", "tokens per row (default: powers of 2 from 128 to 16384); a batch has one row, "
            "or as many as make 1024 tokens", type=int)  # fmt: skip
    add("attention", "heads", "KxG", "key-value heads x query heads per key-value head (default: 2x2)")
    add("attention", "dims", "HxV", "dimensions of a key x dimensions of a value (default: 32x32)")
    add("attention", "documents", "N", "documents per row (default: 1)", type=int)
    add("attention", "window", "N", "tokens that a query sees (default: all)", type=int)
    several("attention", "absent", "KIND", "compile for these devices instead of running; also for compile (default: "
            "h200 v5p; with --steps also cpu: this machine)")  # fmt: skip
    sections["results"].add_argument("--json", action="store_const", const=True, help="print only the rows, as JSON")
    add("results", "out", "FOLDER", "where rows and picture go (default: a new folder in runs/)")
    return parser


def _take(options: argparse.Namespace) -> None:
    """Refuse overrides and options of other parts, and fill in defaults."""
    taken = PARTS[options.part]
    if options.overrides and "overrides" not in taken:
        raise UserError(f"{options.overrides[0]}: {options.part} takes only --options; --help lists them")
    for name, value in vars(options).items():
        if name not in ("part", "overrides", *taken) and value is not None:
            raise UserError(f"--{name} is no option of {options.part}, which takes {_list(taken)}")
    if options.part == "compile":
        _choose_compiled(options)
    if options.part == "generate":
        options.models = options.models or list(GENERATED)
        options.layouts = options.layouts or []
    for name, default in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def _choose_compiled(options: argparse.Namespace) -> None:
    """Refuse options of kernels together with steps."""
    for name in ("shapes", "dtype"):
        if options.steps is not None and getattr(options, name) is not None:
            raise UserError(f"--{name} is for kernels and --steps for training steps; leave one of them out")
    options.steps = options.steps or []


def _list(taken: Sequence[str]) -> str:
    return " ".join("KEY=VALUE" if name == "overrides" else f"--{name}" for name in taken)


def _check(options: argparse.Namespace) -> None:
    overrides.check(options.overrides)
    _check_known("--routing", options.routing, ("uniform", "zipf"))
    _check_known("--passes", options.passes, ("forward", "backward", "both"))
    _check_known("--dtype", [options.dtype] if options.dtype else [], ("float32", "bfloat16"))
    _check_known("--shapes", options.shapes or [], (*SHAPES, "laptop", "accelerator"))
    for name in ("seconds", "samples", "updates", "documents", "window"):
        if (given := getattr(options, name)) is not None and not 0 < given < float("inf"):
            raise UserError(f"--{name} {given}: must be more than 0")
    if options.tokens and min(options.tokens) <= 0:
        raise UserError(f"--tokens {min(options.tokens)}: must be more than 0")


@contextlib.contextmanager
def _making(out: str | None) -> Iterator[None]:
    """Make the folder that results are written to; it is removed again if there are none."""
    with contextlib.ExitStack() as held:
        try:
            if out is not None:
                held.enter_context(making(Path(out)))
                if any(Path(out).iterdir()):
                    raise UserError(f"--out {out} is not empty; name a new folder")
        except FileExistsError:
            raise UserError(f"--out {out} is a file; name a new folder") from None
        except OSError as error:
            raise UserError(f"--out {out}: cannot be made ({error.strerror}); name another folder") from error
        yield


def _check_known(what: str, names: Sequence[str], valid: Collection[str]) -> None:
    for name in names:
        if name not in valid:
            raise UserError(f"{what} {name}: not known; {nearest(name, valid)}")


def _results(options: argparse.Namespace) -> Iterator[Any]:
    from moezoo.bench import parts, results
    from moezoo.bench.train_step import train_steps
    from moezoo.parallel.mesh import start

    if options.part == "train_step":
        yield from train_steps(options.steps, options.dtype, options.seconds, options.samples, _log)
        return
    on_cpu = start()[0].platform == "cpu"
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
                    f"--only {' '.join(options.only or [])}: no implementation of {options.part} has this in its name"
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
    from moezoo.bench import compiled_steps, compiling
    from moezoo.parallel.mesh import prepare

    targets, dtype = options.absent or ["h200", "v5p"], options.dtype or "bfloat16"
    if options.steps:
        compiled_steps.print_steps(list(compiled_steps.compile_steps(targets, options.steps, _log)), _console())
        return
    if compiled_steps.CPU in targets:
        raise UserError("--absent cpu: only whole steps are compiled for it; name them with --steps, or other devices")
    prepare(1)
    programs = []
    for result in compiling.compile_all(targets, _names(options, "accelerator"), dtype):
        _log(f"compiled {result.part} {result.name} for {result.target}")
        programs.append(result)
    compiling.print_compiled(programs, _console())


def _attention(options: argparse.Namespace) -> list[Any]:
    from moezoo.bench import attention
    from moezoo.parallel.mesh import start

    (kv, group), (q, v) = (_numbers(name, getattr(options, name), 2, _DEFAULTS[name]) for name in ("heads", "dims"))
    on_cpu = start()[0].platform == "cpu" and not options.absent
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    sizes = attention.Sizes(kv, group, q, v, options.documents, options.window, dtype)
    lengths = options.tokens or attention.LENGTHS
    if options.absent:
        return list(attention.compile_attention(options.absent, lengths, sizes, _log))
    return list(attention.compare_attention(lengths, sizes, options.seconds, options.samples, _log))


def _generate(options: argparse.Namespace) -> Iterator[Any]:
    from moezoo.bench.generate import Shape, compare_generation
    from moezoo.bench.serving import compare_serving

    shapes = list(dict.fromkeys(Shape(*_numbers("calls", text, 3, CALLS[0])) for text in options.calls))
    models = _models(options.models)
    for name in models:
        if other := [word for word in name.split()[1:] if not word.startswith("model.")]:
            raise UserError(f"--models {name}: {other[0]} does not belong to the model; write model.KEY=VALUE")
    if options.layouts:
        yield from compare_serving(options.layouts, models, shapes, options.seconds, options.samples, _log)
    else:
        yield from compare_generation(models, shapes, options.seconds, options.samples, _log)


def _models(names: list[str]) -> dict[str, str]:
    """Return each name with the overrides that its first word stands for."""
    if empty := [name for name in names if not name.strip()]:
        raise UserError(f"--models {empty[0]!r}: must be a model, such as {next(iter(MODELS))}")
    words = {name: name.split() for name in names}
    known = MODELS | GENERATED
    return {name: " ".join([known.get(first, first), *rest]) for name, (first, *rest) in words.items()}


def _numbers(name: str, text: str, count: int, example: str) -> list[int]:
    numbers = text.split("x")
    if len(numbers) != count or not all(n.isdecimal() and int(n) for n in numbers):
        raise UserError(f"--{name} {text}: must be {_COUNTS[count]} numbers more than 0, such as {example}")
    return [int(n) for n in numbers]


def _names(options: argparse.Namespace, otherwise: str) -> list[str]:
    words = {"laptop": list(LAPTOP), "accelerator": list(ACCELERATOR)}
    return [name for word in options.shapes or [otherwise] for name in words.get(word, [word])]


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(rows: list[Any], options: argparse.Namespace, print_table: Any, picture: Any) -> None:
    """Print rows as a table or as JSON, and write them and a picture to a folder."""
    from moezoo.bench import results

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
    _log(f"wrote {folder}/rows.json and {folder}/speed.png")


class _Bench(Command):
    """Unlike the other commands it takes --flags, because they select what is measured and printed."""

    def check(self, arguments: Sequence[str], prog: str) -> None:
        """Refuse unknown parts and options, and values that no part accepts."""
        self._parse(arguments, prog)

    def _parse(self, arguments: Sequence[str], prog: str) -> argparse.Namespace:
        options = make_parser(prog).parse_intermixed_args(arguments)
        _check_known("part", [options.part], PARTS)
        _take(options)
        _check(options)
        return options

    def call(self, arguments: Sequence[str], prog: str) -> None:
        """Run the part that the first argument names."""
        options = self._parse(arguments, prog)
        with _making(options.out or None):
            self._measure(options)

    def _measure(self, options: argparse.Namespace) -> None:
        from moezoo.bench import attention, generate, layouts, profile, results, serving, strategies

        if options.part == "compile":
            _compile(options)
        elif options.part == "attention":
            rows = _attention(options)
            if not options.absent:
                _report(rows, options, attention.print_table, attention.picture)
            elif options.json:
                print(results.to_json(rows))
            else:
                attention.print_table(rows, _console())
        elif options.part == "profile":
            rows = profile.profile_step(options.overrides, options.seconds, options.samples, _log)
            _report(rows, options, profile.print_table, profile.picture)
        elif options.part == "strategies":
            rows = strategies.compare_strategies(
                options.dispatch, options.mesh, options.settings, options.updates, _log
            )
            _report(rows, options, strategies.print_table, strategies.picture)
        elif options.part == "generate":
            how: Any = serving if options.layouts else generate
            _report(list(_generate(options)), options, how.print_table, how.picture)
        elif options.part == "layouts":
            models = _models(options.models)
            rows = layouts.compare_layouts(options.layouts, models, options.settings, options.updates, _log)
            _report(rows, options, layouts.print_table, layouts.picture)
        else:
            _report(list(_results(options)), options, results.print_table, results.picture)


COMMAND = _Bench("bench", "measure a part of moezoo next to its alternatives")
