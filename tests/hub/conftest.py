"""Folders of tiny models and transformers' models of them, made once per process."""

import functools
import os

# PyTorch's threads wait for each other in busy loops: with two, generating by a tiny model took ten times the processor
# time or more. PyTorch reads it when it is imported, also in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few_bit_folders import CASES, WHOLE, WIDENED, Written, write_few_bits
from tiny_models import CONFIGS, random_model

import moezoo
from moezoo.models.blueprint import Blueprint


class Saved(NamedTuple):
    """Our model, and a folder of it."""

    model: Any
    folder: Path


@pytest.fixture(scope="session")
def save(tmp_path_factory):
    """Return a function from a configuration (or its name in CONFIGS) to its random model and folder."""

    @functools.cache
    def save_once(config: Any) -> Saved:
        model, folder = random_model(config), tmp_path_factory.mktemp("saved") / "model"
        moezoo.save_pretrained(model, folder)
        return Saved(model, folder)

    return lambda config: save_once(CONFIGS[config] if isinstance(config, str) else config)


@pytest.fixture(scope="session")
def few_bits(tmp_path_factory):
    """Return a function from a name in `few_bit_folders.CASES`, `WIDENED` or `WHOLE` to the folders of that model."""
    rng = np.random.default_rng(0)

    @functools.cache
    def write(name: str) -> Written:
        case, folder = (CASES | WIDENED | WHOLE)[name], tmp_path_factory.mktemp("few")
        model = jax.tree.map(
            lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), Blueprint(case.config).shapes
        )
        moezoo.save_pretrained(model, folder / "plain")
        return write_few_bits(folder / "plain", folder, case)

    return write


@pytest.fixture(scope="session")
def peer(save):
    """Return a function from a configuration (or its name) to transformers' model of its folder."""
    from peer_results import load  # not at the top, because some tests run without transformers

    loaded: dict[Path, Any] = {}

    def find(config: Any) -> Any:
        folder = save(config).folder
        if folder not in loaded:
            loaded[folder] = load(folder)
        return loaded[folder]

    return find


@pytest.fixture
def reads(monkeypatch):
    """Return the bytes that are read of each file, by its path, as ranges."""
    found = defaultdict(list)
    preadv = os.preadv

    def record(file, buffers, offset):
        got = preadv(file, buffers, offset)
        found[os.readlink(f"/proc/self/fd/{file}")].append(range(offset, offset + got))
        return got

    monkeypatch.setattr(os, "preadv", record)
    return found
