"""The meshes and strategies on which models are compared with transformers, and the cases of the default run."""

import dataclasses
import itertools

import pytest
from tiny_models import CONFIGS

import moezoo
from moezoo.models import DeepSeekConfig
from moezoo.moe.dispatch import STRATEGIES

MESHES = {"ep8": moezoo.MeshShape(expert=8), "fsdp2_ep4": moezoo.MeshShape(fsdp=2, expert=4)}
PRODUCT = [(name, mesh, strategy) for name in CONFIGS for mesh, strategy in itertools.product(MESHES, STRATEGIES)]


def mark_full(default, weekly):
    """Return all cases; those that are neither in `default` nor in `weekly` run only with `-m full`."""
    assert {*default, *weekly} <= set(PRODUCT)
    marks = dict.fromkeys(weekly, pytest.mark.weekly) | dict.fromkeys(default, ())
    return [pytest.param(*case, marks=marks.get(case, pytest.mark.full)) for case in PRODUCT]


def make_execution(mesh, strategy):
    """Return an execution that drops nothing."""
    rules = moezoo.compose("rules=fsdp_ep").rules
    return moezoo.Execution(moezoo.make_mesh(MESHES[mesh]), rules, STRATEGIES[strategy]().exact)


def split_evenly(config):
    """Return the configuration with latents that eight devices can store."""
    if isinstance(config, DeepSeekConfig):
        return dataclasses.replace(config, kv_lora=32, q_lora=config.q_lora and 24)
    return config
