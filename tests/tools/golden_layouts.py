"""The layouts whose description is tracked in `goldens/`: two laptop presets, every rule set, two meshes of each.

Of `serve`, the two programs of generation: it reads one long prompt, and a token of eight rows. With pipeline stages, a
step whose stages store their layers, and an evaluation whose layers move to their stages, some of them outside.

`python tests/tools/golden_layouts.py` rewrites the files.
"""

from pathlib import Path

import moezoo
from moezoo.config.overrides import groups
from moezoo.parallel.traffic import CallName
from moezoo.tools.sharding.describe import describe
from moezoo.tools.sharding.text import describe_run, render
from moezoo.typed import convert

FOLDER = Path(__file__).parent / "goldens"
MODELS = ("mixtral", "deepseek")
# Rules that do not name the axis `context` have `data` in its place; `pure_fsdp` names only `fsdp`.
_CONTEXT, _DATA = "mesh.fsdp=2 mesh.expert=2 mesh.context=2", "mesh.fsdp=2 mesh.expert=2 mesh.data=2"
_MESHES = {
    "pure_fsdp": ("mesh=fsdp8", "mesh.fsdp=2"),
    "ep_as_cp": ("mesh=fsdp2_ep4", _DATA),
    "ep_as_dp": ("mesh=fsdp2_ep4", _DATA),
    "tensor": ("mesh.fsdp=2 mesh.expert=2 mesh.tensor=2", "mesh.context=2 mesh.tensor=4"),
}
_SERVED = "rules=serve mesh.data=2 mesh.expert=2 mesh.tensor=2"
_CALLS = (("decode", "batch_size=8 seq_len=256"), ("prefill", "batch_size=1 seq_len=2048"))
# File name -> the arguments of `moezoo sharding`. Each model is under every rule set, and every mesh has one of the
# models, in turn: the meshes of a rule set and the two models are independent.
LAYOUTS: dict[str, str] = {}
for place, rules in enumerate(name for name in groups()["rules"] if name != "serve"):
    for number, mesh in enumerate(_MESHES.get(rules, ("mesh=fsdp2_ep4", _CONTEXT)), 1):
        model = MODELS[(place + number) % 2]
        LAYOUTS[f"{model}-{rules}-{number}.txt"] = f"model={model} {mesh} rules={rules}"
_STAGES = "mesh.stage=2 mesh.fsdp=2 mesh.expert=2 batch_size=32 seq_len=64 execution.pipeline.microbatches=4"
LAYOUTS["mixtral-stages-once.txt"] = f"model=mixtral {_STAGES}"
_APART = "model=deepseek model.layers=6 execution.pipeline.chunks=2 execution.pipeline.gather=tick"
LAYOUTS["deepseek-stages-evaluate.txt"] = f"{_APART} {_STAGES} --call=evaluate"
for model, (call, sizes) in zip(MODELS, _CALLS, strict=True):
    LAYOUTS[f"{model}-serve-{call}.txt"] = f"model={model} {_SERVED} {sizes} --call={call}"


def describe_layout(arguments: str) -> str:
    """Return what `moezoo sharding` prints for these arguments."""
    overrides, _, call = arguments.partition(" --call=")
    cfg, name = moezoo.compose(*overrides.split()), convert(CallName, call or "train", "call")
    return f"moezoo sharding {arguments}\n\n{render(describe_run(cfg, name), describe(cfg, name))}\n"


if __name__ == "__main__":
    for name, overrides in LAYOUTS.items():
        (FOLDER / name).write_text(describe_layout(overrides))
