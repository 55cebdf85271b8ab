"""Steps with dropout of what low-rank pairs read.

The products are tested in tests/parallel/test_dropout.py. Here a step on one device must use the keys and numbers
of the definition, and steps on eight devices must equal it.
"""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import EXTRA_CASES, LENGTH, ROWS, Case, cover
from running import CompiledStep, GradientRecorder, worst_error
from test_adapted_steps import ADAPTER, STEPS, TOLERANCE, adapted, pairs_of

from moezoo.models.layers import layer_addresses
from moezoo.optim import SGD, Constant
from moezoo.parallel.dropout import Dropout, mix
from moezoo.parallel.low_rank import pairs_by_path
from moezoo.parallel.pipeline import Circular

DROPS = dataclasses.replace(ADAPTER, dropout=0.5)
# Numbers of tokens travel with latents by an all-gather or on a ring; inputs are split over devices;
# tokens are in the balanced order; layers are computed again.
CASES = [
    Case("ring", "fsdp2_ep2_context2", "fsdp_ep", "full", 2, "batch", "deepseek", "sgd", "ring"),
    Case("ragged", "ep2_context2_tensor2", "tensor", "dots", 2, "batch", "deepseek", "sgd", "gather"),
    Case("ring", "stage2_ep4", "fsdp_ep", "full", 1, "batch", "deepseek", pipeline=Circular(2)),
]


def run(case: Case) -> list[tuple[Any, Any]]:
    """Return the metrics and the gradients of two steps with the same batch."""
    start = adapted(case.family, case.balance)
    recorder = GradientRecorder(SGD(0.02), Constant(), STEPS, case.execution.placements(start))
    steps = CompiledStep(case, recorder, start=start, adapter=DROPS)
    return [(steps(0), pairs_of(case.family, steps.gradients)) for _ in range(STEPS)]


# What each product with a pair dropped by: two words of the key, and the numbers of the tokens.
ASKED: list[tuple[tuple[int, ...], np.ndarray]] = []


@functools.cache
def on_one_device(family: str, balance: Any, micro_steps: int) -> list[tuple[Any, Any]]:
    """Return what `run` returns for one device, and add to `ASKED`."""

    def drop(dropout: Dropout, x: Any) -> Any:
        jax.debug.callback(
            lambda *asked: ASKED.append((tuple(asked[0].tolist()), asked[1])), dropout.key, dropout.token
        )
        return really(dropout, x)

    with pytest.MonkeyPatch.context() as patch:
        really = Dropout.__call__
        patch.setattr(Dropout, "__call__", drop)
        found = run(Case("gather", "single", "fsdp_ep", "none", micro_steps, balance, family))
        jax.effects_barrier()
    return found


def compare(case: Case) -> None:
    wanted = on_one_device(case.family, case.balance, case.micro_batches)
    for (metrics, gradients), (its, theirs) in zip(run(case), wanted, strict=True):
        np.testing.assert_array_equal(metrics.load, its.load)
        for name in ("loss", "gradient_norm"):
            assert float(getattr(metrics, name)) == pytest.approx(float(getattr(its, name)), rel=TOLERANCE)
        assert worst_error(gradients, theirs) < TOLERANCE


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.pipeline else pytest.mark.weekly) for case in CASES],
    ids=str,
)
def test_every_mesh_drops_the_same(case):
    compare(case)


def part(key: np.ndarray, number: int) -> np.ndarray:
    """Return the key of a part, as tests/parallel/test_dropout.py tests it."""
    words = mix(jnp.asarray([number, number ^ 1], jnp.uint32))
    return np.asarray(mix(jnp.asarray(key) + words))


def test_each_step_micro_step_layer_and_weight_has_its_own_key():
    (one, _), (two, _) = on_one_device("deepseek", "batch", 2)
    assert abs(float(one.loss) / float(two.loss) - 1) > 1e-3
    model, wanted, tokens = adapted("deepseek"), set(), ROWS // 2 * LENGTH
    for step in range(STEPS):
        of_step = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(0), step)))
        for address in layer_addresses(model.stacks):
            block = model.stacks[address.stack].blocks[address.kind]
            keys = [part(part(of_step, micro), address.number) for micro in range(2)]
            wanted |= {
                tuple(part(key, zlib.crc32(path.encode())).tolist())
                for path, _ in pairs_by_path(block)
                if ".experts." not in path
                for key in keys
            }
    assert {key for key, _ in ASKED} == wanted
    assert len(wanted) == 2 * STEPS * 3 * 9  # six of attention, and three of an MLP or of shared experts
    for _, numbers in ASKED:
        np.testing.assert_array_equal(numbers, np.arange(tokens).reshape(-1, LENGTH))


@pytest.mark.full
@pytest.mark.parametrize("case", [*cover(), *EXTRA_CASES], ids=str)
def test_on_the_cover(case):
    compare(case)
