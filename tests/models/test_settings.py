"""Numbers that no setting of a model may be, in Python and from a configuration."""

import math
import typing

import pytest

import moezoo
from moezoo import UserError
from moezoo.convert import types_of
from moezoo.models import FAMILIES
from moezoo.moe.router import Choice
from moezoo.nn.yarn import Yarn

SETTINGS = [(f"model, {name}", "model", family.config) for name, family in FAMILIES.items()]
SETTINGS += [("router", "model.router", Choice), ("yarn", "model.yarn", Yarn)]


@pytest.mark.parametrize(("section", "kind"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS])
def test_numbers_that_are_not_finite_or_too_large(section, kind):
    """Every number field refuses them by name."""
    types = {name: typing.get_args(kind) or (kind,) for name, kind in types_of(kind).items()}
    bad = [(name, value) for name, kinds in types.items() if float in kinds for value in (math.nan, math.inf)]
    bad += [(name, 2**31) for name, kinds in types.items() if kinds[0] is int and ... not in kinds]
    assert len(bad) > 4
    for name, value in bad:
        with pytest.raises(
            UserError, match=rf"^{section}\.{name}={value} must be (a finite number|at most 2147483647)"
        ):
            kind(**{name: value})


def test_a_window_beyond_int32_from_a_configuration():
    with pytest.raises(UserError, match=r"^model\.window=4000000000 must be at most 2147483647"):
        moezoo.compose("model=mixtral", "model.window=4000000000")
