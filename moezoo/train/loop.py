"""`train`: from a configuration to a trained model and a run folder."""

import dataclasses
import datetime
import itertools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from moezoo.axes import trainable
from moezoo.compose import as_mapping, compose_onto, read_run, to_yaml
from moezoo.data import Batch, Source, load, train_batches, trigram_loss
from moezoo.errors import UserError
from moezoo.execution import Execution
from moezoo.mesh import make_mesh
from moezoo.models import model_shapes
from moezoo.nn.language_model import LanguageModel
from moezoo.settings import TrainConfig
from moezoo.train import report
from moezoo.train.checkpoint import Checkpoints, has_checkpoint, latest_step, restore
from moezoo.train.evaluate import Evaluation, Evaluator, to_devices
from moezoo.train.metrics import MetricsLog, Row, read_metrics
from moezoo.train.optimizer import Optimizer
from moezoo.train.pictures import load_picture, loss_picture
from moezoo.train.resume import batches_of, changes, loader_state
from moezoo.train.sample import Sample, sample
from moezoo.train.setup import execution, initial_model
from moezoo.train.step import Metrics, State, Step, check_layout

# Logged steps whose expert load the picture averages.
_LOAD_ROWS = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """What `train` returns: the model as the mesh holds it, the rows of metrics.jsonl, the folder, the last figures."""

    model: LanguageModel
    history: list[Row]
    folder: Path
    evaluation: Evaluation
    sample: Sample


def train(cfg: TrainConfig) -> Run:
    """Train as `cfg` says and leave a run folder.

    Everything that can be refused is refused, by one `UserError`, before anything is written.
    """
    cfg = dataclasses.replace(cfg, run_dir=_expanded(cfg.run_dir), resume=_expanded(cfg.resume))
    folder, start = _folder(cfg)
    changed = [] if cfg.resume is None else changes(cfg)
    run = execution(cfg)
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab)
    baseline = trigram_loss(source, limit=cfg.data.eval_sequences, seq_len=cfg.seq_len)
    step = make_step(cfg, run)

    if cfg.resume is None:
        state, batches_read, history = initial_state(cfg, run, step), 0, []
    else:
        target = step.arguments[0]
        saved = restore(
            Path(cfg.resume) / "checkpoints", start, model=target.model, training=(target.optimizer, target.step)
        )
        state, batches_read = State(saved["model"], *saved["training"]), batches_of(saved["loader"], source, cfg)
        history = read_metrics(Path(cfg.resume) / "metrics.jsonl", until=start)
    batches = train_batches(
        source,
        seq_len=cfg.seq_len,
        batch_size=cfg.batch_size // cfg.execution.microbatches,
        seed=cfg.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        start=batches_read,
    )
    resumed = [] if cfg.resume is None else [("resume", f"{cfg.resume} from step {start}")]
    resumed += [("changed", line) for line in changed]
    report.tell(report.summary(cfg, run, state, step.state_specs, source, baseline) + resumed)

    try:
        folder = _made(folder, cfg)
        (folder / "config.yaml").write_text(to_yaml(as_mapping(dataclasses.replace(cfg, run_dir=None, resume=None))))
    except OSError as error:
        raise UserError(f"run_dir={folder}: cannot write there ({error.strerror}); name another folder") from error
    log = MetricsLog(folder / "metrics.jsonl", history)
    checkpoints = Checkpoints(folder / "checkpoints")
    loop = _Loop(cfg, run, step, source, log, checkpoints)
    try:
        state, evaluation = loop.run(state, batches, start)
    finally:
        log.close()
        checkpoints.close()
    loss_picture(log.history, folder / "loss.png", unit=source.unit, baseline=baseline)
    if loop.loads:
        load_picture(
            np.sum(loop.loads, axis=0), folder / "expert_load.png", steps=f"last {len(loop.loads)} logged steps"
        )
    text = sample(state.model, source, cfg, run)
    report.tell_end(evaluation, baseline, text, folder, source.unit)
    return Run(state.model, log.history, folder, evaluation, text)


def _expanded(path: str | None) -> str | None:
    """With ~ as the user's home."""
    return None if path is None else str(Path(path).expanduser())


def _folder(cfg: TrainConfig) -> tuple[Path, int]:
    """Where this run writes, and the step it starts after."""
    if cfg.resume is not None:
        resume = Path(cfg.resume)
        start = latest_step(resume / "checkpoints")
        if start >= cfg.steps:
            raise UserError(f"resume={cfg.resume} is at step {start} and steps={cfg.steps}; set steps above {start}")
        if cfg.run_dir is None or Path(cfg.run_dir).resolve() == resume.resolve():
            return resume, start
    else:
        start = 0
    if cfg.run_dir is None:
        name = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
        return Path("runs") / name, start
    folder = Path(cfg.run_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={cfg.run_dir} is a file; name a folder")
    if any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
        continued = f", or continue it with resume={cfg.run_dir}" if has_checkpoint(folder / "checkpoints") else ""
        raise UserError(f"run_dir={cfg.run_dir} already holds a run; name another folder{continued}")
    return folder, start


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


def make_step(cfg: TrainConfig, run: Execution) -> Step:
    """The step of a run; nothing is compiled yet."""
    shapes = model_shapes(cfg.model, cfg.execution.param_dtype)
    optimizer = Optimizer(cfg.optimizer, cfg.schedule, cfg.steps, shapes)
    micro_steps = cfg.execution.microbatches
    tokens = jax.ShapeDtypeStruct((micro_steps, cfg.batch_size // micro_steps, cfg.seq_len), jnp.int32)
    return Step(shapes, optimizer, run, Batch(*(tokens,) * 4))  # type: ignore[arg-type]


def initial_state(cfg: TrainConfig, run: Execution, step: Step) -> State:
    """The state before the first step, laid out as the step needs it."""
    model, shardings = initial_model(cfg, run), step.state_shardings
    init = jax.jit(lambda m: step.optimizer.init(_trainable(m)), out_shardings=shardings.optimizer)
    return State(model, init(model), jax.device_put(np.int32(0), shardings.step))


def _trainable(model: LanguageModel) -> PyTree:
    return jax.tree.map(lambda x, keep: x if keep else None, model, trainable(model))


class _Loop:
    """The steps of a run, and what is done between them."""

    def __init__(
        self, cfg: TrainConfig, run: Execution, step: Step, source: Source, log: MetricsLog, checkpoints: Checkpoints
    ):
        self.cfg, self.step, self.log, self.checkpoints, self._source = cfg, step, log, checkpoints, source
        self.loads: list[np.ndarray] = []
        self._evaluator = Evaluator(model_shapes(cfg.model, cfg.execution.param_dtype), source, cfg, run)

    def run(self, state: State, batches: Any, start: int) -> tuple[State, Evaluation]:
        """Steps `start` + 1 to the last; evaluates and saves at the end, and as often as asked."""
        cfg = self.cfg
        check_layout(state, self.step.state_shardings)
        compiled = self.step.compile()
        tokens, since, busy = 0, start, 0.0
        evaluation = None
        with report.Progress(start, cfg.steps, bound=cfg.dispatch.bound) as progress:
            for number in range(start + 1, cfg.steps + 1):
                began = time.perf_counter()
                micro = [next(batches) for _ in range(cfg.execution.microbatches)]
                batch = to_devices(jax.tree.map(lambda *x: np.stack(x), *micro), self.step.batch_shardings.tokens)
                state, metrics = compiled(state, batch)
                # One step in flight: on the CPU, collectives of several can wait for each other forever (jax 0.10).
                jax.block_until_ready(metrics)
                busy += time.perf_counter() - began
                tokens += cfg.batch_size * cfg.seq_len
                progress.step(number)
                last = number == cfg.steps
                evaluate = last or (cfg.eval_every > 0 and number % cfg.eval_every == 0)
                if evaluate:
                    evaluation = self._evaluator(state.model)
                logged = cfg.log_every > 0 and number % cfg.log_every == 0
                if logged or evaluate or number == 1:
                    row = _row(number, metrics, tokens / busy, evaluation if evaluate else None)
                    self.log.write(row)
                    self.loads = [*self.loads, np.asarray(metrics.load)][-_LOAD_ROWS:]
                    left = busy / (number - since) * (cfg.steps - number)
                    progress.row(row, left, assignments=int(self.loads[-1].sum()))
                    tokens, since, busy = 0, number, 0.0
                if last or (cfg.checkpoint_every > 0 and number % cfg.checkpoint_every == 0):
                    read = number * cfg.execution.microbatches
                    training = (state.optimizer, state.step)
                    self.checkpoints.save(number, state.model, training, loader_state(read, self._source))
        assert evaluation is not None
        return state, evaluation


def saved_config(folder: str | Path, *overrides: str) -> TrainConfig:
    """A run's configuration with `overrides` on top. Raises `UserError` when the folder holds no run."""
    return compose_onto(read_run(folder, "run_dir"), *overrides)


def load_run(folder: str | Path, *overrides: str) -> tuple[LanguageModel, TrainConfig]:
    """The model at a run's last checkpoint, on the first device, and the run's configuration with `overrides`.

    Raises `UserError` when the folder holds no run or its files do not fit.
    """
    folder, cfg = Path(folder).expanduser(), saved_config(folder, *overrides)
    make_mesh(cfg.mesh)  # as many CPU devices as will be needed, before the first is used
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model_shapes(cfg.model, cfg.execution.param_dtype),
    )
    checkpoints = folder / "checkpoints"
    return restore(checkpoints, latest_step(checkpoints), model=target)["model"], cfg


def _row(step: int, metrics: Metrics, tokens_per_second: float, evaluation: Evaluation | None) -> Row:
    values = jax.device_get(metrics)
    row: Row = {
        "step": step,
        "loss": float(values.loss),
        "load_balance_loss": float(values.load_balance_loss),
        "z_loss": float(values.z_loss),
        "tokens_per_second": tokens_per_second,
        "grad_norm": float(values.gradient_norm),
        "learning_rate": float(values.learning_rate),
        "max_violation": float(values.max_violation),
        "dropped": int(values.dropped.sum()),
    }
    if row["dropped"]:
        row["dropped_by_layer"] = values.dropped.tolist()
    return row | ({"val_loss": evaluation.loss} if evaluation is not None else {})
