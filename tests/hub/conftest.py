"""Folders of tiny models and transformers' models of them, made once per process."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_models import CONFIGS, random_model

import moezoo


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
