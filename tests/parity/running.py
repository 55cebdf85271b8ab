"""Running the real step as a case says, and the oracle beside it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_deepseek
import oracle_grouped
import pytest
from cover import LENGTH, ROWS, Balance, Case, Family, batch, config, model
from oracle_grouped import Grouped, with_experts
from oracle_rope import Rope

from moezoo.data import Batch
from moezoo.kernels.attention import chunked
from moezoo.models import DeepSeekConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import TrafficTable
from moezoo.training.step import Metrics, State, Step

STEPS, RATE = 3, 0.1


class Observed(NamedTuple):
    """The metrics and gradients of each step, the parameters and choice biases after the last, and the traffic."""

    metrics: list[Metrics]
    gradients: list[oracle.Parameters]
    parameters: oracle.Parameters
    bias: np.ndarray | None
    traffic: TrafficTable


class Expected(NamedTuple):
    """The oracle's steps, and what it has after the last."""

    outcomes: list[oracle.Outcome]
    parameters: oracle.Parameters
    family: oracle.Family


class Recording(Optimizer):
    """Gradient descent whose state is the last gradient, so that a test reads what the real step gave its optimiser."""

    def init(self, parameters: Any) -> Any:
        """No gradient yet."""
        return jax.tree.map(jnp.zeros_like, parameters)

    def placements(self, parameters: Any, placements: Any) -> Any:
        """A gradient lies as its parameter."""
        return placements

    def update(self, gradients: Any, state: Any, parameters: Any, rate: Any, norm: Any) -> tuple[Any, Any]:
        """As gradient descent, and keep the gradient."""
        parameters, _ = super().update(gradients, super().init(parameters), parameters, rate, norm)
        return parameters, gradients


def shapes(micro_steps: int, rows: int = ROWS, length: int = LENGTH) -> Batch:
    """The shape of a step's batch."""
    one = jax.ShapeDtypeStruct((micro_steps, rows // micro_steps, length), jnp.int32)
    return Batch(one, one, one, one)  # type: ignore[arg-type]


class Running:
    """A compiled step of a case, and its state so far."""

    def __init__(self, case: Case, optimizer: Optimizer | None = None, start: Any = None, trained: Any = None):
        """`start` is a model; its optimiser is by default gradient descent whose state is the last gradient."""
        start = model(case.family, case.balance) if start is None else start
        self._micro_steps, self._start = case.microbatches, start
        placements = case.execution.placements(start)
        self._optimizer = optimizer or Recording(SGD(RATE), Constant(), STEPS, placements)
        self.step = Step(start, self._optimizer, case.execution, shapes(case.microbatches), trained=trained)
        with pytest.MonkeyPatch.context() as patch:  # several blocks a row, where attention is cut into blocks
            patch.setattr(chunked, "_BLOCKS", (LENGTH // 2, LENGTH // 2))
            self._compiled = self.step.compile()
        self.state = self.begin()

    def begin(self) -> State:
        """The state before the first step, in new arrays."""
        # Through NumPy: a copy on devices may share memory with the original, and the step deletes what it is given.
        shardings = self.step.state_shardings
        fresh = jax.device_put(jax.tree.map(np.asarray, self._start), shardings.model)
        rest = jax.jit(lambda m: self.step.begin(m)[1:], out_shardings=tuple(shardings[1:]))
        return State(fresh, *rest(fresh))

    def batch(self, number: int) -> Batch:
        """The batch of a step, cut in micro-steps, on the devices."""
        cut = {name: x.reshape(self._micro_steps, -1, LENGTH) for name, x in batch(number).items()}
        return jax.device_put(Batch(**cut), self.step.batch_shardings)

    def __call__(self, number: int) -> Metrics:
        """One step."""
        self.state, metrics = jax.block_until_ready(self._compiled(self.state, self.batch(number)))
        return jax.device_get(metrics)


def parameters_of(family: Family, model: Any) -> oracle.Parameters:
    """The arrays of a model (or of gradients, or moments) by the oracle's names."""
    return (oracle_deepseek if family.startswith("deepseek") else oracle_grouped).parameters_of(model)


def observe(case: Case) -> Observed:
    """Run the steps of a case."""
    running, metrics, gradients = Running(case), [], []
    for number in range(STEPS):
        metrics.append(running(number))
        gradients.append(parameters_of(case.family, running.state.optimizer))
    after: Any = running.state.model
    traffic = collective_traffic(running.step.traced.jaxpr)
    return Observed(metrics, gradients, parameters_of(case.family, after), oracle_deepseek.bias_of(after), traffic)


def _rope(base: float, yarn: Any, *, interleaved: bool = False) -> Rope:
    y = yarn
    return Rope(base, interleaved, y.factor, y.length, y.beta_fast, y.beta_slow, y.mscale, y.mscale_all)


def oracle_family(family: Family, balance: Balance) -> oracle.Family:
    """What the oracle is told of the model."""
    c = config(family, balance)
    losses = oracle.Losses(c.load_balance, c.z_loss, c.load_balance_over)
    if isinstance(c, DeepSeekConfig):
        return _deepseek(c, losses, oracle_deepseek.bias_of(model(family, balance)))
    common: dict[str, Any] = {
        "experts_per_token": c.experts_per_token,
        "sparse": with_experts(c.layers),
        "rope": Rope(c.rope_base),
        "norm_eps": c.norm_eps,
        "renormalised": True,
        "window": None,
        "clip": None,
        "losses": losses,
    }
    own: dict[str, Any] = {}
    if isinstance(c, MixtralConfig):
        own = {"window": c.window}
    elif isinstance(c, Qwen3MoeConfig):
        sparse = with_experts(c.layers, c.moe_every, c.mlp_layers)
        own = {"sparse": sparse, "rope": _rope(c.rope_base, c.yarn), "window": c.window}
        own["renormalised"] = c.router.gates == "renormalised"
    elif isinstance(c, OlmoeConfig):
        own = {"clip": c.clip_qkv, "renormalised": c.router.gates == "renormalised"}
    return Grouped(**{**common, **own})


def _deepseek(c: DeepSeekConfig, losses: oracle.Losses, bias: np.ndarray | None) -> oracle.Family:
    r = c.router
    return oracle_deepseek.DeepSeek(
        c.experts_per_token,
        c.dense_layers,
        c.nope_dim,
        _rope(c.rope_base, c.yarn, interleaved=c.rope_pairs == "interleaved"),
        oracle_deepseek.Choice(r.score, r.groups, r.kept_groups, r.group_score, r.gates == "renormalised", r.scale),
        np.zeros((c.layers - c.dense_layers, c.experts)) if bias is None else bias.astype(np.float64),
        0.0 if bias is None else r.bias_rate,
        c.norm_eps,
        losses,
    )


@functools.cache
def expected(family: Family, balance: Balance, micro_steps: int) -> Expected:
    """The oracle's steps: once a configuration, as no mesh or strategy enters."""
    known, parameters, outcomes = oracle_family(family, balance), parameters_of(family, model(family, balance)), []
    for number in range(STEPS):
        outcomes.append(oracle.differentiate(parameters, batch(number), micro_steps, known))
        parameters = oracle.sgd(parameters, outcomes[-1].gradients, RATE)
        known = known.after_step(outcomes[-1].load)
    return Expected(outcomes, parameters, known)


def worst(found: oracle.Parameters, wanted: oracle.Parameters) -> float:
    """The largest difference in any array, relative to the largest value of that array."""
    assert set(found) == set(wanted)
    assert all(np.isfinite(x).all() for x in found.values())
    return max(float(abs(found[name] - w).max() / abs(w).max()) for name, w in wanted.items())
