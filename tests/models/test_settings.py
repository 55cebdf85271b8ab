"""Numbers that no setting may be, for every dataclass of settings, in Python as from a configuration."""

import dataclasses
import math
import typing

import pytest
from refusals import refused

import moezoo
from moezoo.config.settings import TAG, ExecutionSettings, GuardSettings
from moezoo.generation.sampling import Sampling
from moezoo.moe.router import Choice
from moezoo.nn.rotary import QueryScale, Yarn
from moezoo.parallel.mesh import MeshShape
from moezoo.typed import types_of

SETTINGS = [(section, kind) for section, (_, kinds) in TAG.items() for kind in kinds.values()]
SETTINGS += [
    ("model.router", Choice),
    ("model.yarn", Yarn),
    ("model.query_scale", QueryScale),
    ("mesh", MeshShape),
    ("guard", GuardSettings),
]
SETTINGS += [("execution", ExecutionSettings), ("", Sampling)]


@pytest.mark.parametrize(
    ("section", "kind"), SETTINGS, ids=[f"{section} {kind.__name__}" for section, kind in SETTINGS]
)
def test_numbers_that_are_not_finite_or_too_large(section, kind):
    """Every number field refuses them by name."""
    for name, hint in types_of(kind).items():
        kinds = typing.get_args(hint) or (hint,)
        key = f"{section}.{name}".strip(".")
        if float in kinds:
            for value in (math.nan, math.inf):
                with refused(f"{key}={value}: expected a number"):
                    kind(**{name: value})
        if kinds[0] is int and ... not in kinds:
            with refused(f"{key}={2**31} must be", "at most "):
                kind(**{name: 2**31})


def test_a_whole_configuration_is_checked_when_it_is_changed():
    """As `compose` does, with the same words."""
    cfg = moezoo.compose()
    assert moezoo.compose("seed=4294967295").seed == 2**32 - 1
    for name, value in (("steps", -5), ("batch_size", 0), ("seq_len", 1), ("seed", -1), ("checkpoint_keep", 0)):
        with pytest.raises(moezoo.UserError) as composed:
            moezoo.compose(f"{name}={value}")
        with refused(str(composed.value)):
            moezoo.train(dataclasses.replace(cfg, **{name: value}))
