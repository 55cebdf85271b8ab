"""A run that moezoo 0.2 wrote before its training code was rearranged goes on, to the bit.

`data/run_of_0.2.zip` has the folder `run` after two of four steps, the text that it read, and in `later` what that
version wrote when it went on from there: rows, with each of two versions of JAX, and two files of the checkpoint of
step 4. The model has 8 numbers per token of 256 bytes, on four devices; one matrix of its experts is frozen.
"""

import json
import platform
import re
import shutil
from pathlib import Path

import jax
import pytest
from training_runs import read_rows, repeatable, steps_only

import moezoo

KEPT = Path(__file__).with_name("data") / "run_of_0.2.zip"
RANDOM_NAME = re.compile(r"[0-9a-f]{32}")


def read_json(file):
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The kept run, continued, in the folder `run`."""
    folder = tmp_path_factory.mktemp("kept")
    shutil.unpack_archive(KEPT, folder)
    with pytest.MonkeyPatch.context() as patch, steps_only():
        patch.chdir(folder)  # the path of the text is relative
        moezoo.train(moezoo.compose("resume=run"))
    return folder


def test_rows_are_those_that_the_earlier_version_wrote(folder):
    """To the bit with a JAX of the rows, with AVX2 or AVX-512 alike; elsewhere within the rounding of float32."""
    rows = {file.name[9:-6]: file for file in (folder / "later").glob("rows_jax_*.jsonl")}
    known = jax.__version__ in rows and platform.machine() == "x86_64"
    text = rows[jax.__version__ if known else min(rows)].read_text()
    wanted = repeatable([json.loads(line) for line in text.splitlines()])
    found = read_rows(folder / "run")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert found == (wanted if known else [pytest.approx(row, rel=1e-5) for row in wanted])


def test_the_next_checkpoint_has_the_same_files(folder):
    """Apart from versions and settings, which grow; names of some files are random."""
    now, then = folder / "run" / "checkpoints" / "4", folder / "later"
    ours, theirs = (read_json(each / "about.json") for each in (now, then))
    assert ours.keys() == theirs.keys()
    for key in theirs.keys() - {"versions", "config"}:
        assert ours[key] == theirs[key], key
    ours, theirs = (
        sorted({RANDOM_NAME.sub("*", name) for name in read_json(each / "sha256.json")}) for each in (now, then)
    )
    assert ours == theirs
    assert (folder / "run" / "checkpoints" / "frozen" / "sha256.json").is_file()
    names = {path.name for path in (folder / "run").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "checkpoints"}
