"""Which runs a sweep has, and the names of their folders."""

import os
import subprocess

import pytest

from moezoo.config.overrides import quote, read
from moezoo.errors import UserError
from moezoo.tools.sweep.expand import expand


def test_a_sweep_is_the_product_of_listed_values_in_one_order():
    sweep = expand(["seed=0,1", "steps=3", "optimizer.learning_rate=1e-3,3e-3", "trained=[a,b]"])
    assert sweep.keys == ("optimizer.learning_rate", "seed")
    assert sweep.settings == {"steps": "3", "trained": "[a, b]"}
    assert [each.name for each in sweep.elements] == [
        "learning_rate-0.001_seed-0",
        "learning_rate-0.001_seed-1",
        "learning_rate-0.003_seed-0",
        "learning_rate-0.003_seed-1",
    ]
    assert [each.number for each in sweep.elements] == [0, 1, 2, 3]
    assert sweep.elements[1].values == {"optimizer.learning_rate": 0.001, "seed": 1}
    assert set(sweep.elements[2].words) == {"steps=3", "trained=[a,b]", "optimizer.learning_rate=0.003", "seed=0"}
    assert [e.name for e in expand(["optimizer.learning_rate=0.001,0.003", "seed=0,1"]).elements] == [
        each.name for each in sweep.elements
    ]


@pytest.mark.parametrize(
    ("word", "names", "last"),
    [
        ("seed=range(1,4)", ["seed-1", "seed-2", "seed-3"], "seed=3"),
        ("dispatch=choice(ring,gather)", ["dispatch-ring", "dispatch-gather"], "dispatch=gather"),
        ("trained=[a,b],[c]", ["trained-%5Ba%2C%20b%5D", "trained-%5Bc%5D"], "trained=[c]"),
        ('data.path=a/b,"c,d"', ["path-a%2Fb", "path-c%2Cd"], 'data.path="c,d"'),
    ],
)
def test_values(word, names, last):
    elements = expand([word]).elements
    assert [each.name for each in elements] == names
    assert elements[-1].words == [last]


def test_names_of_keys_are_as_short_as_tells_them_apart_and_a_long_one_is_cut():
    (first, *_) = expand(["guard.loss=1,2", "model.router.loss=3,4", f"data.path=a,{'b' * 300}"]).elements
    assert first.name == "path-a_guard.loss-1_router.loss-3"
    names = {each.name for each in expand([f"data.path={'b' * 300}c,{'b' * 300}d"]).elements}
    assert len(names) == 2
    assert max(map(len, names)) < 255


def test_a_quoted_path_is_read_as_it_is():
    """And what a message says to type in a shell is what is read."""
    for path in ("a b", "a,b", 'a"b', "a=b", "ä/[x]", "a\\", 'a\\"b', "it's", "a\nb", "a\udcff0b", "a'\t\\b"):
        assert read([quote("run_dir", path)]).changes == {"run_dir": path}
        with pytest.raises(UserError) as caught:
            read([f"run_dir=[{path}"])
        typed = str(caught.value).partition("quote it twice: ")[2]
        assert typed.isprintable()
        shell = subprocess.run(["bash", "-c", f"printf %s {typed}"], capture_output=True, check=True)
        assert read([os.fsdecode(shell.stdout)]).changes == {"run_dir": f"[{path}"}
