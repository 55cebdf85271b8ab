"""What kernels for NVIDIA's tensor cores take of a multiprocessor, as their assembler reports it."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moezoo.tools.absent import GPUS

# A multiprocessor of compute capability 9.0 and 10.0, and what it takes of shared memory for itself per block.
_REGISTERS, _THREADS, _BLOCKS, _OWN = 65536, 2048, 32, 1024
_KEYS = ("PTX", "PTXAS", "TO")


class Resources(NamedTuple):
    """What a block of a kernel takes, and how many blocks a multiprocessor holds.

    Attributes:
        kernel: The kernel's name.
        threads: Threads of a block.
        registers: Registers per thread.
        spilled: Bytes per thread that did not fit in registers, stored and loaded.
        shared: Bytes of shared memory, without barriers.
        blocks: Blocks that a multiprocessor holds.
        assembly: The kernel in PTX.
    """

    kernel: str
    threads: int
    registers: int
    spilled: int
    shared: int
    blocks: int
    assembly: str


@contextlib.contextmanager
def compiled_kernels(kind: str) -> Iterator[list[Resources]]:
    """Collect, in the list that it yields, the kernels that are compiled meanwhile, at its end.

    A process compiles equal kernels once.

    Args:
        kind: The kind of GPU that they are compiled for, a name in `moezoo.tools.absent`.
    """
    found: list[Resources] = []
    before = {key: os.environ.get(f"MOSAIC_GPU_DUMP_{key}") for key in _KEYS}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({f"MOSAIC_GPU_DUMP_{key}": folder if key == "TO" else "1" for key in _KEYS})
        try:
            yield found
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[f"MOSAIC_GPU_DUMP_{key}"]
                else:
                    os.environ[f"MOSAIC_GPU_DUMP_{key}"] = value
        texts = sorted(Path(folder).glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2]))
        found += [_read(path, GPUS[kind.partition(":")[0]][5]) for path in texts]


def _read(path: Path, of_multiprocessor: int) -> Resources:
    report, assembly = path.read_text(), path.with_suffix(".ptx").read_text()

    def number(pattern: str, text: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    threads, registers = number(r"\.maxntid (\d+)", assembly), number(r"Used (\d+) registers", report)
    # Barriers lie behind all tiles.
    barriers = re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", assembly)
    shared = min(number(rf"add\.s32\s+{barrier}, %r\d+, (\d+);", assembly) for barrier in barriers)
    fit = of_multiprocessor // (shared + _OWN), _REGISTERS // (threads * -(-registers // 8) * 8), _THREADS // threads
    spilled = number(r"(\d+) bytes spill", report)
    return Resources(path.stem, threads, registers, spilled, shared, min(_BLOCKS, *fit), assembly)
