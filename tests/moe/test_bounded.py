"""Strategies with a bound, against a loop over the assignments that fit by their definition."""

import math

import numpy as np
import pytest
from dispatch_cases import BOUNDS, LAYOUTS, Case, assign, compare
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moezoo.errors import UserError
from moezoo.moe.dispatch import STRATEGIES, Capacity, ExpertGroup, Ragged, Ring


def devices(case):
    """Return the tokens of each device of each expert group, in order; None is padding of a share."""
    axes = LAYOUTS[case.group].shape
    groups = math.prod(axes.values()) // case.group if axes else 1
    shards = np.arange(case.tokens).reshape(groups, -1).tolist()
    share = -(-len(shards[0]) // case.group)
    padded = [shard + [None] * (share * case.group - len(shard)) for shard in shards]
    return [[shard[i * share : (i + 1) * share] for i in range(case.group)] for shard in padded]


def chosen(experts, tokens, wanted):
    """Return the assignments of `tokens` to the expert `wanted`, in order."""
    return [(t, c) for t in tokens if t is not None for c, e in enumerate(experts[t]) if e == wanted]


def drops(case, experts):
    """Mark the assignments without room, by the definition of the strategy."""
    lost, local = np.zeros(experts.shape, bool), case.experts // case.group
    for group in devices(case):
        share = len(group[0])
        most = case.group * share * min(case.k, local)
        room = min(most, math.ceil(case.factor * share * case.k))
        for receiver in range(case.group):
            here = range(receiver * local, (receiver + 1) * local)
            if case.strategy == "ragged":  # by sender, then by expert
                queue = [a for tokens in group for e in here for a in chosen(experts, tokens, e)]
                room = most if case.group == 1 else room  # nothing is received
            else:  # by expert, then by sender
                queue = [a for e in here for tokens in group for a in chosen(experts, tokens, e)]
            if case.strategy == "capacity":  # by choice, then by token, for each sender and expert
                capacity = min(share, math.ceil(case.factor * share * case.k / case.experts))
                for tokens in group:
                    for e in here:
                        for assignment in sorted(chosen(experts, tokens, e), key=lambda a: (a[1], a[0]))[capacity:]:
                            lost[assignment] = True
            else:
                for assignment in queue[room:]:
                    lost[assignment] = True
    return lost


# 5 tokens per device of a group; 26 replicated ones do not divide, so shares are padded.
CASES = [
    Case(strategy, group, spread, tokens, 8, 2, factor)
    for strategy in BOUNDS
    for group, spread, tokens, factor in [(1, "split", 24, 0.7), (4, "split", 40, 0.5), (8, "split", 40, 1.25)]
]
# Tokens are replicated by one wrapper, whatever the strategy.
CASES += [Case("capacity", 4, "replicated", 26, 8, 2, 0.75)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.strategy}-{c.spread}-{c.group}-{c.factor}")
def test_drops_what_its_definition_says_and_nothing_else(case):
    """Outputs, counts and every gradient: what is dropped contributes to none of them."""
    seen = []

    @settings(max_examples=8)
    @given(allowed=st.sets(st.integers(0, 7), min_size=1), padding=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 99))
    @example(allowed={5, 6}, padding=0.0, seed=0)
    @example(allowed=set(range(8)), padding=0.0, seed=0)
    def examples(allowed, padding, seed):
        seen.append(drops(case, assign(case, [e % 8 for e in allowed], padding, seed)).sum())
        compare(case, allowed, padding, seed, drops)

    examples()
    if (case.strategy, case.group) != ("ragged", 1):
        assert max(seen) > 0


@pytest.mark.parametrize("strategy", BOUNDS)
def test_a_bound_at_which_nothing_can_drop_is_none(strategy):
    case = Case(strategy, 4, "split", 40, 8, 2, 8.0)
    assert not drops(case, assign(case, [3, 4], 0.0, 0)).any()
    compare(case, [3, 4], 0.0, 0)
    # A larger factor gives no more room, so the same program.
    group = ExpertGroup(("expert",), 4, 8)
    loose, exact = (case._replace(factor=factor).dispatch for factor in (1000.0, None))
    assert loose.rows(5, 2, group) == case.dispatch.rows(5, 2, group) == exact.rows(5, 2, group)


@pytest.mark.parametrize(
    ("kind", "name"), [(Capacity, "capacity_factor"), (Ragged, "buffer_factor"), (Ring, "buffer_factor")]
)
def test_refuses_a_bound_that_is_not_a_positive_number(kind, name):
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"dispatch.{name}={factor}(: expected a number| must be above 0)"):
            kind(**{name: factor})
    assert getattr(kind(**{name: 0.5}).exact, name) is None


def test_the_others_have_no_bound():
    for name in set(STRATEGIES) - set(BOUNDS):
        assert STRATEGIES[name]().exact == STRATEGIES[name]()
