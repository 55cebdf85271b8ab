"""Running the real step as a case says, and the oracle beside it."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cover import LENGTH, ROWS, Balance, Case, batch, config, model

from moezoo.axes import trainable
from moezoo.data import Batch
from moezoo.settings import SGD, Constant
from moezoo.train.optimizer import Optimizer
from moezoo.train.step import Metrics, State, Step

STEPS, RATE = 3, 0.1


class Observed(NamedTuple):
    """Each of the steps' figures and gradients, and the parameters after the last."""

    metrics: list[Metrics]
    gradients: list[oracle.Parameters]
    parameters: oracle.Parameters


class Recording(Optimizer):
    """Gradient descent whose state is the last gradient, so that a test reads what the real step gave its optimiser."""

    def init(self, parameters: Any) -> Any:
        """No gradient yet."""
        return jax.tree.map(jnp.zeros_like, parameters)

    def specs(self, parameters: Any, specs: Any) -> Any:
        """A gradient lies as its parameter."""
        return specs

    def update(self, gradients: Any, state: Any, parameters: Any, rate: Any, norm: Any) -> tuple[Any, Any]:
        """As gradient descent, and keep the gradient."""
        parameters, _ = super().update(gradients, super().init(parameters), parameters, rate, norm)
        return parameters, gradients


@functools.cache
def fast_options() -> dict[str, Any]:
    """Options that make XLA compile a step on the CPU in a third of the time or less: the code runs once, for moments.

    They leave the program and its collectives alone, and only translate it to machine code with less care.
    """
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    more = options | {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=more)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return options  # newer versions have no such choice
    return more


def shapes(micro_steps: int, rows: int = ROWS, length: int = LENGTH) -> Batch:
    """The shape of a step's batch."""
    one = jax.ShapeDtypeStruct((micro_steps, rows // micro_steps, length), jnp.int32)
    return Batch(one, one, one, one)  # type: ignore[arg-type]


class Running:
    """A compiled step of a case, and its state so far."""

    def __init__(self, case: Case, optimizer: Optimizer | None = None, start: Any = None):
        """`start` is a model; its optimiser is by default gradient descent whose state is the last gradient."""
        start = model(case.balance) if start is None else start
        self._micro_steps, self._start = case.microbatches, start
        self._optimizer = optimizer or Recording(SGD(RATE), Constant(), STEPS, start)
        self.step = Step(start, self._optimizer, case.execution, shapes(case.microbatches))
        self._compiled = self.step.function.lower(*self.step.arguments).compile(compiler_options=fast_options())
        self.state = self.begin()

    def begin(self) -> State:
        """The state before the first step, in new arrays."""
        # Through NumPy: a copy on devices may share memory with the original, and the step deletes what it is given.
        shardings, optimizer = self.step.state_shardings, self._optimizer
        fresh = jax.device_put(jax.tree.map(np.asarray, self._start), shardings.model)
        init = jax.jit(lambda m: optimizer.init(eqx.filter(m, trainable(m))), out_shardings=shardings.optimizer)
        return State(fresh, init(fresh), jax.device_put(np.int32(0), shardings.step))

    def batch(self, number: int) -> Batch:
        """The batch of a step, cut in micro-steps, on the devices."""
        cut = {name: x.reshape(self._micro_steps, -1, LENGTH) for name, x in batch(number).items()}
        return jax.device_put(Batch(**cut), self.step.batch_shardings)

    def __call__(self, number: int) -> Metrics:
        """One step."""
        self.state, metrics = self._compiled(self.state, self.batch(number))
        return jax.device_get(metrics)


def observe(case: Case) -> Observed:
    """Run the steps of a case."""
    running, metrics, gradients = Running(case), [], []
    for number in range(STEPS):
        metrics.append(running(number))
        gradients.append(oracle.parameters_of(running.state.optimizer))
    return Observed(metrics, gradients, oracle.parameters_of(running.state.model))


def oracle_sizes(balance: Balance) -> oracle.Sizes:
    """What the oracle is told of the model."""
    c = config(balance)
    return oracle.Sizes(
        c.experts_per_token, c.rope_base, c.norm_eps, c.window, c.load_balance, c.z_loss, c.load_balance_over
    )


@functools.cache
def expected(balance: Balance, micro_steps: int) -> tuple[list[oracle.Outcome], oracle.Parameters]:
    """The oracle's steps and its parameters after the last: once a configuration, as no mesh or strategy enters."""
    parameters, outcomes = oracle.parameters_of(model(balance)), []
    for number in range(STEPS):
        outcomes.append(oracle.differentiate(parameters, batch(number), micro_steps, oracle_sizes(balance)))
        parameters = oracle.sgd(parameters, outcomes[-1].gradients, RATE)
    return outcomes, parameters


def worst(found: oracle.Parameters, wanted: oracle.Parameters) -> float:
    """The largest difference in any array, relative to the largest value of that array."""
    assert set(found) == set(wanted)
    assert all(np.isfinite(x).all() for x in found.values())
    return max(float(abs(found[name] - w).max() / abs(w).max()) for name, w in wanted.items())
