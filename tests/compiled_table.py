"""Print the table of docs/proven.md: bytes that a device receives in a step as traced, and as compilers make it.

python tests/compiled_table.py        # with the extra `plan`
"""

import jax
from compiled import budget_of

import moezoo
from moezoo.config.build import build_execution
from moezoo.parallel.mesh import mesh_of
from moezoo.tools.absent import absent_devices
from moezoo.training.build import build_step

SIZES = ("model.embed=128", "model.expert_mlp=128", "batch_size=16", "seq_len=128", "mesh.fsdp=2", "mesh.expert=4")
STEPS = {
    "Mixtral, `fsdp_ep`": ("model=mixtral", "model.layers=2", "rules=fsdp_ep"),
    "DeepSeek, `shard_exp_on_fsdp`": ("model=deepseek", "model.layers=3", "rules=shard_exp_on_fsdp"),
}


def main() -> None:
    """Compile each step for CPUs, H200 and v5p, and print a row for each set of mesh axes."""
    jax.config.update("jax_num_cpu_devices", 8)
    print("| step | axes | traced | CPU | H200 | v5p |\n|---|---|---|---|---|---|")
    for title, words in STEPS.items():
        cfg = moezoo.compose(*words, "dispatch=ring", *SIZES)
        budgets = []
        for devices in (jax.devices("cpu"), absent_devices("h200"), absent_devices("v5p")):
            step = build_step(cfg, build_execution(cfg, mesh_of(cfg.mesh, devices)))
            budgets.append(budget_of(step, step.compile().program))
        tables = (budgets[0].trace, *(budget.program for budget in budgets))
        for axes in budgets[0].trace.axes:
            print(f"| {title} | `{' '.join(axes)}` |", " | ".join(f"{table.bytes(axes):,}" for table in tables), "|")
            title = ""


if __name__ == "__main__":
    main()
