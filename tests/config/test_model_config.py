"""The contract of a family's configuration, for every family."""

import json

import pytest
from refusals import by_table, refused

from moezoo.models import FAMILIES, ModelConfig
from moezoo.typed import types_of

KINDS = [pytest.param(family.config, id=name) for name, family in FAMILIES.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_has_every_field(kind):
    assert issubclass(kind, ModelConfig)
    assert set(ModelConfig.__annotations__) <= set(types_of(kind))
    assert isinstance(kind().window, int | None)
    assert kind().sees_all


@pytest.mark.parametrize("kind", KINDS)
@by_table(
    """
    fields => line
    vocab=0 => model.vocab=0 must be at least 1
    embed=0 => model.embed=0 must be at least 1
    layers=0 => model.layers=0 must be at least 1 and at most 10000
    layers=10001 => model.layers=10001 must be at least 1 and at most 10000
    heads=0 => model.heads=0 must be at least 1
    expert_mlp=0 => model.expert_mlp=0 must be at least 1
    experts=0 => model.experts=0 must be at least 1
    experts_per_token=0 => model.experts_per_token=0 must be at least 1
    experts_per_token=17 experts=16 => model.experts_per_token=17 must be at most model.experts=16
    max_length=0 => model.max_length=0 must be at least 1
    norm_eps=0.0 => model.norm_eps=0.0 must be above 0
    init_std=0.0 => model.init_std=0.0 must be above 0
    unembedding_std=-0.1 => model.unembedding_std=-0.1 must be at least 0
    unembedding_std=0.02 tied_embeddings=true
        => model.unembedding_std=0.02 has no effect with model.tied_embeddings=true
    load_balance=-0.1 => model.load_balance=-0.1 must be at least 0
    z_loss=-0.1 => model.z_loss=-0.1 must be at least 0
    """
)
def test_what_every_family_refuses(kind, fields, line):
    with refused(line):
        kind(**{name: json.loads(value) for name, value in (field.split("=") for field in fields.split())})
