"""`train`: train a model as configured, and write a run folder."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from moezoo.config.build import build_execution
from moezoo.config.compose import as_mapping, folder_path
from moezoo.config.run_folders import AUTO, find, steps
from moezoo.config.settings import TrainConfig, check_config
from moezoo.data import Source, load, trigram_loss
from moezoo.data.epochs import Epochs, make_epochs
from moezoo.errors import UserError
from moezoo.host import NO_CUDA_GRAPHS, add_xla_flags
from moezoo.hub.adapters import write_adapter
from moezoo.hub.public_names import last_name
from moezoo.models.adapters import NoAdapter
from moezoo.models.base import LanguageModel
from moezoo.models.layers import layers_with_experts
from moezoo.parallel import distributed
from moezoo.parallel.cache import use_cache
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.remote import as_path
from moezoo.trackers import MetricsRow, RunStart, Writer
from moezoo.training import report, supervisor
from moezoo.training.build import build_state, build_step
from moezoo.training.checkpoint import Checkpoints, read_about
from moezoo.training.evaluate import Evaluation
from moezoo.training.facts import record_data, run_facts
from moezoo.training.files import writing_to
from moezoo.training.folder import Opened, check_idle, check_shared, choose, list_saved, opened
from moezoo.training.initial import check_tokens, describe_start, restore_run
from moezoo.training.loop import Loop
from moezoo.training.metrics import Validations, count_validations, list_damaged, read_metrics
from moezoo.training.pictures import load_picture, loss_picture, routing_picture
from moezoo.training.room import check_disk, check_memory
from moezoo.training.sample import Sample, sample
from moezoo.training.saved import (
    describe_run,
    list_changes,
    list_rate_change,
    read_batch_count,
    run_settings,
)
from moezoo.training.signals import Signals
from moezoo.training.step import State, Step
from moezoo.training.writers import OnRow, check_writers, make_writers
from moezoo.typed import counted, flatten


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished training run.

    - `model`: the trained model, on the mesh;
    - `history`: the rows of metrics.jsonl;
    - `folder`: the run folder;
    - `evaluation`, `sample`: of the last step;
    - `validations`: which validation was the best, at which step.
    """

    model: LanguageModel
    history: list[MetricsRow]
    folder: Path
    evaluation: Evaluation
    sample: Sample
    validations: Validations


class _Checkpoint(NamedTuple):
    """The checkpoint that a run resumes: the folder of its run, its step, its about.json, and all that were there."""

    run_dir: Path
    step: int
    about: dict[str, Any]
    saved: dict[str, str]


class _Prepared(NamedTuple):
    """What a run needs before it writes anything; every setting is checked, and `cfg.steps` known."""

    cfg: TrainConfig
    execution: MeshExecution
    source: Source
    epochs: Epochs
    baseline: float | None
    step: Step
    folder: Path
    batches_read: int
    places: list[Any] | None
    seen: dict[str, int]
    changed: list[str]
    history: list[MetricsRow]
    warnings: list[str]


def train(cfg: TrainConfig, *, on_row: OnRow | None = None) -> Run:
    """Train as configured, and write a run folder.

    On the first process `on_row` is called with each logged row, a dict as in metrics.jsonl, right after its step: a
    notebook can draw the run while it goes on. What it raises ends the run.

    All settings are checked before anything is written. With `distributed` settings every process calls this function,
    and either all of them return or all of them raise.

    What a run loses at most:

    - SIGTERM or SIGINT: nothing; the run saves after the current step and raises `Stopped`;
    - `kill -9`, also during a save: the steps since the last complete save, so at most those of `checkpoint_minutes`
      and of the step and the save that were running, or `checkpoint_every` steps if that is less. Saves by the clock
      are at least 20 times as far apart as a save takes, so they cost at most 5% of the time.

    Raises:
        UserError: A setting is wrong, a checkpoint cannot be written, or too many steps in a row were skipped.
        Stopped: A signal ended the run, which is saved.
    """
    check_config(cfg)
    cfg = dataclasses.replace(cfg, run_dir=_folder_path(cfg, "run_dir"), resume=_folder_path(cfg, "resume"))
    distributed.start(cfg.distributed, cfg.mesh.devices)
    supervisor.report_to_watcher("met\n")
    settings = flatten(as_mapping(dataclasses.replace(cfg, distributed=distributed.Alone())))
    distributed.check_same(settings, "processes were started differently", "start all with the same command")
    distributed.together(lambda: check_writers(cfg, on_row))
    before = _find_checkpoint(cfg)
    prepared = distributed.together(lambda: _prepare(cfg, before))
    cfg, execution, source, step = prepared.cfg, prepared.execution, prepared.source, prepared.step
    if distributed.several():
        facts = source.facts(cfg.seq_len)
        distributed.check_same(facts, f"processes read different data={source.name}", "give all of them the same files")
        check_shared(prepared.folder)

    cache = use_cache(cfg.cache_dir, execution.mesh)

    history, start, resumed, changes = prepared.history, 0, None, []
    if before is None:
        state = build_state(cfg, execution, step)
        changes = [] if cfg.init_from is None else distributed.together(lambda: describe_start(cfg))
    else:
        start, resumed, target = before.step, before.run_dir, step.arguments[0]
        folder = before.run_dir / "checkpoints"
        saved = restore_run(cfg, folder, start, before.about, execution, training=target[1:])
        state = State(saved["model"], *saved["training"])
        log = before.run_dir / "metrics.jsonl"
        changes = _describe_resume(before, prepared)
        if cfg.profile.start is not None and cfg.profile.start <= start:
            changes.append(("profile", f"none: profile.start={cfg.profile.start} is not after step {start}"))
        if damaged := list_damaged(log):
            lines = f"line{'s' * (len(damaged) > 1)} {', '.join(map(str, damaged))}"
            changes.append(("warning:", f"{log}: {lines} cannot be read, and is left out of the file of this run"))
    summary = [
        *report.summarize(cfg, execution, step, source, prepared.epochs, prepared.baseline),
        ("cache", cache),
        *changes,
    ]

    saved_before = None if before is None else before.saved
    with opened(prepared.folder, cfg, resumed, start, history, source.held_out, saved_before) as run:
        warnings = [("warning:", line) for line in prepared.warnings]
        report.print_lines([*summary, ("run_dir", str(run.path)), *warnings])
        started = RunStart(run.path, as_mapping(run_settings(cfg)), summary, history)
        writers = [run.log, *make_writers(cfg, on_row, started)]
        try:
            return _train(cfg, prepared, state, start, run, writers)
        finally:
            for writer in writers:
                writer.finish()


def _train(
    cfg: TrainConfig, prepared: _Prepared, state: State, start: int, run: Opened, writers: Sequence[Writer]
) -> Run:
    """Run every step, and write what the run leaves."""
    execution, source, step, (folder, log) = prepared.execution, prepared.source, prepared.step, run
    supervisor.report_to_watcher(str(folder))
    feed = step.feed()
    micro = cfg.batch_size // cfg.micro_batches
    batches = prepared.epochs.batches(micro, feed.rows, prepared.batches_read, prepared.places)
    report.print_lines([("note", line) for line in batches.notes])
    with writing_to("run_dir", folder):
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint_keep, size)
    # The first process counts for all: another may still see an older file.
    before = Validations(*distributed.first(lambda: count_validations(prepared.history)))
    loop = Loop(cfg, execution, step, source, prepared.epochs, writers, checkpoints, feed, prepared.seen, before)
    with Signals() as signals, contextlib.closing(batches):
        try:
            state, evaluation = loop.train(state, batches, start, signals)
        finally:
            checkpoints.close()
    if not isinstance(cfg.adapter, NoAdapter):
        done = log.history[-1]["step"] if log.history else 0
        about = describe_run(cfg, {}, record_data(source))
        facts = run_facts(about, log.history, done, cfg.init_from)._replace(name=last_name(folder))
        place = {"base": cfg.init_from, "base_sha256": cfg.init_sha256}
        write_adapter(state.model, folder / "adapter", **place, existing="replace", facts=facts)
    text = sample(state.model, source, cfg, execution)
    if distributed.is_first():
        with writing_to("run_dir", folder):
            loss_picture(log.history, folder / "loss.png", unit=source.unit, baseline=prepared.baseline)
            routing_picture(log.history, folder / "routing.png")
            if loop.loads:
                steps_shown = f"last {len(loop.loads)} logged steps"
                layers = layers_with_experts(state.model.stacks)
                load_picture(np.sum(loop.loads, axis=0), layers, folder / "expert_load.png", steps=steps_shown)
        for writer, name in itertools.product(writers, ("loss.png", "routing.png", "expert_load.png")):
            if (folder / name).exists():
                writer.picture(folder / name)
    report.print_results(cfg, evaluation, loop.validations, prepared.baseline, text, folder, source.unit, loop.seen)
    return Run(state.model, log.history, folder, evaluation, text, loop.validations)


def _folder_path(cfg: TrainConfig, key: Literal["run_dir", "resume"]) -> str | None:
    """Return the folder that `key` names, with ~ replaced by the user's home folder."""
    path = getattr(cfg, key)
    return None if path is None else str(folder_path(path, key))


def _find_checkpoint(cfg: TrainConfig) -> _Checkpoint | None:
    """Return the checkpoint to resume; the first process verifies its files for all."""
    if cfg.resume in (None, AUTO):
        return None
    named = str(cfg.resume)

    def verify() -> list[Any]:
        folder, step = find(named, "resume")
        check_idle(cfg, folder.parent)
        saved = list_saved(folder)
        about = read_about(folder, step)  # first: a folder that is no checkpoint is at no step
        if cfg.steps is not None:
            _check_goes_on(cfg, step)
        return [str(folder.parent), step, about, saved]

    run_dir, step, about, saved = distributed.first(verify)
    distributed.together(lambda: find(f"{run_dir}/checkpoints/{step}", "resume"))
    return _Checkpoint(as_path(run_dir), step, about, saved)


def _prepare(cfg: TrainConfig, before: _Checkpoint | None) -> _Prepared:
    folder = choose(cfg, None if before is None else before.run_dir)
    changed = [] if before is None else list_changes(cfg, before.about["config"])
    if before is None and cfg.init_from is not None:
        check_tokens(cfg)
    if cfg.profile.start is not None:
        add_xla_flags(NO_CUDA_GRAPHS)
    execution = on_mesh(build_execution(cfg))
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab)
    baseline = trigram_loss(source, limit=cfg.data.eval_sequences, seq_len=cfg.seq_len)
    batches_read = 0 if before is None else read_batch_count(before.about["loader"], source, cfg)
    seen = {} if before is None else before.about["loader"].get("seen", {})
    places = None if before is None else before.about["loader"].get("places")
    epochs = make_epochs(source, seq_len=cfg.seq_len, seed=cfg.seed)
    cfg, history = _with_steps(cfg, epochs), []
    if before is not None:  # the rate is computed, so JAX has to have its devices
        history = read_metrics(before.run_dir / "metrics.jsonl", until=before.step)
        _check_goes_on(cfg, before.step, count_validations(history))
        changed += list_rate_change(cfg, before.about["config"], before.step)
    step = build_step(cfg, execution)
    warnings = [*(check_memory(step) if cfg.steps else ()), *epochs.warnings()]
    warnings += [line for part in source.parts.values() for line in part.warnings]
    if distributed.is_first():
        with writing_to("run_dir", folder):
            check_disk(cfg, step, folder)
    return _Prepared(
        cfg, execution, source, epochs, baseline, step, folder, batches_read, places, seen, changed, history, warnings
    )


def _with_steps(cfg: TrainConfig, epochs: Epochs) -> TrainConfig:
    """Return `cfg` with the steps that read its `epochs`; the last one may begin another epoch."""
    if cfg.epochs is None:
        return cfg
    rows = epochs.count(cfg.epochs)
    steps = -(-rows // cfg.batch_size)
    if cfg.steps not in (None, steps):
        raise UserError(
            f"steps={cfg.steps} epochs={cfg.epochs}: {counted(cfg.epochs, 'epoch')} of {rows:,} rows together in "
            f"batches of {cfg.batch_size} would be {steps:,} steps; leave one of them out"
        )
    return dataclasses.replace(cfg, steps=steps)


def _check_goes_on(cfg: TrainConfig, step: int, validations: Validations = Validations()) -> None:  # noqa: B008
    """Raise `UserError` where the run that `cfg` resumes at `step` has ended there."""
    if step >= cfg.last_step:
        more = "" if cfg.epochs is None else f", or epochs above {cfg.epochs}"
        raise UserError(f"resume={cfg.resume} is at step {step} and steps={cfg.steps}; set steps above {step}{more}")
    if validations.exhaust(cfg.eval_patience):
        raise UserError(
            f"resume={cfg.resume} ended at step {step}: {validations.since} evaluations had no lower loss; set "
            f"eval_patience above {validations.since}, or to null"
        )


def _describe_resume(before: _Checkpoint, prepared: _Prepared) -> list[tuple[str, str]]:
    """Return the lines of the summary about a resumed run."""
    later = [saved for saved in steps(prepared.folder / "checkpoints") if saved > before.step]
    where = "; its later steps are replaced" if later else ""
    where = where if prepared.folder == before.run_dir else f", into {prepared.folder}"
    lines = [("resume", f"{before.run_dir} from step {before.step}{where}")]
    if (processes := before.about.get("processes")) != distributed.count():
        lines.append(("changed", f"processes: {processes} before, {distributed.count()} now"))
    return lines + [("changed", line) for line in prepared.changed]
