"""The layouts whose description is tracked in `goldens/`: laptop presets, every rule set, two meshes.

`python tests/analysis/golden_layouts.py` rewrites the files.
"""

from pathlib import Path

import moezoo
from moezoo.analysis.sharding import describe
from moezoo.cli.sharding_text import describe_run, render
from moezoo.config.overrides import groups

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
# File name -> overrides.
LAYOUTS: dict[str, str] = {
    f"{model}-{rules}-{number}.txt": f"model={model} {mesh} rules={rules}"
    for model in MODELS
    for rules in groups()["rules"]
    for number, mesh in enumerate(_MESHES.get(rules, ("mesh=fsdp2_ep4", _CONTEXT)), 1)
}


def describe_layout(overrides: str) -> str:
    """Return what `moezoo sharding` prints for these overrides."""
    cfg = moezoo.compose(*overrides.split())
    return f"moezoo sharding {overrides}\n\n{render(describe_run(cfg, 'train'), describe(cfg))}\n"


if __name__ == "__main__":
    for name, overrides in LAYOUTS.items():
        (FOLDER / name).write_text(describe_layout(overrides))
