"""The page of families agrees with the registry."""

from families_page import PAGE, render


def test_the_page_is_that_of_the_registry():
    """`python tests/models/families_page.py` rewrites it."""
    assert PAGE.read_text() == render()
