"""`train`: from a configuration to a trained model and a run folder."""

import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo import distributed
from moezoo.compose import as_mapping, run_folder, to_yaml
from moezoo.data import Source, load, train_batches, trigram_loss
from moezoo.errors import UserError
from moezoo.execution import Execution
from moezoo.nn.language_model import LanguageModel
from moezoo.settings import TrainConfig
from moezoo.train import report, supervisor
from moezoo.train.checkpoint import Checkpoints, find, read_about, remove_beyond, restore, steps
from moezoo.train.evaluate import Evaluation
from moezoo.train.feed import Feed
from moezoo.train.loop import Loop
from moezoo.train.metrics import MetricsLog, Row, read_metrics
from moezoo.train.pictures import load_picture, loss_picture
from moezoo.train.resume import batches_of, changes, own
from moezoo.train.sample import Sample, sample
from moezoo.train.setup import execution, initial_state, make_step
from moezoo.train.signals import Signals
from moezoo.train.step import State, Step


@dataclasses.dataclass(frozen=True)
class Run:
    """What `train` returns: the model as the mesh holds it, the rows of metrics.jsonl, the folder, the last figures."""

    model: LanguageModel
    history: list[Row]
    folder: Path
    evaluation: Evaluation
    sample: Sample


class _Before(NamedTuple):
    """The checkpoint that a run goes on from: where, after which step, what it is of."""

    run: Path
    step: int
    about: dict[str, Any]


class _Plan(NamedTuple):
    """All that can be refused, not refused; nothing is written and no other process was waited for."""

    run: Execution
    source: Source
    baseline: float | None
    step: Step
    folder: Path
    batches_read: int
    changed: list[str]


def train(cfg: TrainConfig) -> Run:
    """Train as `cfg` says and leave a run folder.

    Everything that can be refused is refused, by one `UserError`, before anything is written. Raises `Stopped`, saved,
    after the step in which SIGTERM or SIGINT came; `UserError` when a checkpoint cannot be written or too many steps
    in a row were skipped. With `distributed` settings every process calls this, and all return or raise.
    """
    cfg = dataclasses.replace(cfg, run_dir=_expanded(cfg.run_dir), resume=_expanded(cfg.resume))
    distributed.start(cfg.distributed, cfg.mesh.devices)
    supervisor.tell("met\n")
    distributed.same(as_mapping(dataclasses.replace(cfg, distributed=distributed.Alone())))
    before = _before(cfg)
    plan = distributed.together(lambda: _plan(cfg, before))
    run, source, step = plan.run, plan.source, plan.step

    history, start, resumed = [], 0, []
    if before is None:
        state = initial_state(cfg, run, step)
    else:
        start, target = before.step, step.arguments[0]
        saved = restore(before.run / "checkpoints", start, before.about, model=target.model, training=target[1:])
        state = State(saved["model"], *saved["training"])
        history = read_metrics(before.run / "metrics.jsonl", until=start)
        resumed = _resumed(before, plan)
    report.tell(report.summary(cfg, run, state, step.state_specs, source, plan.baseline) + resumed)

    folder, log, held = _begun(plan.folder, cfg, start, history)
    with held:
        return _trained(cfg, plan, state, start, folder, log)


def _trained(cfg: TrainConfig, plan: _Plan, state: State, start: int, folder: Path, log: MetricsLog) -> Run:
    """Every step, and what is left behind."""
    run, source, step = plan.run, plan.source, plan.step
    supervisor.tell(str(folder))
    feed = Feed(step.batch_shardings.tokens, step.arguments[1].tokens.shape)
    micro = cfg.batch_size // cfg.execution.microbatches
    batches = train_batches(
        source, seq_len=cfg.seq_len, batch_size=micro, seed=cfg.seed, rows=feed.rows, start=plan.batches_read
    )
    with _writing(folder):
        checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint_keep)
    loop = Loop(cfg, run, step, source, log, checkpoints, feed)
    with Signals() as signals:
        try:
            state, evaluation = loop.run(state, batches, start, signals)
        finally:
            log.close()
            checkpoints.close()
    text = sample(state.model, source, cfg, run)
    if distributed.is_first():
        with _writing(folder):
            loss_picture(log.history, folder / "loss.png", unit=source.unit, baseline=plan.baseline)
            if loop.loads:
                told = f"last {len(loop.loads)} logged steps"
                load_picture(np.sum(loop.loads, axis=0), folder / "expert_load.png", steps=told)
    report.tell_end(evaluation, plan.baseline, text, folder, source.unit)
    return Run(state.model, log.history, folder, evaluation, text)


def _expanded(path: str | None) -> str | None:
    """With ~ as the user's home."""
    return None if path is None else str(Path(path).expanduser())


def _before(cfg: TrainConfig) -> _Before | None:
    """What is resumed, its files verified, by one process for all."""
    if cfg.resume is None:
        return None
    named: str = cfg.resume

    def verified() -> list[Any]:
        folder, step = find(named, "resume")
        if step >= cfg.steps:
            raise UserError(f"resume={named} is at step {step} and steps={cfg.steps}; set steps above {step}")
        return [str(folder.parent), step, read_about(folder, step)]

    run, step, about = distributed.first(verified)
    return _Before(Path(run), step, about)


def _plan(cfg: TrainConfig, before: _Before | None) -> _Plan:
    folder = _folder(cfg, before)
    changed = [] if before is None else changes(cfg, before.about["config"])
    run = execution(cfg)
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab)
    baseline = trigram_loss(source, limit=cfg.data.eval_sequences, seq_len=cfg.seq_len)
    batches_read = 0 if before is None else batches_of(before.about["loader"], source, cfg)
    return _Plan(run, source, baseline, make_step(cfg, run), folder, batches_read, changed)


def _resumed(before: _Before, plan: _Plan) -> list[tuple[str, str]]:
    """What the summary says of a run that goes on."""
    later = [saved for saved in steps(plan.folder / "checkpoints") if saved > before.step]
    where = "; what is later there is replaced" if later else ""
    where = where if plan.folder == before.run else f", into {plan.folder}"
    lines = [("resume", f"{before.run} from step {before.step}{where}")]
    if (processes := before.about.get("processes")) != distributed.count():
        lines.append(("changed", f"processes: {processes} before, {distributed.count()} now"))
    return lines + [("changed", line) for line in plan.changed]


def _folder(cfg: TrainConfig, before: _Before | None) -> Path:
    """Where this run writes."""
    if before is not None and (cfg.run_dir is None or Path(cfg.run_dir).resolve() == before.run.resolve()):
        return before.run
    if cfg.run_dir is None:
        return Path("runs") / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = Path(cfg.run_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={cfg.run_dir} is a file; name a folder")
    if run_folder(folder) != folder:
        raise UserError(f"run_dir={cfg.run_dir}: a folder of this name is a checkpoint's; name another")
    if any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
        saved = steps(folder / "checkpoints")
        then = f"continue it with resume={cfg.run_dir}" if saved else "remove it, as it saved no checkpoint"
        raise UserError(f"run_dir={cfg.run_dir} already holds a run; name another folder, or {then}")
    return folder


def _begun(
    folder: Path, cfg: TrainConfig, start: int, history: list[Row]
) -> tuple[Path, MetricsLog, contextlib.ExitStack]:
    """The folder, made, begun and held by the first process, which alone has a file behind its log.

    Killed anywhere in between, a run can be continued from the same step: what is later goes first, files change whole.
    """

    held = contextlib.ExitStack()

    def begin() -> str:
        with _writing(folder):
            made = _made(folder, cfg)
            held.enter_context(_held(made))
            remove_beyond(made / "checkpoints", start)
            temporary = made / "config.tmp"
            temporary.write_text(to_yaml(as_mapping(own(cfg))))
            os.replace(temporary, made / "config.yaml")
        return str(made)

    made = Path(distributed.first(begin))
    path = made / "metrics.jsonl" if distributed.is_first() else None
    return made, distributed.together(lambda: MetricsLog(path, history)), held


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Against a second run in the same folder, while this one lasts, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is training there; wait for its end, or stop it") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _made(folder: Path, cfg: TrainConfig) -> Path:
    """The folder, made; one named by the clock with a number behind it where another run took the name."""
    if cfg.run_dir is not None or cfg.resume is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for candidate in itertools.chain([folder], (folder.with_name(f"{folder.name}_{i}") for i in itertools.count(2))):
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
    raise AssertionError("there is always another number")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What cannot be written is told in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"run_dir={folder}: cannot write there ({error.strerror}); name another folder") from error
