"""`train_step peer=transformers`: the same training steps in moezoo and in transformers, in float32 on processors.

Each program has a process that stays; while one makes steps, the other sleeps. Both start from one folder, and train on
the same random tokens with the same AdamW, decay and clipping. Routers have no loss of their own, because transformers
defines it over all layers together.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import moezoo.interrupts as interrupts
from benchmarks import one_trainer
from benchmarks.results import Column, Report, Row, Table, log, spread
from benchmarks.timing import quartiles
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.host.machine import processor_name, processors
from moezoo.hub.saving import save_pretrained
from moezoo.models import build_model
from moezoo.optim import AdamW
from moezoo.tools.parity.peer import require_peers

OURS, THEIRS = "moezoo", "transformers"
_FIXED = ("schedule=constant", "schedule.warmup_steps=0", "model.load_balance=0", "model.z_loss=0")
_BATCHES = 4
# Steps before the first turn. They allocate memory, and their results are compared.
_WARM_UP = 3
# The largest relative differences then. Sums in another order differ by 1e-7. A token whose choice of experts is nearly
# a tie may move the mean loss by 1e-5. PyTorch's norm of large gradients, by which they are clipped, is off by 1e-4. A
# step without decay changes the parameters' length by 3e-5 more than one with it, at the rate 3e-4.
_BOUNDS = {"losses": 1e-4, "parameters": 1e-6, "first moments": 1e-3, "second moments": 1e-3}


def run(keys: Any) -> Report:
    """Compare each configuration.

    Raises `UserError` where words do not compose or fit together, and nothing has run then; or if results differ.
    """
    require_peers()
    if not Path("/proc/self/status").exists():
        raise UserError("peer= reads the memory of a process from /proc/self/status, which only Linux has")
    configs = {name: compose(*words, *_FIXED) for name, words in keys.steps.items()}
    for name, cfg in configs.items():
        if not isinstance(cfg.optimizer, AdamW) or cfg.mesh.devices != 1:
            raise UserError(
                f"step={name}: transformers trains with AdamW on one device; choose optimizer=adamw mesh=single"
            )
    rows: list[Row] = []
    for name, cfg in configs.items():
        with (
            tempfile.TemporaryDirectory() as temporary,
            interrupts.undoing(partial(shutil.rmtree, temporary, ignore_errors=True)),
        ):
            log(f"{name}: making the model")
            write(Path(temporary), cfg, settings_of(cfg, keys.steps[name], keys.adamw))
            rows += compare({"step": name}, Path(temporary), keys)
    return report(rows)


def write(folder: Path, cfg: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Write a random model, batches, and what `settings_of` returned."""
    save_pretrained(build_model(cfg.model, key=jax.random.key(cfg.seed)), folder)
    shape = (_BATCHES, cfg.batch_size, cfg.seq_len + 1)
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, cfg.model.vocab, shape).astype(np.int32))
    (folder / "settings.json").write_text(json.dumps(settings))


def settings_of(cfg: TrainConfig, words: Sequence[str], adamw: str) -> dict[str, Any]:
    """Return the words of moezoo's process, whose model is that of the folder, and the settings of the other."""
    rule: Any = cfg.optimizer
    own = [word for word in words if not word.startswith(("model=", "model."))]
    betas = [rule.beta1, rule.beta2]
    return {
        # A run that starts from weights has another rate by default.
        "words": [*own, *_FIXED, f"optimizer.learning_rate={rule.learning_rate}"],
        "adamw": {"lr": rule.learning_rate, "betas": betas, "eps": rule.epsilon, "fused": adamw == "fused"},
        "decay": rule.weight_decay,
        "clip": rule.clip_norm,
    }


class Process:
    """A process of `one_trainer`, which makes steps when it is asked to, and sleeps otherwise."""

    def __init__(self, who: str, folder: Path, held: contextlib.ExitStack):
        """Start it, and return when it is ready for its first step. It ends when `held` is left."""
        log(f"starting {who}")
        self._who, self._errors = who, held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        # -P: without the folder of the script, where modules have names of the standard library's.
        command = [sys.executable, "-P", one_trainer.__file__, who, str(folder)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "text": True}
        process = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes)
        self._process: Any = held.enter_context(process)  # leaving closes its input
        held.enter_context(interrupts.undoing(process.kill))
        self.attention = self._read()

    def ask(self, question: int | None) -> Any:
        """Return the answer of `one_trainer` to a line. Raises `UserError` with its last line if it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(question)}\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        reason = (self._errors.read().splitlines() or ["nothing printed"])[-1].removeprefix("error: ")
        raise UserError(f"{self._who} ended with code {code} ({reason})")


def compare(labels: Row, folder: Path, keys: Any) -> list[Row]:
    """Return a row for each program. Raises `UserError` if they do not compute the same."""
    name, turns = labels["step"], []
    with contextlib.ExitStack() as held:
        processes = {who: Process(who, folder, held) for who in (OURS, THEIRS)}
        first = {who: process.ask(_WARM_UP)["losses"] for who, process in processes.items()}
        check(name, *({"losses": first[who], **processes[who].ask(None)} for who in (OURS, THEIRS)))
        for number in range(keys.samples):
            log(f"{name}: turn {number + 1}/{keys.samples}")
            turns.append({who: process.ask(keys.turn) for who, process in processes.items()})
    losses = {who: [*first[who], *(loss for turn in turns for loss in turn[who]["losses"])] for who in processes}
    rows = []
    for who, process in processes.items():
        row: Row = {"part": "train_step", **labels, "implementation": who, "attention": process.attention}
        for key, prefix in (("seconds", ""), ("cpu_seconds", "cpu_")):
            timing = quartiles([turn[who][key] for turn in turns]).rounded(2)
            row |= {f"{prefix}{figure}": value for figure, value in timing.items()}
            ratios = [turn[who][key] / turn[THEIRS][key] for turn in turns]
            row[f"{prefix}ratio"] = round(statistics.median(ratios), 4)
        row["peak_bytes"] = turns[-1][who]["peak_bytes"]
        row["losses"] = losses[who]
        row["difference"] = _difference(first[who], first[THEIRS])
        row |= {"turns": len(turns), "steps_per_turn": keys.turn, "adamw": keys.adamw, "dtype": "float32"}
        rows.append({**row, "device": processor_name(), "processors": processors()})
    return rows


def check(name: str, ours: Row, theirs: Row) -> None:
    """Raise `UserError` if results of the first steps differ by more than rounding."""
    for what, bound in _BOUNDS.items():
        if not (found := _difference(ours[what], theirs[what])) <= bound:
            raise UserError(
                f"step={name}: {what} of {_WARM_UP} steps differ by {found:.1e}, and rounding explains {bound:.0e}: "
                f"{ours[what]} in moezoo, {theirs[what]} in transformers; leave out words that only moezoo knows"
            )


def _difference(one: Any, other: Any) -> float:
    """Return the largest relative difference of numbers."""
    return float(np.max(np.abs(np.subtract(one, other) / other)))


def report(rows: Sequence[Row]) -> Report:
    """Return one table."""
    where = f"{rows[0]['device']}, {rows[0]['processors']} processors"
    columns = [Column("step", "step"), Column("", "implementation"), Column("attention", "attention")]
    columns += [Column("ms", spread(".0f"), ">"), Column("ratio", "ratio", ".3f")]
    columns += [Column("CPU ms", "cpu_ms", ".0f"), Column("ratio", "cpu_ratio", ".3f")]
    columns += [Column("peak MB", "peak_bytes", ",.0f", 1e6), Column("first loss", lambda row: row["losses"][0], ".6f")]
    columns += [Column("last loss", lambda row: row["losses"][-1], ".6f"), Column("difference", "difference", ".1e")]
    return Report(rows, [Table(f"train_step next to transformers, float32, {where}", columns, rows)])
