"""The steps of a run, and what happens between them: logging, evaluation, checkpoints, and stopping."""

import collections
import contextlib
import dataclasses
import signal
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from moezoo.config.run_folders import steps
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, Source
from moezoo.data.epochs import Epochs
from moezoo.data.stream import Batches
from moezoo.errors import UserError
from moezoo.host import in_units
from moezoo.models.base import LanguageModel
from moezoo.models.layers import layers_with_experts
from moezoo.parallel import distributed
from moezoo.parallel.execution import Execution
from moezoo.parallel.memory import peak_bytes
from moezoo.trackers import MetricsRow, Writer
from moezoo.training import report
from moezoo.training.checkpoint import FROZEN, Checkpoints
from moezoo.training.evaluate import Evaluation, Evaluator
from moezoo.training.facts import record_data
from moezoo.training.feed import Feed
from moezoo.training.initial import as_saved_pieces
from moezoo.training.metrics import Validations
from moezoo.training.profiler import Profiler, naming_operations
from moezoo.training.progress import Progress
from moezoo.training.rounding import COUNTED_STEPS, as_counts
from moezoo.training.saved import describe_run, loader_state
from moezoo.training.signals import Signals, Stopped
from moezoo.training.step import CompiledStep, Metrics, State, Step, check_shardings
from moezoo.training.waiting import Waiting
from moezoo.typed import counted

# The picture of expert load averages this many logged steps.
_LOAD_ROWS = 10
# Saves by the clock are at least this many times as far apart as a save takes, so they cost at most 5% of the time.
_LEAST_RATIO = 20


class _Asked(NamedTuple):
    """What is asked of the run between two steps.

    Attributes:
        signal: The number of a signal that ends it; 0 for none.
        save: Whether a checkpoint is due by the clock.
    """

    signal: int = 0
    save: bool = False

    def agree(self) -> "_Asked":
        """Return what all processes do: the signal of any of them, or else the save. All must call it at this point."""
        # One number per process: 0 for nothing, 1 for a save, and signals, which are SIGINT (2) and SIGTERM (15).
        number = distributed.largest(self.signal or int(self.save))
        return _Asked(save=True) if number == 1 else _Asked(signal=number)


@dataclasses.dataclass
class _SinceRow:
    """Steps and tokens since the last row; seconds for reading data and placing it on devices, for steps, for saves."""

    steps: int = 0
    tokens: int = 0
    waiting: float = 0.0
    computing: float = 0.0
    saving: float = 0.0

    @contextlib.contextmanager
    def spent(self, what: Literal["waiting", "computing", "saving"]) -> Iterator[None]:
        """Add the seconds that the block takes to those of `what`."""
        began = time.perf_counter()
        yield
        setattr(self, what, getattr(self, what) + time.perf_counter() - began)

    def figures(self) -> MetricsRow:
        """Return the figures of a row."""
        seconds = {name: getattr(self, name) for name in ("waiting", "computing", "saving")}
        means = {f"seconds_{name}": value / self.steps for name, value in seconds.items()}
        return {"tokens_per_second": self.tokens / (self.waiting + self.computing), **means}


class _Interrupted(Exception):  # noqa: N818  (it is not an error)
    """A signal came during an evaluation."""


class Loop:
    """Trains, logs, evaluates and saves.

    - `loads`: the assignments per expert of the last logged steps;
    - `seen`: of a mixture, how many tokens of each source were read, padding not counted;
    - `validations`: what they came to so far.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        execution: Execution,
        step: Step,
        source: Source,
        epochs: Epochs,
        writers: Sequence[Writer],
        checkpoints: Checkpoints,
        feed: Feed,
        seen: Mapping[str, int] = types.MappingProxyType({}),
        validations: Validations = Validations(),  # noqa: B008  (it is not changed)
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare for the steps of a new run, or of one after a checkpoint, up to which `seen` and `validations` count.

        `clock` returns seconds; it decides when a checkpoint is due by `checkpoint_minutes`.
        """
        self.cfg, self.step, self.writers, self.checkpoints, self._feed = cfg, step, writers, checkpoints, feed
        assert isinstance(execution.mesh, Mesh)
        self._mesh = execution.mesh
        self.loads: list[np.ndarray] = []
        self._epochs, self.seen, self.validations = epochs, collections.Counter(seen), validations
        self._source, self._clock, self._saved_at, self._is_due = source, clock, 0.0, False
        self._since = _SinceRow()
        self._lost = np.zeros(2, np.int64)
        self._evaluator = Evaluator(step.blueprint.shapes, source, cfg, execution)

    def train(self, state: State, batches: Batches, start: int, signals: Signals) -> tuple[State, Evaluation]:
        """Run steps `start` + 1 to the last; evaluate and save as configured and at the end, also without a step.

        The last step is that of `steps`, or that of a validation with which `eval_patience` is exhausted.

        Raises:
            Stopped: After the step during which a signal came, without the rest of its evaluation; its state is saved.
                In a command, a signal before the first step ends the process.
            UserError: A checkpoint cannot be written, too many steps in a row are skipped, or the loss before step 1 is
                not finite and exhausts `eval_patience`.
        """
        self._batches, self._signals = batches, signals
        check_shardings(state, self.step.state_shardings)
        if start == self.cfg.last_step:
            return state, self._evaluate_only(state)
        compiled, evaluation, number = self._compile(), None, start
        self._saved_at = self._clock()
        with signals.awaiting(), self._watched(start), self._profiler(compiled) as profiler:
            if start == 0 and self.cfg.is_evaluated(0) and self.validations == Validations():
                self._evaluate_first(state)
            for number in profiler.follow(self._numbers(start)):
                self._stop_if_asked(number - 1, state)
                batch = self._read()
                with self._since.spent("computing"), profiler.step(), self._waiting.on(f"step {number}"):
                    state, metrics = compiled(state, batch)
                    # One step in flight: on the CPU, collectives of several can wait for each other forever (jax 0.10).
                    jax.block_until_ready(metrics)
                self._count_step(number, metrics, is_new=start == 0)
                evaluation = self._evaluate_if_due(number, state)
                self._log_if_due(number, metrics, evaluation)
                self._save_if_due(number, metrics, state)
            self.checkpoints.wait()
            # A signal during the last step or its save also ends the run.
            if asked := distributed.largest(signals.number):
                self._stop(number, state, asked)
        assert evaluation is not None
        return state, evaluation

    def _numbers(self, start: int) -> Iterator[int]:
        """Yield the numbers of the steps after `start`, as long as `eval_patience` lasts."""
        for number in range(start + 1, self.cfg.last_step + 1):
            if self.validations.exhaust(self.cfg.eval_patience):
                return
            yield number

    def _is_last(self, number: int) -> bool:
        return number == self.cfg.last_step or self.validations.exhaust(self.cfg.eval_patience)

    @contextlib.contextmanager
    def _watched(self, start: int) -> Iterator[None]:
        """While the block runs, show the progress of the run, and what it waits for."""
        layers, bound = layers_with_experts(self.step.blueprint.shapes.stacks), self.cfg.dispatch.bound
        progress = Progress(start, self.cfg.last_step, bound=bound, layers=layers, watch=self.cfg.watch)
        with progress as self._progress, Waiting(self._mesh, progress.print) as self._waiting:
            yield

    def _profiler(self, compiled: CompiledStep) -> Profiler:
        folder, report_line = self.checkpoints.folder.parent, self._progress.print
        return Profiler(self.cfg.profile, folder, compiled.program, self._mesh, report_line)

    def _stop_if_asked(self, done: int, state: State) -> None:
        """Raise `Stopped` after step `done` if a signal came to a process; note whether a save is due by the clock."""
        asked = _Asked(self._signals.number, self._is_save_due()).agree()
        if asked.signal:
            self._stop(done, state, asked.signal)
        self._is_due |= asked.save

    def _read(self) -> Batch:
        """Return the next batch, on the devices."""
        with self._since.spent("waiting"):
            micro = [next(self._batches) for _ in range(self.cfg.micro_batches)]
            return self._feed(jax.tree.map(lambda *x: np.stack(x), *micro))

    def _count_step(self, number: int, metrics: Metrics, *, is_new: bool) -> None:
        """Count a step that is done; `is_new` says whether the run began with step 1."""
        # A save runs during one step. That step is logged only after the save is complete, so a killed run loses no
        # more steps than there are between two saves, and a failed save ends the run immediately.
        with self._since.spent("saving"):
            self.checkpoints.wait()
        rows = self.cfg.batch_size
        self._since.steps += 1
        self._since.tokens += rows * self.cfg.seq_len
        self.seen.update(self._epochs.by_source(np.arange((number - 1) * rows, number * rows)))
        self._progress.step(number)
        self._check_skipped(number, metrics)
        if is_new:
            self._check_rounding(number, metrics)

    def _evaluate_if_due(self, number: int, state: State) -> Evaluation | None:
        """Evaluate after a step, as configured; return None otherwise, and if a signal comes meanwhile."""
        if not self.cfg.is_evaluated(number):
            return None
        found = self._evaluate(state.model)
        self._count(number, found)
        return found

    def _log_if_due(self, number: int, metrics: Metrics, evaluation: Evaluation | None) -> None:
        """Log a row after a step, as configured."""
        logged = self.cfg.log_every > 0 and number % self.cfg.log_every == 0
        if not (logged or number == 1 or self.cfg.is_evaluated(number)):
            return
        row = _row(number, metrics, evaluation, self.seen)
        row |= self._since.figures() | {"peak_bytes": peak_bytes(self._mesh)}
        self.loads = [*self.loads, np.asarray(metrics.load)][-_LOAD_ROWS:]
        self._write(row, self.loads[-1])
        self._since = _SinceRow()

    def _save_if_due(self, number: int, metrics: Metrics, state: State) -> None:
        """Start a save after a step: by the clock, as configured, of the best validation, and of the last step."""
        self._is_due |= self.cfg.checkpoint_every > 0 and number % self.cfg.checkpoint_every == 0
        is_best = self.validations.step == number
        # While steps are skipped the state may be the reason, so it is not saved unless it is the best.
        if self._is_last(number) or is_best or (self._is_due and not int(metrics.skipped_in_a_row)):
            with self._since.spent("saving"):
                self._save(number, state)
            self._is_due = False

    def _write(self, row: MetricsRow, load: np.ndarray | None) -> None:
        for writer in (*self.writers, self._progress):
            writer.row(row, load)

    def _evaluate_only(self, state: State) -> Evaluation:
        """Evaluate and save the state of a run without steps."""
        with self._signals.awaiting(), self._watched(0):
            found = self._evaluate_first(state)
            if found is not None:
                self._save(0, state)
                self.checkpoints.wait()
            if asked := distributed.largest(self._signals.number):
                self._stop(0, state, asked)
        assert found is not None
        return found

    def _evaluate_first(self, state: State) -> Evaluation | None:
        """Evaluate before the first step, log a row of that alone, and save a state that is the best."""
        found = self._evaluate(state.model)
        if found is not None:
            self._write({"step": 0, "time": time.time(), **_validation(found)}, None)
        self._count(0, found)
        if self.validations.step == 0:
            self._save(0, state)
        elif found is not None and self.validations.exhaust(self.cfg.eval_patience):
            raise UserError(
                f"eval_patience={self.cfg.eval_patience} ends the run before step 1: the validation loss of its first "
                f"weights is {found.loss}; look at these weights, or set eval_patience above {self.validations.since}"
            )
        return found

    def _count(self, number: int, evaluation: Evaluation | None) -> None:
        """Count an evaluation, unless a signal cut it off."""
        if evaluation is not None:
            self.validations = self.validations.after(number, evaluation.loss)

    def _evaluate(self, model: LanguageModel) -> Evaluation | None:
        """Evaluate; return None if a signal comes before the last batch is computed. The run then stops as usual."""

        def on_batch(done: int, total: int) -> None:
            compiling = " and its compilation" if done == 0 else ""
            self._waiting.begin(f"batch {done + 1} of {total} of an evaluation{compiling}")
            self._progress.batches(done, total)
            if done < total and distributed.largest(self._signals.number):
                raise _Interrupted

        try:
            with self._waiting.on("an evaluation"):
                return self._evaluator(model, on_batch)
        except _Interrupted:
            return None

    def _compile(self) -> CompiledStep:
        report.print_lines([("compile", "compiling the training step; large models take minutes")])
        began = time.perf_counter()
        with naming_operations(self.cfg.profile):
            compiled = self.step.compile()
        report.print_lines([("", f"done in {time.perf_counter() - began:.1f} s")])
        return compiled

    def _is_save_due(self) -> bool:
        """Whether `checkpoint_minutes` have passed; always False on processes other than the first."""
        if not self.cfg.checkpoint_minutes or not distributed.is_first():
            return False
        wait = max(60 * self.cfg.checkpoint_minutes, _LEAST_RATIO * self.checkpoints.seconds)
        return self._clock() - self._saved_at >= wait

    def _stop(self, done: int, state: State, number: int) -> None:
        """Raise `Stopped` after step `done` because of the signal `number`; save first if step `done` is not saved."""
        name, folder = signal.Signals(number).name, self.checkpoints.folder.parent
        self.checkpoints.wait()
        if done == 0 and not distributed.first(lambda: 0 in steps(self.checkpoints.folder)):
            raise Stopped(f"stopped by {name} before its first step; nothing was saved: start again", number)
        if not distributed.first(lambda: done in steps(self.checkpoints.folder)):
            self._save(done, state)
            self.checkpoints.wait()
        more = ""
        if done == self.cfg.last_step:
            more = f" and steps above {done}, as this was the last"
        elif self.validations.exhaust(self.cfg.eval_patience):
            more = f" and eval_patience above {self.validations.since}, so many evaluations had no lower loss"
        raise Stopped(f"stopped by {name} after step {done}, saved; continue with resume={folder}{more}", number)

    def _save(self, number: int, state: State) -> None:
        for writer in self.writers:
            writer.flush()
        self._saved_at = self._clock()
        read = number * self.cfg.micro_batches
        trees: dict[str, Any] = {"model": state.model, "training": tuple(state[1:])}
        if any(jax.tree.leaves(constant := self.step.blueprint.constant)):
            frozen, trees["model"] = eqx.partition(state.model, constant)
            if self.cfg.checkpoint_frozen:
                trees[FROZEN] = as_saved_pieces(self.cfg, frozen)
                if not self.checkpoints.keeps_frozen:
                    trees["model"] = eqx.combine(trees["model"], trees.pop(FROZEN))
        loader = loader_state(read, self._source, self.seen, self._batches.places())
        about = describe_run(self.cfg, loader, record_data(self._source))
        self.checkpoints.save(number, trees, about, best=self.validations.step)

    def _check_skipped(self, number: int, metrics: Metrics) -> None:
        """Report a skipped step; raise `UserError` after too many in a row."""
        in_a_row = int(metrics.skipped_in_a_row)
        if in_a_row == 0:
            return
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        self._progress.report_skipped(number, loss, norm)
        if in_a_row >= self.cfg.guard.patience:
            self.checkpoints.wait()
            have = steps(self.checkpoints.folder)
            how = f"the last checkpoint is step {have[-1]}: continue" if have else "no step is saved: start again"
            raise UserError(
                f"steps {number - in_a_row + 1} to {number} were all skipped (loss {loss:.4g}, gradient norm "
                f"{norm:.4g}); {how} with a lower learning rate, or with other limits in guard"
            )

    def _check_rounding(self, done: int, metrics: Metrics) -> None:
        """After the first steps, of which `done` are done, say if rounding undid most changes of parameters."""
        if metrics.lost is None or done > COUNTED_STEPS:
            return
        self._lost += as_counts(metrics.lost)
        changed, lost = self._lost.tolist()
        if (done == COUNTED_STEPS or done == self.cfg.last_step) and 2 * lost > changed:
            now, then = (in_units(sum(each.values())) for each in (self.step.memory, self.step.memory_in("float32")))
            self._progress.print(
                f"warning: rounding to {self.cfg.execution.param_dtype} undid {lost / changed:.0%} of the changes that "
                f"the first {counted(done, 'step')} made to parameters; a new run with execution.param_dtype=float32 "
                f"keeps them, with {then} of parameters, gradients and optimizer state per device in place of {now}"
            )


def _row(step: int, metrics: Metrics, evaluation: Evaluation | None, seen: Mapping[str, int]) -> MetricsRow:
    values = jax.device_get(metrics)
    row: MetricsRow = {
        "step": step,
        "time": time.time(),
        "loss": float(values.loss),
        "load_balance_loss": float(values.load_balance_loss),
        "z_loss": float(values.z_loss),
        "grad_norm": float(values.gradient_norm),
        "learning_rate": float(values.learning_rate),
        **{name: float(value) for name, value in values.balance._asdict().items()},
        "dropped": int(values.dropped.sum()),
        "skipped": int(values.skipped),
    }
    if row["dropped"]:
        row["dropped_by_layer"] = values.dropped.tolist()
    if seen:
        row["tokens_by_source"] = dict(seen)
    return row if evaluation is None else row | _validation(evaluation)


def _validation(evaluation: Evaluation) -> MetricsRow:
    by_source = {name: own.loss for name, own in evaluation.by_source.items()}
    return {"val_loss": evaluation.loss} | ({"val_loss_by_source": by_source} if by_source else {})
