"""Every dispatch strategy alone, between expert weights and the experts, against a loop over tokens and choices."""

import pytest
from dispatch_cases import Case, compare
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moezoo.moe.dispatch import STRATEGIES

TOKENS_MOVE = [name for name, strategy in STRATEGIES.items() if strategy.moves == "tokens"]
# 40 tokens are 5 per device; 26 replicated ones are 13 per batch shard, or 26, which no group divides. The number of
# experts per device does not matter where weights move. Tokens are replicated by one wrapper, whatever the strategy.
CASES = [Case(name, 1, "split", 24, 8, 2) for name in STRATEGIES]
CASES += [Case(name, 4, "split", 40, 8, 2) for name in STRATEGIES]
CASES += [Case(name, 4, "replicated", 26, 8, 2) for name in ("gather", "ring")]
CASES += [Case(name, 8, "split", 40, 8, 2) for name in TOKENS_MOVE] + [Case("ragged", 8, "replicated", 26, 8, 2)]
# One token per device, or one per expert group, that chooses all experts.
CORNERS = [Case(name, 4, "split", 8, 4, 4) for name in STRATEGIES]
CORNERS += [Case("ring", 4, "replicated", 2, 4, 4)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.spread}-{case.group}")
def test_equals_the_loop(case):
    """Output, counts and gradients; padding tokens, which go nowhere, have zeros in all of them to the bit."""

    @settings(max_examples=12)
    @given(
        allowed=st.sets(st.integers(0, case.experts - 1), min_size=1),
        padding=st.sampled_from([0.0, 0.3, 1.0]),
        seed=st.integers(0, 99),
    )
    @example(allowed={5}, padding=0.0, seed=0)  # all tokens on one expert
    @example(allowed=set(range(8)), padding=0.0, seed=0)
    def examples(allowed, padding, seed):
        compare(case, allowed, padding, seed)

    examples()


@pytest.mark.parametrize("case", CORNERS, ids=lambda case: f"{case.strategy}-{case.spread}")
def test_few_tokens_that_choose_all_experts(case):
    for allowed, padding in (({0, 1, 2, 3}, 0.0), ({3}, 0.0), ({0, 1, 2, 3}, 1.0)):
        compare(case, allowed, padding, seed=0)
