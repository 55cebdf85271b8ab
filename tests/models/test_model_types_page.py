"""The page of model types agrees with the registry."""

import re

from model_types_page import MISSING, PAGE, known, render


def test_the_page_is_that_of_the_registry():
    """`python tests/models/model_types_page.py` rewrites it."""
    assert PAGE.read_text() == render()


def test_each_row_says_whether_the_type_is_read():
    found = set(re.findall(r"^\| `(.+)` \| yes \| \|$", PAGE.read_text(), re.MULTILINE))
    assert found == known() & MISSING.keys()
