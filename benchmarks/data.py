"""`data`: a run's first 20 steps on a JSONL corpus that is tokenized first, then on the same from the cache.

Measures: seconds and CPU seconds from the start of the command to the end of step 1, and its peak of memory.
Against: the same command on a corpus of one small file, run before, so that programs are compiled.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import moezoo.interrupts as interrupts
from benchmarks.results import Column, Report, Row, Table, log
from moezoo.data import PythonStdlib
from moezoo.data.tokenizer import text_tokenizer
from moezoo.errors import UserError

_STEPS = 20
_FILES = 8
_LENGTH = 2000  # bytes of a document, on average


def run(keys: Any) -> Report:
    """Write the corpora, and train on each in a process of its own. Raises `UserError` if the disk has no room."""
    if not Path("/proc/self/status").exists():
        raise UserError("data reads the memory of a process from /proc/PID/status, which only Linux has")
    coder = text_tokenizer(keys.tokenizer, key="tokenizer")
    with (
        tempfile.TemporaryDirectory(dir=keys.folder) as temporary,
        interrupts.undoing(partial(shutil.rmtree, temporary, ignore_errors=True)),
    ):
        folder = Path(temporary)
        needed, free = int(3e9 * keys.gb), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(f"gb={keys.gb:g} needs {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} free")
        log(f"writing {keys.gb:g} GB in {folder}")
        write_corpus(folder / "small", 10**6)
        size = write_corpus(folder / "large", int(1e9 * keys.gb))
        words = [f"model.vocab={max(coder.vocab, 256)}", f"cache_dir={folder}/programs", f"data.cache={folder}/ids"]
        words += [] if keys.tokenizer is None else [f"data.tokenizer={keys.tokenizer}"]
        rows: list[Row] = []
        for name, corpus in (("compile", "small"), ("empty", "small"), ("cold", "large"), ("warm", "large")):
            log(f"train: {name}")
            figures = _train(f"data.path={folder / corpus}", f"run_dir={folder / name}", *words)
            rows.append({"run": name, "corpus_bytes": size if corpus == "large" else 10**6, **figures})
    for row in rows:
        row["beyond_bytes"] = max(row["peak_bytes"] - rows[1]["peak_bytes"], 0)  # than the empty run
    columns = [Column("run", "run"), Column("s to step 1", "seconds", ".1f"), Column("CPU s", "cpu_seconds", ".1f")]
    columns += [Column("peak MB", "peak_bytes", ",.0f", 1e6), Column("beyond empty MB", "beyond_bytes", ",.0f", 1e6)]
    how = "bytes" if keys.tokenizer is None else f"{coder.vocab:,} tokens"
    return Report(rows, [Table(f"data: {size / 1e9:.2f} GB of JSONL, {how}", columns, rows)])


def write_corpus(folder: Path, size: int) -> int:
    """Write JSONL files of random parts of Python's standard library; return their bytes, about `size`."""
    text = PythonStdlib().load(seed=0, vocab=256).train.tokens.tobytes().decode(errors="ignore")
    random, written = np.random.default_rng(0), 0
    folder.mkdir()
    for number in range(_FILES):
        with (folder / f"{number}.jsonl").open("w") as file:
            while file.tell() < size // _FILES:
                begins, lengths = (
                    random.integers(len(text) - 2 * _LENGTH, size=20),
                    random.integers(2 * _LENGTH, size=20),
                )
                parts = (text[begin : begin + length] for begin, length in zip(begins, lengths, strict=True))
                file.writelines(json.dumps({"text": part}) + "\n" for part in parts)
            written += file.tell()
    return written


def _train(*words: str) -> Row:
    """Return the figures of a training run in its own process. Raises `UserError` with its last line if it fails."""
    settings = ("data=jsonl", "model=mixtral", "mesh=single", f"steps={_STEPS}", "data.eval_sequences=16")
    began, first, cpu, peak = time.perf_counter(), None, 0.0, 0
    # -P: without this folder, where modules have names of the standard library's.
    command = [sys.executable, "-P", "-m", "moezoo", "train", *settings, *words]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process, interrupts.undoing(process.kill):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step ") and first is None:
                    first, cpu = time.perf_counter() - began, _cpu_seconds(process.pid)
                peak = max(peak, _most_memory(process.pid))
        errors.seek(0)
        if process.returncode or first is None:
            reason = (errors.read().splitlines() or ["nothing printed"])[-1].removeprefix("error: ")
            raise UserError(f"train {' '.join(words)} ended with code {process.returncode} ({reason})")
    seconds = {"seconds": first, "cpu_seconds": cpu, "all_seconds": time.perf_counter() - began}
    return {**seconds, "peak_bytes": peak}


def _cpu_seconds(process: int) -> float:
    """Return the seconds that a process has used of all processors."""
    numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def _most_memory(process: int) -> int:
    """Return the most bytes that a process has had; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
