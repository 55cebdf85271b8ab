"""Memory of whole training steps that are compiled and not run, for the CPU or for absent devices.

Columns: target; step (the overrides that compose it); MB on one device: arguments, temporaries, and the peak, which
also has results that are not stored in arguments; MB received per step, by the traced step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.bench.candidates import peak_bytes
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.parallel.absent import absent_devices
from moezoo.parallel.mesh import mesh_of, start
from moezoo.parallel.traces import collective_traffic
from moezoo.training.build import build_step

# The target that is this machine: its virtual CPU devices.
CPU = "cpu"


class CompiledStep(NamedTuple):
    """Bytes of a compiled training step on one device; `received` is what collectives bring to it in a step."""

    target: str
    words: str
    arguments: int
    temporaries: int
    peak: int
    received: int


def compile_steps(targets: Sequence[str], steps: Sequence[str], log: Callable[[str], None]) -> Iterator[CompiledStep]:
    """Compile each of `steps`, overrides of a configuration, for each of `targets`.

    Args:
        targets: `cpu`, or names of `moezoo.parallel.absent`, which has eight devices of each.
        steps: Overrides of `moezoo.compose`.
        log: Receives progress lines.

    Raises:
        UserError: The words do not compose or fit together, or a target is unknown. Nothing has been compiled then.
    """
    configs = {words: compose(*words.split()) for words in steps}
    devices = start(max(cfg.mesh.devices for cfg in configs.values()))
    there = {target: devices if target == CPU else absent_devices(target) for target in targets}
    built = {
        (target, words): build_step(cfg, build_execution(cfg, mesh_of(cfg.mesh, there[target])))
        for target in targets
        for words, cfg in configs.items()
    }
    for (target, words), step in built.items():
        log(f"compiling {words} for {target}")
        compiled = step.compile()
        memory, peak = compiled.memory_analysis(), peak_bytes(compiled)
        assert memory is not None
        assert peak is not None
        received = collective_traffic(step.traced.jaxpr).bytes
        yield CompiledStep(target, words, memory.argument_size_in_bytes, memory.temp_size_in_bytes, peak, received)


def print_steps(results: Sequence[CompiledStep], console: Console) -> None:
    """Print one row per step."""
    table = Table(
        *("target", "step", "arguments", "temporaries", "peak", "received"),
        title="compiled, not run; MB on one device",
        box=box.SIMPLE,
    )
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for result in results:
        table.add_row(result.target, result.words, *(f"{number / 1e6:,.1f}" for number in result[2:]))
    console.print(table)
