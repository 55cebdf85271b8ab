"""`train`: train a model as configured, and write a run folder."""

import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from moezoo.config.build import build_execution
from moezoo.config.compose import as_mapping, folder_path, run_folder, to_yaml
from moezoo.config.settings import TrainConfig, check_config
from moezoo.data import Source, load, train_batches, trigram_loss
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel
from moezoo.parallel import distributed
from moezoo.parallel.execution import Execution
from moezoo.training import report, supervisor
from moezoo.training.build import build_state, build_step
from moezoo.training.checkpoint import Checkpoints, find, read_about, remove_beyond, restore, steps
from moezoo.training.evaluate import Evaluation
from moezoo.training.feed import Feed
from moezoo.training.loop import Loop
from moezoo.training.metrics import MetricsLog, MetricsRow, read_metrics
from moezoo.training.pictures import load_picture, loss_picture
from moezoo.training.resume import list_changes, read_batch_count, run_settings
from moezoo.training.sample import Sample, sample
from moezoo.training.signals import Signals
from moezoo.training.step import State, Step


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished training run.

    - `model`: the trained model, on the mesh;
    - `history`: the rows of metrics.jsonl;
    - `folder`: the run folder;
    - `evaluation`, `sample`: of the last step.
    """

    model: LanguageModel
    history: list[MetricsRow]
    folder: Path
    evaluation: Evaluation
    sample: Sample


class _Checkpoint(NamedTuple):
    """The checkpoint that a run resumes: the folder of its run, its step, and its about.json."""

    run_dir: Path
    step: int
    about: dict[str, Any]


class _Prepared(NamedTuple):
    """What a run needs before it writes anything; every setting is checked."""

    execution: Execution
    source: Source
    baseline: float | None
    step: Step
    folder: Path
    batches_read: int
    changed: list[str]


def train(cfg: TrainConfig) -> Run:
    """Train as configured, and write a run folder.

    All settings are checked before anything is written. With `distributed` settings every process calls this function,
    and either all of them return or all of them raise.

    What a run loses at most:

    - SIGTERM or SIGINT: nothing; the run saves after the current step and raises `Stopped`;
    - `kill -9`, also during a save: the steps since the last complete save, so at most those of `checkpoint_minutes`
      and of the step and the save that were running, or `checkpoint_every` steps if that is less. Saves by the clock
      are at least 20 times as far apart as a save takes, so they cost at most 5% of the time.

    Raises:
        UserError: a setting is wrong, a checkpoint cannot be written, or too many steps in a row were skipped.
        Stopped: a signal ended the run, which is saved.
    """
    check_config(cfg)
    cfg = dataclasses.replace(cfg, run_dir=_folder_path(cfg, "run_dir"), resume=_folder_path(cfg, "resume"))
    distributed.start(cfg.distributed, cfg.mesh.devices)
    supervisor.report_progress("met\n")
    distributed.check_same(as_mapping(dataclasses.replace(cfg, distributed=distributed.Alone())))
    before = _find_checkpoint(cfg)
    prepared = distributed.together(lambda: _prepare(cfg, before))
    execution, source, step = prepared.execution, prepared.source, prepared.step

    history, start, resumed = [], 0, []
    if before is None:
        state = build_state(cfg, execution, step)
    else:
        start, target = before.step, step.arguments[0]
        saved = restore(before.run_dir / "checkpoints", start, before.about, model=target.model, training=target[1:])
        state = State(saved["model"], *saved["training"])
        history = read_metrics(before.run_dir / "metrics.jsonl", until=start)
        resumed = _describe_resume(before, prepared)
    summary = report.summarize(cfg, execution, step, source, prepared.baseline) + resumed

    folder, log, held = _start_folder(prepared.folder, cfg, start, history, source.held_out)
    with held:
        report.print_lines([*summary, ("run_dir", str(folder))])
        return _train(cfg, prepared, state, start, folder, log)


def _train(cfg: TrainConfig, prepared: _Prepared, state: State, start: int, folder: Path, log: MetricsLog) -> Run:
    """Run every step, and write what the run leaves."""
    execution, source, step = prepared.execution, prepared.source, prepared.step
    supervisor.report_progress(str(folder))
    feed = Feed(step.batch_shardings.tokens, step.arguments[1].tokens.shape)
    micro = cfg.batch_size // cfg.execution.microbatches
    batches = train_batches(
        source, seq_len=cfg.seq_len, batch_size=micro, seed=cfg.seed, rows=feed.rows, start=prepared.batches_read
    )
    with _writing_to(folder):
        checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint_keep)
    loop = Loop(cfg, execution, step, source, log, checkpoints, feed)
    with Signals() as signals:
        try:
            state, evaluation = loop.train(state, batches, start, signals)
        finally:
            log.close()
            checkpoints.close()
    text = sample(state.model, source, cfg, execution)
    if distributed.is_first():
        with _writing_to(folder):
            loss_picture(log.history, folder / "loss.png", unit=source.unit, baseline=prepared.baseline)
            if loop.loads:
                steps_shown = f"last {len(loop.loads)} logged steps"
                load_picture(np.sum(loop.loads, axis=0), folder / "expert_load.png", steps=steps_shown)
    report.print_results(evaluation, prepared.baseline, text, folder, source.unit)
    return Run(state.model, log.history, folder, evaluation, text)


def _folder_path(cfg: TrainConfig, key: Literal["run_dir", "resume"]) -> str | None:
    """Return the folder that `key` names, with ~ replaced by the user's home folder."""
    path = getattr(cfg, key)
    return None if path is None else str(folder_path(path, key))


def _find_checkpoint(cfg: TrainConfig) -> _Checkpoint | None:
    """Return the checkpoint to resume; the first process verifies its files for all."""
    if cfg.resume is None:
        return None
    named: str = cfg.resume

    def verify() -> list[Any]:
        folder, step = find(named, "resume")
        if step >= cfg.steps:
            raise UserError(f"resume={named} is at step {step} and steps={cfg.steps}; set steps above {step}")
        return [str(folder.parent), step, read_about(folder, step)]

    run_dir, step, about = distributed.first(verify)
    return _Checkpoint(Path(run_dir), step, about)


def _prepare(cfg: TrainConfig, before: _Checkpoint | None) -> _Prepared:
    folder = _folder(cfg, before)
    changed = [] if before is None else list_changes(cfg, before.about["config"])
    execution = build_execution(cfg)
    step = build_step(cfg, execution)
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab)
    baseline = trigram_loss(source, limit=cfg.data.eval_sequences, seq_len=cfg.seq_len)
    batches_read = 0 if before is None else read_batch_count(before.about["loader"], source, cfg)
    return _Prepared(execution, source, baseline, step, folder, batches_read, changed)


def _describe_resume(before: _Checkpoint, prepared: _Prepared) -> list[tuple[str, str]]:
    """Return the lines of the summary about a resumed run."""
    later = [saved for saved in steps(prepared.folder / "checkpoints") if saved > before.step]
    where = "; its later steps are replaced" if later else ""
    where = where if prepared.folder == before.run_dir else f", into {prepared.folder}"
    lines = [("resume", f"{before.run_dir} from step {before.step}{where}")]
    if (processes := before.about.get("processes")) != distributed.count():
        lines.append(("changed", f"processes: {processes} before, {distributed.count()} now"))
    return lines + [("changed", line) for line in prepared.changed]


def _folder(cfg: TrainConfig, before: _Checkpoint | None) -> Path:
    """Return the folder that this run writes; raise `UserError` if it holds something else."""
    if before is not None and (cfg.run_dir is None or Path(cfg.run_dir).resolve() == before.run_dir.resolve()):
        return before.run_dir
    if cfg.run_dir is None:
        return Path("runs") / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = Path(cfg.run_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={cfg.run_dir} is a file; name a folder")
    if run_folder(folder) != folder:
        raise UserError(f"run_dir={cfg.run_dir} has the name of a checkpoint's folder; name another")
    if any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
        saved = steps(folder / "checkpoints")
        then = f"continue it with resume={cfg.run_dir}" if saved else "remove it, as it saved no checkpoint"
        raise UserError(f"run_dir={cfg.run_dir} already holds a run; name another folder, or {then}")
    return folder


def _start_folder(
    folder: Path, cfg: TrainConfig, start: int, history: list[MetricsRow], held_out: Sequence[str]
) -> tuple[Path, MetricsLog, contextlib.ExitStack]:
    """Create and lock the folder and write its first files, on the first process, which alone writes a log file.

    If the process is killed in here, the run can still be resumed from the same step: later checkpoints are removed
    first, and each file is replaced in one operation.
    """

    held = contextlib.ExitStack()

    def begin() -> str:
        with _writing_to(folder):
            made = make_folder(folder, cfg)
            held.enter_context(_lock(made))
            remove_beyond(made / "checkpoints", start)
            _replace_file(made / "config.yaml", to_yaml(as_mapping(run_settings(cfg))))
            if held_out:
                _replace_file(made / report.HELD_OUT_FILE, "".join(f"{name}\n" for name in held_out))
        return str(made)

    made = Path(distributed.first(begin))
    path = made / "metrics.jsonl" if distributed.is_first() else None
    return made, distributed.together(lambda: MetricsLog(path, history)), held


def _replace_file(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8", errors="surrogateescape")  # names of files need not be UTF-8
    os.replace(temporary, path)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run while this one lasts, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is training there; wait for it to end, or stop it") from None
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        os.close(handle)


def make_folder(folder: Path, cfg: TrainConfig) -> Path:
    """Create the folder and return it; append a number to a name made from the clock if another run has that name."""
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
def _writing_to(folder: Path) -> Iterator[None]:
    """Raise an error of the file system as a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"run_dir={folder}: cannot write there ({error.strerror}); name another folder") from error
