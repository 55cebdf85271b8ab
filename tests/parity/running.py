"""Run the training step of a case, and the oracle's step for the same model and batches."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_convolution
import oracle_deepseek
import oracle_delta
import oracle_grouped
import oracle_nemotron
import pytest
from blueprints import as_blueprint
from compiled import Budget, budget_of
from cover import LENGTH, OPTIMIZERS, PER_HEAD, ROWS, Balance, Case, Family, batch, config, model
from oracle_gemma4 import Gemma4, gelu_gated
from oracle_grouped import Grouped, clamped_swiglu, with_experts
from oracle_llama4 import Llama4
from oracle_rope import Rope
from oracle_router import Choice, softmax
from oracle_windowed import Windowed

from moezoo.data import Batch
from moezoo.kernels.attention import chunked
from moezoo.models import (
    DeepSeekConfig,
    Gemma4Config,
    GptOssConfig,
    GroupedConfig,
    KimiLinearConfig,
    Lfm2MoeConfig,
    Llama4Config,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Qwen35Config,
    WindowedConfig,
)
from moezoo.models.nemotron_h import kinds as nemotron_kinds
from moezoo.models.qwen3_5 import kinds
from moezoo.optim import SGD, Muon, Optimizer
from moezoo.optim.base import newest
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import TrafficTable
from moezoo.training.step import Metrics, State, Step

STEPS = 3
RATE = OPTIMIZERS["sgd"][0].learning_rate


class Observed(NamedTuple):
    """What `run_case` returns of the tested step.

    `metrics` and `gradients` have an entry for each step. `parameters`, `moments` and `bias` (the choice biases) are
    those after the last step. `traffic` is that of the traced step, `budget` that of the traced and the compiled one.
    """

    metrics: list[Metrics]
    gradients: list[oracle.Parameters]
    parameters: oracle.Parameters
    moments: oracle.Parameters
    bias: np.ndarray | None
    traffic: TrafficTable
    budget: Budget


class Expected(NamedTuple):
    """The oracle's steps and rates; after the last, its parameters, moments and family (with the choice bias)."""

    outcomes: list[oracle.Outcome]
    rates: list[float]
    parameters: oracle.Parameters
    moments: oracle.Parameters
    family: oracle.Family


class Recorded(NamedTuple):
    """The last gradient, and the state of the optimiser."""

    gradients: Any
    optimizer: Any


class GradientRecorder(Optimizer):
    """An optimiser whose state also has the last gradient: a test reads from it what the step passed to `update`."""

    def __init__(self, *args: Any):
        """Take the arguments of `Optimizer`."""
        super().__init__(*args)
        self._recorded = Optimizer(*args)

    def init(self, parameters: Any) -> Any:
        """Return zeros in the place of a gradient, and the optimiser's state."""
        return Recorded(jax.tree.map(jnp.zeros_like, parameters), self._recorded.init(parameters))

    def placements(self, parameters: Any, placements: Any) -> Any:
        """Return the placements of the parameters, which are also those of their gradients, and of the state."""
        return Recorded(placements, self._recorded.placements(parameters, placements))

    def update(
        self, gradients: Any, state: Any, parameters: Any, rate: Any, norm: Any, choose: Any = newest
    ) -> tuple[Any, Any, Any]:
        """Return the new parameters, the gradient and the new state, and the changes."""
        parameters, new, changes = self._recorded.update(gradients, state.optimizer, parameters, rate, norm, choose)
        return parameters, Recorded(choose(gradients, state.gradients), new), changes


def batch_shapes(micro_steps: int, rows: int = ROWS, length: int = LENGTH) -> Batch:
    """Return the shapes of the batch of a step, [micro-steps, rows, seq]."""
    array = jax.ShapeDtypeStruct((micro_steps, rows // micro_steps, length), jnp.int32)
    return Batch(array, array, array, array)  # type: ignore[arg-type]


class CompiledStep:
    """The compiled step of a case, and the state after the steps run so far."""

    def __init__(
        self,
        case: Case,
        optimizer: Optimizer | None = None,
        start: Any = None,
        trained: Any = None,
        execution: MeshExecution | None = None,
        rows: int = ROWS,
        adapter: Any = None,
    ):
        """Compile the step.

        Args:
            case: How the step runs.
            optimizer: `GradientRecorder` with the case's rule by default.
            start: The model before the first step; the case's own by default.
            trained: Which arrays are trained, a function of the path; `Step`'s default if None.
            execution: How the step runs, if not as `case.execution`.
            rows: The first so many rows of each batch are used.
            adapter: What `start` has been adapted with.
        """
        execution = case.execution if execution is None else execution
        start = model(case.family, case.balance) if start is None else start
        self._micro_batches, self._start, self._rows = case.micro_batches, start, rows
        placements = execution.placements(start)
        if optimizer is None:
            optimizer = GradientRecorder(case.rule, OPTIMIZERS[case.optimizer][1], STEPS, placements)
        self._optimizer = optimizer
        self.step = Step(
            as_blueprint(start, trained, adapter), self._optimizer, execution, batch_shapes(case.micro_batches, rows)
        )
        with pytest.MonkeyPatch.context() as patch:  # makes `chunked` attention cut these short rows into two blocks
            patch.setattr(chunked, "BLOCKS", (LENGTH // 2, LENGTH // 2))
            self.compiled = self.step.compile()
        self.state = self.begin()

    def begin(self) -> State:
        """Return the state before the first step, in new arrays."""
        # Through NumPy: `device_put` of a JAX array may share memory with it, and the step deletes its arguments.
        shardings = self.step.state_shardings
        fresh = jax.device_put(jax.tree.map(np.asarray, self._start), shardings.model)
        rest = jax.jit(lambda m: self.step.begin(m)[1:], out_shardings=tuple(shardings[1:]))
        return State(fresh, *rest(fresh))

    @property
    def gradients(self) -> Any:
        """The gradient of the last step, where `GradientRecorder` kept it."""
        return self.state.optimizer.gradients

    def batch(self, number: int) -> Batch:
        """Return the batch of step `number` on the devices, cut into micro-steps."""
        cut = {name: x[: self._rows].reshape(self._micro_batches, -1, LENGTH) for name, x in batch(number).items()}
        return self.step.feed()(Batch(**cut))

    def __call__(self, number: int) -> Metrics:
        """Run step `number` from the present state, keep the new state, and return the metrics."""
        self.state, metrics = jax.block_until_ready(self.compiled(self.state, self.batch(number)))
        return jax.device_get(metrics)


def parameters_of(family: Family, model: Any) -> oracle.Parameters:
    """Return the arrays of a model, or of its gradients or moments, by the oracle's names, in float64."""
    others: dict[type, Any] = {
        DeepSeekConfig: oracle_deepseek,
        KimiLinearConfig: oracle_delta,
        Qwen35Config: oracle_delta,
        NemotronHConfig: oracle_nemotron,
        Lfm2MoeConfig: oracle_convolution,
    }
    return others.get(type(config(family)), oracle_grouped).parameters_of(model)


def moments_of(case: Case, state: Any, like: Any) -> oracle.Parameters:
    """Return the moments of an optimiser's state by the oracle's names; `like` is a model."""
    if case.optimizer == "sgd":
        return {}
    adam = state["adamw" if case.optimizer == "muon" else "all"][0]
    first = eqx.combine(adam.mu, state["muon"].momentum) if case.optimizer == "muon" else adam.mu
    zeros = jax.tree.map(jnp.zeros_like, like)
    by_name = {
        order: parameters_of(case.family, eqx.combine(tree, zeros)) for order, tree in (("1", first), ("2", adam.nu))
    }
    return {f"{name} {order}": x for order, arrays in by_name.items() for name, x in arrays.items()}


def run_case(case: Case) -> Observed:
    """Run `STEPS` steps as the case says."""
    compiled, metrics, gradients = CompiledStep(case), [], []
    for number in range(STEPS):
        metrics.append(compiled(number))
        gradients.append(parameters_of(case.family, compiled.gradients))
    after: Any = compiled.state.model
    traffic = collective_traffic(compiled.step.traced.jaxpr)
    parameters, bias = parameters_of(case.family, after), oracle_deepseek.bias_of(after)
    moments = moments_of(case, compiled.state.optimizer.optimizer, after)
    return Observed(
        metrics, gradients, parameters, moments, bias, traffic, budget_of(compiled.step, compiled.compiled.program)
    )


def _rope(base: float, y: Any, *, interleaved: bool = False) -> Rope:
    """Return the oracle's rotary positions for a model's `yarn` settings."""
    return Rope(base, interleaved, y.factor, y.length, y.beta_fast, y.beta_slow, y.mscale, y.mscale_all, y.truncate)


def oracle_family(family: Family, balance: Balance) -> oracle.Family:
    """Return the oracle's family for a tiny model: its layers and the settings that its arrays do not show."""
    c = config(family, balance)
    losses = oracle.Losses(c.load_balance, c.z_loss, c.load_balance_over)
    if isinstance(c, DeepSeekConfig | KimiLinearConfig):
        return _deepseek(c, losses, oracle_deepseek.bias_of(model(family, balance)))
    common: dict[str, Any] = {
        "experts_per_token": c.experts_per_token,
        "sparse": with_experts(c.layers),
        "rope": Rope(getattr(c, "rope_base", 1.0)),
        "norm_eps": c.norm_eps,
        "choice": softmax(renormalised=True),
        "window": None,
        "clip": None,
        "losses": losses,
    }
    different: dict[str, Any] = {}
    if isinstance(c, MixtralConfig):
        different = {"window": c.window}
    elif isinstance(c, GroupedConfig):
        sparse = with_experts(c.layers, c.moe_every, c.mlp_layers)
        rope = _rope(c.rope_base, c.yarn, interleaved=c.rope_pairs == "interleaved")
        different = {"sparse": sparse, "rope": rope, "window": c.window}
        different |= {"choice": _choice(c.router), "rotary_dims": c.rotary_dims}
        different |= _bias(family, balance) if c.router.choice_bias == "learned" else {}
    elif isinstance(c, Qwen35Config):
        attends = [i for i, (mixer, _) in enumerate(kinds(c)[0]) if mixer == "attention"]
        different = {"choice": _choice(c.router), "rotary_dims": c.rotary_dims, "attends": attends}
        different["sparse"] = with_experts(c.layers, c.moe_every, c.mlp_layers)
        return oracle_delta.Qwen35(**{**common, **different})
    elif isinstance(c, NemotronHConfig):
        pattern, bias = "".join(*nemotron_kinds(c)), oracle_deepseek.bias_of(model(family, balance))
        assert bias is not None
        different = {"choice": _choice(c.router), "bias": bias.astype(np.float64), "bias_rate": c.router.bias_rate}
        return oracle_nemotron.NemotronH(**{**common, **different}, pattern=pattern)
    elif isinstance(c, Llama4Config):
        choice = Choice("sigmoid", 1, 1, "max", renormalised=False, scale=1.0)
        different = {"choice": choice, "stretch": c.stretch, "plain": c.plain_layers}
        different["query_scale"] = c.query_scale.beta, c.query_scale.length
        different["rope"] = Rope(c.rope_base, interleaved=True)
        return Llama4(**{**common, **different})
    elif isinstance(c, Lfm2MoeConfig):
        assert c.attention_layers is not None
        different = {"choice": _choice(c.router), "attends": c.attention_layers}
        different["sparse"] = with_experts(c.layers, without=range(c.dense_layers))
        return oracle_convolution.Lfm2(**{**common, **different, **_bias(family, balance)})
    elif isinstance(c, OlmoeConfig):
        different = {"clip": c.clip_qkv, "choice": _choice(c.router)}
    elif isinstance(c, GptOssConfig):
        different = {"rope": _rope(c.rope_base, c.yarn), "window": c.window, "full": range(1, c.layers, 2)}
        different["activation"] = clamped_swiglu(c.swiglu_alpha, c.swiglu_limit)
    elif isinstance(c, Gemma4Config):
        different = {"window": c.window, "full": (c.layers - 1,), "activation": gelu_gated, "score_scale": 1.0}
        different |= {"embedding_factor": c.embed**0.5, "logit_cap": c.logit_cap, "scales": _scales(family, balance)}
        full = Rope(c.full_rope_base, share=c.full_rope_share)
        return Gemma4(**{**common, **different}, full_rope=full)
    elif isinstance(c, WindowedConfig):
        different = {"window": c.window, "full": (0,), "choice": _choice(c.router), "rotary_dims": c.rotary_dims}
        assert c.full_rope_base is not None
        different |= {"value_scale": c.value_scale, "full_rope": Rope(c.full_rope_base), **_bias(family, balance)}
        return Windowed(**{**common, **different})
    return Grouped(**{**common, **different})


def _bias(family: Family, balance: Balance) -> dict[str, Any]:
    bias = oracle_deepseek.bias_of(model(family, balance))
    assert bias is not None
    c: Any = config(family, balance)
    return {"bias": bias.astype(np.float64), "bias_rate": c.router.bias_rate}


def _scales(family: Family, balance: Balance) -> np.ndarray:
    found = oracle.stacked(model(family, balance), "scale")
    assert found is not None
    return found[:, 0].astype(np.float64)


def _choice(r: Any) -> Choice:
    """Return the oracle's router for a model's `router` settings."""
    gates = r.gates == "renormalised"
    return Choice(r.score, r.groups, r.kept_groups, r.group_score, gates, r.scale, r.least_sum, r.added_to_sum)


def _deepseek(c: DeepSeekConfig | KimiLinearConfig, losses: oracle.Losses, bias: np.ndarray | None) -> oracle.Family:
    r = c.router
    settings: dict[str, Any] = {
        "experts_per_token": c.experts_per_token,
        "dense_layers": c.dense_layers,
        "nope_dim": c.nope_dim,
        "choice": _choice(r),
        "bias": np.zeros((c.layers - c.dense_layers, c.experts)) if bias is None else bias.astype(np.float64),
        "bias_rate": 0.0 if bias is None else r.bias_rate,
        "norm_eps": c.norm_eps,
        "losses": losses,
    }
    if isinstance(c, KimiLinearConfig):
        assert c.attention_layers is not None
        return oracle_delta.KimiLinear(**settings, rope=None, attends=c.attention_layers)
    rope = _rope(c.rope_base, c.yarn, interleaved=c.rope_pairs == "interleaved")
    scale = c.query_scale.beta, c.query_scale.length
    return oracle_deepseek.DeepSeek(**settings, rope=rope, query_scale=scale)


@functools.cache
def _first_outcome(family: Family, balance: Balance, micro_steps: int) -> oracle.Outcome:
    """Return the oracle's first step, which does not depend on the optimizer."""
    parameters = parameters_of(family, model(family, balance))
    return oracle.differentiate(parameters, batch(0), micro_steps, oracle_family(family, balance))


@functools.cache
def expected(family: Family, balance: Balance, micro_steps: int, optimizer: str = "sgd") -> Expected:
    """Return the oracle's `STEPS` steps, which depend on no mesh, strategy, rules or remat."""
    settings, parameters = oracle_family(family, balance), parameters_of(family, model(family, balance))
    rule, outcomes, rates = oracle_optimizer(optimizer, family, parameters), [], []
    for number in range(STEPS):
        first = _first_outcome(family, balance, micro_steps) if number == 0 else None
        outcomes.append(first or oracle.differentiate(parameters, batch(number), micro_steps, settings))
        peak = OPTIMIZERS[optimizer][0].learning_rate
        rates.append(peak if optimizer == "sgd" else oracle.cosine_rate(peak, 1, STEPS, 0.1, number))
        parameters = rule.update(parameters, outcomes[-1], rates[-1])
        settings = settings.after_step(outcomes[-1].load)
    return Expected(outcomes, rates, parameters, rule.moments(), settings)


def oracle_optimizer(optimizer: str, family: Family, parameters: oracle.Parameters) -> Any:
    """Return the oracle's optimiser with the settings of `OPTIMIZERS`, and moments of zero."""
    rule: Any = OPTIMIZERS[optimizer][0]
    if isinstance(rule, SGD):
        return oracle.SGD()
    zeros = {name: np.zeros_like(p) for name, p in parameters.items()}
    constants = (rule.beta1, rule.beta2, rule.epsilon, rule.weight_decay, rule.clip_norm)
    adamw = oracle.AdamW(*constants, dict(zeros), dict(zeros))
    if not isinstance(rule, Muon):
        return adamw
    buffers = {name: zeros[name] for name in oracle.muon_names(parameters)}
    return oracle.Muon(rule.momentum, family in PER_HEAD, adamw, buffers)


def worst_error(found: oracle.Parameters, wanted: oracle.Parameters) -> float:
    """Return the largest difference in any array, relative to the largest absolute value of that array."""
    assert set(found) == set(wanted)
    assert all(np.isfinite(x).all() for x in found.values())
    return max((float(abs(found[name] - w).max() / abs(w).max()) for name, w in wanted.items()), default=0.0)
