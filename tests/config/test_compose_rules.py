import dataclasses

import pytest
from hydra.core.config_store import ConfigStore
from refusals import refused

from moezoo.config.compose import as_mapping, compose, compose_onto

WHOLE = {"store": "{embed: [fsdp]}", "compute": "{}", "batch": "[fsdp]", "sequence": "[]"}


def yaml(**changed):
    """Return a whole rules file with some lines changed, or left out where None."""
    return "".join(f"{key}: {value}\n" for key, value in {**WHOLE, **changed}.items() if value is not None)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.yaml"


def test_own_rules_by_either_path(mine):
    mine.write_text(yaml())
    cfg = compose("rules=mine.yaml")
    assert cfg.rules.name == "mine"
    assert cfg.rules.store == {"embed": ("fsdp",)}
    assert compose(f"rules={mine}") == compose("rules=./mine.yaml") == cfg
    assert compose_onto(as_mapping(compose()), "rules=mine.yaml") == cfg
    assert compose("rules=mine.yaml", "rules.batch=[data]", "+rules.store.vocab=[fsdp]").rules == dataclasses.replace(
        cfg.rules, batch=("data",), store={"embed": ("fsdp",), "vocab": ("fsdp",)}
    )
    assert not ConfigStore.instance().repo.get("rules")  # the file leaves no trace
    assert compose().rules.name == "fsdp_ep"


def test_own_rules_on_top_of_others(mine):
    mine.write_text("defaults: [fsdp_ep, _self_]\nbatch: [fsdp]\n")
    assert compose("rules=mine.yaml").rules == dataclasses.replace(compose().rules, name="mine", batch=("fsdp",))


def test_own_rules_keep_their_name(mine):
    mine.write_text(yaml(name="theirs"))
    assert compose("rules=mine.yaml").rules.name == "theirs"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "does not exist; give the path of a YAML file"),
        ("store: [1\nbatch: {", "broken YAML in line 2"),
        (yaml() + "batch: []\n", "broken YAML in line 5 (found duplicate key batch)"),
        ("\xff", "is not UTF-8 text"),
        ("- fsdp\n", "expected keys and their values, found a list"),
        ("5", "the value cannot be read"),
        ("", "rules.store is missing"),
        ("fsdp", "there is no key 'fsdp' in rules"),
        (yaml(batch=None), "rules.batch is missing; set it to a list"),
        (yaml(stor="{}"), "rules.stor: there is no key 'stor' in rules; did you mean 'store'?"),
        (yaml(batch="3"), "rules.batch=3: expected a list such as [a, b], found a whole number"),
        (yaml(sequence=""), "rules.sequence=null: expected a list"),
        (yaml(batch="[fsd]"), "rules.batch names mesh axis 'fsd', which does not exist; did you mean 'fsdp'?"),
        (yaml(batch="${nope}"), "rules.batch=${nope}: refers to nothing"),
        (yaml(batch="${nope"), "the value of 'batch' cannot be read"),
        (yaml(batch="2020-01-01"), "rules.batch=2020-01-01: expected a list"),
        ("defaults: [fsdp_e, _self_]\n", "defaults has fsdp_e, no such rules; did you mean 'fsdp_ep'?"),
        ("defaults: fsdp_ep\n", "defaults=fsdp_ep must be a list"),
        ("defaults: [_self_, _self_]\n", "these files do not fit together"),
        ("defaults: [fsdp_ep, _self_]\nstore: [a]\n", "these files do not fit together"),
    ],
)
def test_refuses_own_rules(mine, text, part):
    if text is not None:
        mine.write_bytes(text.encode("latin-1"))
    with refused("rules=mine.yaml", part):
        compose("rules=mine.yaml")


def test_refuses_a_folder_as_rules(mine):
    mine.mkdir()
    with refused("rules=mine.yaml is a folder, not a file"):
        compose("rules=mine.yaml")
