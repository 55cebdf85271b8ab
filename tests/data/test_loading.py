"""Settings of data, their YAML files, their errors, and the cost of importing them."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from refusals import refused

from moezoo.data import SOURCES, DataSettings, PythonStdlib, Source, Synthetic, load
from moezoo.typed import Size

CONF = Path(__file__).parents[2] / "conf" / "data"


def test_every_source_has_a_file_with_its_defaults():
    assert {file.stem for file in CONF.glob("*.yaml")} == set(SOURCES)
    for name, kind in SOURCES.items():
        written = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
        assert written == {"name": name, **dataclasses.asdict(kind())}


@pytest.mark.parametrize("kind", SOURCES.values())
def test_a_wrong_setting_of_every_source(kind):
    with refused("data.eval_sequences=-1 must be at least 0"):
        kind(eval_sequences=-1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0 and at most 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be at least 0 and at most 4294967295"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with refused(message):
        load(PythonStdlib(), **{"seq_len": 8, "seed": 0, "vocab": 256, **wrong})


def test_importing_neither_loads_slow_libraries_nor_starts_jax():
    check = (
        "import sys, moezoo.data; loaded = [name for name in ('grain', 'tokenizers') if name in sys.modules];"
        "from jax._src import xla_bridge; print(loaded, xla_bridge.backends_are_initialized())"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout == "[] False\n"


def test_a_new_source_is_one_class():
    """It inherits the checks of its settings, and `load` checks the sizes of its splits."""

    @dataclasses.dataclass(frozen=True)
    class Doubled(DataSettings):
        times: Size = 2

        def load(self, *, seed: int, vocab: int) -> Source:
            return Synthetic(documents=20 * self.times, document_length=8).load(seed=seed, vocab=vocab)

    source = load(Doubled(), seq_len=8, seed=0, vocab=256)
    assert source.train.documents + source.validation.documents == 40
    with refused("data.times=0 must be at least"):
        Doubled(times=0)
    with refused("data.eval_sequences=-1 must be at least"):
        Doubled(eval_sequences=-1)
    with refused("data=synthetic leaves ", " tokens for training, but seq_len=999 needs 1000"):
        load(Doubled(), seq_len=999, seed=0, vocab=256)
