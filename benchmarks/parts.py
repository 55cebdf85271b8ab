"""The parts of the benchmarks by name, and the keys of each.

Only `_run` and `_configure` import JAX, so a mistyped word is answered quickly.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks import device, results
from benchmarks.shapes import ACCELERATOR, LAPTOP, SHAPES
from moezoo.cli.command import Command, ConfiguredCommand, KeysCommand
from moezoo.config import overrides
from moezoo.config.options import key, take
from moezoo.errors import UserError, nearest
from moezoo.host.files import locking
from moezoo.tools.commands import choose
from moezoo.typed import Positive, Size, show

# A training step in one word each: overrides of `moezoo.compose`.
STEPS = ("mesh=single dispatch=ring", "mesh=ep8 dispatch=ring", "mesh=ep8 dispatch=gather", "mesh=fsdp8 dispatch=ring")
MESHES = ("single", "fsdp8", "ep8", "fsdp2_ep4", "fsdp4_ep2")
# The first layout on a mesh is the reference of the others there. `pure_fsdp` names no expert axis, `cp_as_ep` differs
# from `fsdp_ep` only where there is a context axis, and only `tensor` names that axis; `serve` is not for training.
LAYOUTS = (
    *(f"rules=fsdp_ep dispatch={name} mesh=fsdp2_ep4" for name in ("ring", "dense", "capacity", "gather", "ragged")),
    *(f"rules={name} dispatch=ring mesh=fsdp2_ep4" for name in ("shard_exp_on_fsdp", "ep_as_cp", "ep_as_dp")),
    *(f"rules={name} dispatch=ring mesh=fsdp8" for name in ("fsdp_ep", "pure_fsdp")),
    *(f"rules={name} dispatch=ring mesh.fsdp=2 mesh.expert=2 mesh.context=2" for name in ("fsdp_ep", "cp_as_ep")),
    "rules=tensor dispatch=ring mesh.fsdp=2 mesh.expert=2 mesh.tensor=2",
    "rules=fsdp_ep dispatch=ring mesh.stage=2 mesh.fsdp=2 mesh.expert=2",
    "rules=fsdp_ep dispatch=ring mesh.stage=2 mesh.fsdp=2 mesh.expert=2 execution.pipeline.gather=tick",
)
# DeepSeek-V2-Lite with its router, experts, experts per token and shared experts; 3 layers, and narrow (most by 16).
NARROW = (
    "deepseek_v2_lite model.vocab=256 model.embed=128 model.layers=3 model.heads=4 model.kv_lora=32 model.nope_dim=32 "
    "model.rope_dim=16 model.value_dim=32 model.mlp=684 model.expert_mlp=88 model.init_std=0.02 execution.dtype=float32"
)
# Models of about 100 million parameters, for `generate`.
_WIDE = "model.vocab=8192 model.embed=512 model.layers=8 model.heads=8 model.max_length=4096"
GENERATED = {
    "mixtral_115m": f"mixtral {_WIDE} model.kv_heads=4 model.head_dim=64 model.expert_mlp=1024",
    "deepseek_109m": f"deepseek {_WIDE} model.q_lora=256 model.kv_lora=128 model.nope_dim=64 model.rope_dim=32 "
    "model.value_dim=64 model.mlp=2048 model.expert_mlp=256 model.experts=32",
}
# Training steps that transformers makes too: overrides of `moezoo.compose`. With this seed no token's choice of experts
# is nearly a tie in the first steps, which would move the loss by more than rounding.
_TRAINED = "seed=1 model.init_std=0.02 batch_size=4 seq_len=256 execution.remat=none optimizer.learning_rate=3e-4"
_WIDE_GROUPED = f"{_WIDE} model.kv_heads=4 model.head_dim=64"
PEER_STEPS = {
    "mixtral_115m": f"model={GENERATED['mixtral_115m']} {_TRAINED}",
    "qwen3_90m": f"model=qwen3_moe {_WIDE_GROUPED} model.experts=32 model.experts_per_token=8 model.expert_mlp=192 "
    f"{_TRAINED}",
    "gpt_oss_116m": f"model=gpt_oss {_WIDE_GROUPED} model.experts=8 model.experts_per_token=2 model.expert_mlp=1024 "
    f"model.window=128 {_TRAINED}",
}
# Names of models that stand for a preset with overrides; any other name is that of a preset.
MODELS = {"narrow": NARROW, **GENERATED}
CALLS = ("1x32x64", "8x32x64", "1x1024x32", "8x256x32")

# Keys that name what is compared, and what an entry of theirs may set: with other words, results would not compare.
_COMPARED = ("mesh", "dispatch", "layout")
_LAYOUT = ("mesh", "rules", "dispatch", "optimizer")
_LAYOUT += ("execution.context_parallel", "execution.sequence_order", "execution.pipeline")


def _numbers(key: str, text: str, example: str) -> list[int]:
    """Return the three numbers of the value of a key."""
    if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){2}", text):
        raise UserError(f"{key}={show(text)}: must be three numbers more than 0, such as {example}")
    return [int(number) for number in text.split("x")]


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of every part."""

    json: bool = key("print only the rows, as JSON", default=False)
    out: str | None = key("a new folder for the rows and the picture, by default one in runs/", "FOLDER", default=None)

    def __post_init__(self):
        for name, entry in [(each, entry) for each in _COMPARED for entry in getattr(self, each, ())]:
            for word in (setting.partition("=")[0] for setting in entry.split() if "=" in setting):
                if not f"{word}.".startswith(tuple(f"{part}." for part in _LAYOUT)):
                    own = f"a layout sets only {', '.join(_LAYOUT)}"
                    raise UserError(f"{name}={show(entry)}: {word} must be the same for all; {own}")


@dataclasses.dataclass(frozen=True)
class Timed(Keys):
    """Keys of parts that time calls."""

    seconds: Positive = key("time per implementation and pass", default=5.0)
    samples: Size = key("most samples per implementation and pass", default=15)


@dataclasses.dataclass(frozen=True)
class Typed(Keys):
    """Keys of parts that compute in a dtype."""

    dtype: Literal["float32", "bfloat16"] | None = key(
        "float32 or bfloat16, by default float32 on a CPU and otherwise bfloat16; of train_step as configured",
        "NAME",
        default=None,
    )


@dataclasses.dataclass(frozen=True)
class WithShapes(Typed):
    """Keys of parts that measure kernels of the sizes in `benchmarks.shapes`."""

    shape: tuple[str, ...] = key(
        f"{', '.join(SHAPES)}; or laptop, accelerator; by default for these devices", "NAME", default=()
    )

    def shapes(self, otherwise: str) -> list[str]:
        """Return the names of all shapes; of `otherwise` where none is named."""
        words = {name: [name] for name in SHAPES} | {"laptop": list(LAPTOP), "accelerator": list(ACCELERATOR)}
        for name in self.shape:
            if name not in words:
                raise UserError(f"shape={show(name)}: not known; {nearest(name, words)}")
        return [name for word in self.shape or [otherwise] for name in words[word]]


@dataclasses.dataclass(frozen=True)
class Kernel(WithShapes, Timed):
    """Keys of `grouped_matmul` and `moe_layer`."""

    routing: tuple[Literal["uniform", "zipf"], ...] = key(
        "how tokens choose experts; by default both", "uniform|zipf", default=("uniform", "zipf")
    )
    passes: tuple[Literal["forward", "backward", "both"], ...] = key(
        "passes; by default all three", "forward|backward|both", default=("forward", "backward", "both")
    )
    only: tuple[str, ...] = key("implementations whose name contains one of these words", "WORD", default=())


@dataclasses.dataclass(frozen=True)
class Step(Typed, Timed):
    """Keys of `train_step`."""

    step: tuple[str, ...] = key(
        f"a configuration, or one of {', '.join(PEER_STEPS)} with overrides; by default {STEPS}, and with peer= those "
        "with a name",
        '"KEY=VALUE ..."',
        default=(),
    )
    peer: Literal["transformers"] | None = key(
        "the same steps in this program too, in turns of processes that stay; samples= is the number of turns",
        "transformers",
        default=None,
    )
    turn: Size = key("with peer=: steps of a turn", default=2)
    adamw: Literal["fused", "plain"] = key("with peer=: PyTorch's AdamW", "fused|plain", default="fused")

    def __post_init__(self):
        super().__post_init__()
        for name in ("dtype", "seconds") if self.peer else ("turn", "adamw"):
            if getattr(self, name) != next(field.default for field in dataclasses.fields(self) if field.name == name):
                why = "compares turns in float32; choose turn= and samples=" if self.peer else "is not given"
                raise UserError(f"{name}={getattr(self, name)}: peer= {why}")

    @property
    def steps(self) -> dict[str, list[str]]:
        """Each configuration's name with its overrides."""
        found = {}
        for name in self.step or (PEER_STEPS if self.peer else STEPS):
            first, *rest = name.split() or [""]
            if "=" not in first and first not in PEER_STEPS:
                raise UserError(f"step={show(name)}: not known; {nearest(first, PEER_STEPS)}, or write KEY=VALUE")
            found[name] = [*PEER_STEPS.get(first, first).split(), *rest]
        return found


@dataclasses.dataclass(frozen=True)
class Strategies(Keys):
    """Keys of `strategies`."""

    dispatch: tuple[str, ...] = key(
        'a strategy, with overrides if needed: dispatch="ring dispatch.chunks=2"; by default all',
        "NAME",
        default=tuple(overrides.groups()["dispatch"]),
    )
    mesh: tuple[str, ...] = key(f"a mesh; by default {', '.join(MESHES)}", "NAME", default=MESHES)
    updates: Size = key("updates of the parameters", default=20)


class WithModels:
    """What parts have that compare layouts of models."""

    model: tuple[str, ...]

    @property
    def models(self) -> dict[str, str]:
        """Each name with the overrides that its first word stands for."""
        if empty := [name for name in self.model if not name.strip()]:
            raise UserError(f"model={empty[0]!r}: must be a model, such as mixtral")
        words = {name: name.split() for name in self.model}
        return {name: " ".join([MODELS.get(first, first), *rest]) for name, (first, *rest) in words.items()}


@dataclasses.dataclass(frozen=True)
class Layouts(WithModels, Keys):
    """Keys of `layouts`."""

    model: tuple[str, ...] = key(
        'a preset, with overrides if needed: model="olmoe model.layers=2"; narrow is a narrow deepseek_v2_lite; '
        "by default mixtral, deepseek and narrow",
        "NAME",
        default=("mixtral", "deepseek", "narrow"),
    )
    layout: tuple[str, ...] = key(
        "rules, strategy, mesh, optimizer, execution.context_parallel, execution.sequence_order; by default every rule "
        "set and every strategy, on four meshes",
        '"KEY=VALUE ..."',
        default=LAYOUTS,
    )
    updates: Size = key("updates of the parameters", default=20)


@dataclasses.dataclass(frozen=True)
class Generate(WithModels, Timed):
    """Keys of `generate`."""

    model: tuple[str, ...] = key(
        f"a preset, with overrides if needed; by default {', '.join(GENERATED)}", "NAME", default=tuple(GENERATED)
    )
    call: tuple[str, ...] = key(
        f"rows x prompt tokens x new tokens; by default {', '.join(CALLS)}", "RxPxN", default=CALLS
    )
    layout: tuple[str, ...] = key(
        "compare these layouts; by default one device, next to transformers", '"KEY=VALUE ..."', default=()
    )
    dtype: Literal["float32", "bfloat16"] | None = key(
        "with layout=: what layers compute in, by default as configured", "NAME", default=None
    )

    def __post_init__(self):
        super().__post_init__()
        if self.dtype and not self.layout:
            raise UserError("dtype= is for layouts, which transformers is not compared with; name them with layout=")

    @property
    def calls(self) -> list[list[int]]:
        """The numbers of each call. Raises `UserError` also for words that are not of the model."""
        for name in self.model:
            if other := [word for word in name.split()[1:] if not word.startswith("model.")]:
                raise UserError(f"model={name}: {other[0]} does not belong to the model; write model.KEY=VALUE")
        return [_numbers("call", text, CALLS[0]) for text in dict.fromkeys(self.call)]


@dataclasses.dataclass(frozen=True)
class Load(Keys):
    """Keys of `load`."""

    gb: tuple[Positive, ...] = key("about the GB of a folder; by default 0.3, 1 and 3", "GB", default=(0.3, 1.0, 3.0))
    layout: tuple[str, ...] = key("a layout; by default one device", '"KEY=VALUE ..."', default=("mesh=single",))
    samples: Size = key("loads of each", default=3)
    folder: str | None = key("a new folder that keeps the models, by default none", "FOLDER", default=None)


@dataclasses.dataclass(frozen=True)
class FewBits(Timed):
    """Keys of `few_bits`."""

    format: tuple[Literal["fp8", "mxfp4"], ...] = key("formats; by default both", "NAME", default=("fp8", "mxfp4"))
    prompt: Size = key("tokens of the prompt", default=32)
    new: Size = key("tokens that are added", default=32)


@dataclasses.dataclass(frozen=True)
class Data(Keys):
    """Keys of `data`."""

    gb: Positive = key("the GB of text", "GB", default=1.0)
    tokenizer: str | None = key("a Hugging Face tokenizer.json, by default none: bytes", "FILE", default=None)
    folder: str | None = key("where the corpus and its cache are for a while, by default /tmp", "FOLDER", default=None)


@dataclasses.dataclass(frozen=True)
class Attention(Typed, Timed):
    """Keys of `attention`."""

    tokens: tuple[Size, ...] = key(
        "tokens per row, by default powers of 2 from 128 to 16384; a batch has one row, or as many as make 1024 tokens",
        "N",
        default=(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    )
    kv_heads: Size = key("key-value heads", default=2)
    group: Size = key("query heads per key-value head", default=2)
    head_dim: Size = key("dimensions of a key", default=32)
    value_dim: Size = key("dimensions of a value", default=32)
    documents: Size = key("documents per row", default=1)
    window: Size | None = key("tokens that a query sees, by default all", "N", default=None)
    absent: tuple[str, ...] = key("compile for these devices instead of running", "NAME", default=())


@dataclasses.dataclass(frozen=True)
class DeltaRule(Typed, Timed):
    """Keys of `delta_rule`."""

    tokens: tuple[Size, ...] = key(
        "tokens of the row, by default powers of 2 from 1024 to 32768",
        "N",
        default=(1024, 2048, 4096, 8192, 16384, 32768),
    )
    key_heads: Size = key("key heads", default=2)
    group: Size = key("value heads per key head", default=2)
    head_dim: Size = key("dimensions of a key and of a value", default=64)
    attention: str | None = key(
        "key-value heads x query heads of each x dimensions of attention, by default those of the rule",
        "HxGxD",
        default=None,
    )
    absent: tuple[str, ...] = key("compile for these devices instead of running", "NAME", default=())

    def __post_init__(self):
        super().__post_init__()
        if self.attention is not None:
            _numbers("attention", self.attention, "2x8x256")

    @property
    def attention_heads(self) -> list[int] | None:
        """The numbers of `attention`."""
        return None if self.attention is None else _numbers("attention", self.attention, "2x8x256")


@dataclasses.dataclass(frozen=True)
class Compile(WithShapes):
    """Keys of `compile`."""

    step: tuple[str, ...] = key("compile training steps instead of kernels", '"KEY=VALUE ..."', default=())
    absent: tuple[str, ...] = key(
        "devices, by default h200 and v5p, eight each; v5p:4x4x4 is a slice, h200:8x8 nodes; with step= also cpu: this "
        "machine",
        "NAME",
        default=("h200", "v5p"),
    )
    format: Literal["fp8", "mxfp4", "int4"] | None = key(
        "with step=: what released folders store in few bits is stored so, and not trained", default=None
    )

    def __post_init__(self):
        for name in ("shape", "dtype"):
            if self.step and getattr(self, name):
                raise UserError(f"{name}= is for kernels and step= for training steps; leave one of them out")
        if self.format and not self.step:
            raise UserError("format= is for training steps; name them with step=")


@dataclasses.dataclass(frozen=True)
class Device(Keys):
    """Keys of `device`."""

    only: tuple[str, ...] = key(f"parts, of {', '.join(device.NAMES)}; by default all but tune", "NAME", default=())
    resume: str | None = key(
        "the folder of an earlier call on this kind of device: what is measured there stays", "FOLDER", default=None
    )
    seconds: Positive = key("time for all parts together", default=600.0)
    each: Positive = key("time per implementation and pass", default=0.25)
    samples: Size = key("most samples per implementation and pass", default=9)
    tune: bool = key("measure sizes of blocks on this GPU, and write the table that backends read", default=False)
    rehearse: Literal["gpu", "tpu"] | None = key(
        "go through all parts on a CPU, as a toy, and interpret the kernels for a GPU or a TPU", default=None
    )
    kernels: tuple[str, ...] = key(
        "Python modules that register more backends, which join all parts", "MODULE", default=()
    )

    def __post_init__(self):
        super().__post_init__()
        if wrong := [name for name in self.only if name not in device.NAMES]:
            raise UserError(f"only={wrong[0]}: no such part; {nearest(wrong[0], device.NAMES)}")
        if "tune" in self.only and not self.tune:
            raise UserError("only=tune: add tune=true, which replaces the table that backends read")

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts to measure."""
        return (*(self.only or (name for name in device.NAMES if name != "tune")), *("tune",) * self.tune)


def _run(part: str, kind: type[Keys], arguments: Sequence[str]) -> None:
    taken = take(kind, arguments)
    keys: Any = taken.options
    if part == "device":
        return _measure_device(keys)
    with results.new_folder(keys.out):
        from benchmarks import (
            attention,
            compiled,
            data,
            delta_rule,
            few_bits,
            generate,
            kernels,
            layouts,
            load,
            profile,
            strategies,
            train_peer,
            train_step,
        )

        runs = {
            "grouped_matmul": lambda: kernels.run(part, keys),
            "moe_layer": lambda: kernels.run(part, keys),
            "attention": lambda: attention.run(keys),
            "delta_rule": lambda: delta_rule.run(keys),
            "train_step": lambda: (train_peer if keys.peer else train_step).run(keys),
            "profile": lambda: profile.run(keys, taken.rest),
            "strategies": lambda: strategies.run(keys, taken.rest),
            "layouts": lambda: layouts.run(keys, taken.rest),
            "generate": lambda: generate.run(keys),
            "load": lambda: load.run(keys),
            "few_bits": lambda: few_bits.run(keys),
            "data": lambda: data.run(keys),
            "compile": lambda: compiled.run(keys),
        }
        results.show(part, runs[part](), keys.json, keys.out)


def _measure_device(keys: Device) -> None:
    """Its rows are printed one by one, and its folder is there from the start; without `out=` `resume=` goes on."""
    if keys.resume is not None and not Path(keys.resume, device.ROWS).is_file():
        raise UserError(f"resume={keys.resume}: {device.ROWS} is not there; name the folder of an earlier call")
    with results.new_folder(keys.out):
        folder = Path(keys.resume) if keys.resume and keys.out is None else results.folder_of("device", keys.out)
        with locking(folder.resolve(), f"another call measures into {folder}; wait for it, or name another folder"):
            found = device.run(keys, folder)
            if not keys.json:
                results.print_tables(found.tables)
            results.write(found, folder)
            device.check(found.rows, folder)


def _configure(kind: type[Keys], *arguments: str) -> Any:
    from moezoo.config.compose import compose

    return compose(*take(kind, arguments).rest)


def _part(name: str, kind: type[Keys], summary: str, *examples: str) -> Command:
    task: Any = partial(_run, name, kind)
    where = ", alternately in one process"
    if name in ("load", "data", "device"):
        where = ", each part in a process of its own" if name == "device" else ", each time in a process of its own"
    description = f"Measure {summary}{where}.\nA key with several values is given once for each. "
    description += "docs/benchmarks.md defines every number."
    if name not in ("profile", "strategies", "layouts"):
        return KeysCommand(name, summary, task, description, kind, examples)
    # Arguments that are no keys of the part configure a training run.
    configure = partial(_configure, kind)
    return ConfiguredCommand(name, summary, task, description, kind, configure=configure, examples=examples)


_STEPS = 'step="mesh=ep8" step="mesh=ep8 dispatch=gather"'
_STRATEGIES = 'mesh=ep8 mesh=fsdp2_ep4 dispatch=ring dispatch="ragged dispatch.chunks=2" model=deepseek'
_LAYOUTS = 'layout="rules=fsdp_ep mesh=ep8" layout="rules=ep_as_cp mesh=ep8" model=olmoe batch_size=16'
_SERVED = 'model=mixtral layout="mesh=fsdp2_ep4" layout="rules=serve mesh.expert=4 mesh.tensor=2"'
_PARTS = (
    _part("grouped_matmul", Kernel, "a grouped product, in all backends and alternatives", "shape=e8k2 passes=forward"),
    _part("moe_layer", Kernel, "a layer of experts with its router", "shape=e8k2 shape=e32k4 only=moezoo json=true"),
    _part("train_step", Step, "whole training steps", _STEPS, "peer=transformers step=mixtral_115m"),
    _part("profile", Timed, "where the time of a training step goes", "model=deepseek mesh=ep8"),
    _part("strategies", Strategies, "a run's first updates, by every dispatch strategy on several meshes", _STRATEGIES),
    _part("layouts", Layouts, "a run's first updates, under every rule set and by every dispatch strategy", _LAYOUTS),
    _part(
        "attention",
        Attention,
        "backends of attention by length: time and temporary memory",
        "tokens=128 tokens=1024 kv_heads=8 group=1",
        "absent=h200 absent=v5p tokens=2048 head_dim=128 value_dim=128",
    ),
    _part(
        "delta_rule",
        DeltaRule,
        "the gated delta rule by length, beside attention of equal width: time and temporary memory",
        "tokens=1024 tokens=4096",
        "absent=h200 absent=v5p tokens=4096 key_heads=16 head_dim=128",
    ),
    _part("generate", Generate, "generation next to transformers, or under several layouts", "call=8x32x64", _SERVED),
    _part("load", Load, "loading a Hugging Face folder: time and memory", "gb=1 layout=mesh=single layout=mesh=ep8"),
    _part("few_bits", FewBits, "weights of few bits, kept or widened: memory, loading and generation", "format=fp8"),
    _part("data", Data, "training on files of text, before and after they are in the cache", "gb=0.1"),
    _part(
        "compile",
        Compile,
        "the memory of kernels or training steps that are compiled, also for devices that this machine does not have",
        "shape=L1 absent=h200",
        'absent=cpu step="model=mixtral mesh.context=8 seq_len=8192 batch_size=1"',
    ),
    _part(
        "device",
        Device,
        "one GPU or TPU in ten minutes: which kernels are right, how fast they are, and whole training steps",
        "out=runs/h100",
        "resume=runs/h100 only=layers only=step",
        "rehearse=tpu only=right seconds=60",
    ),
)
PARTS = {part.name: part for part in _PARTS}


def main() -> None:
    """Run the part that the first argument names, or list all parts."""
    choose(PARTS, f"python {sys.argv[0]}", "part")
