"""The description of small layouts, every collective included, is what is tracked in `goldens/`."""

import difflib

import pytest
from golden_layouts import FOLDER, LAYOUTS, describe_layout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.weekly if name.endswith("-2.txt") else ()) for name in LAYOUTS]
)
def test_layout_is_the_tracked_one(name):
    path = FOLDER / name
    expected, found = (text.splitlines() for text in (path.read_text(), describe_layout(LAYOUTS[name])))
    difference = "\n".join(difflib.unified_diff(expected, found, f"tracked in {path}", "found", lineterm=""))
    assert not difference, f"{difference}\nif this is meant, write: python tests/tools/golden_layouts.py"


def test_every_file_is_compared():
    assert {path.name for path in FOLDER.iterdir()} == LAYOUTS.keys()
