import dataclasses
import functools
import itertools
import operator
import re
import typing

import pytest

from moezoo.config.compose import as_mapping, compose
from moezoo.config.overrides import CONF, PACKAGE, defaults, groups, read_yaml, top_keys
from moezoo.config.settings import INNER_TAG, KERNELS, TAG, ExecutionSettings, GuardSettings, TrainConfig
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import AXES, MeshShape
from moezoo.typed import Checks, convert


def test_every_folder_is_a_group_that_is_chosen():
    assert set(groups()) == set(defaults())
    for group, name in defaults().items():
        assert name in groups()[group]


@pytest.mark.parametrize("group", list(TAG))
def test_yaml_agrees_with_the_defaults_of_the_dataclass(group):
    tag, classes = TAG[group]
    files = {name: read_yaml(CONF / group / f"{name}.yaml") for name in groups()[group]}
    if group == "model":
        named = {name: mapping for name, mapping in files.items() if set(mapping) == {tag}}
        assert sorted(mapping[tag] for mapping in named.values()) == sorted(classes)
    else:
        named = {option: files[option] for option in classes}
        assert all(mapping[tag] == option for option, mapping in named.items())
    for mapping in named.values():
        kind = classes[mapping.pop(tag)]
        # A laptop-sized model has the defaults of its dataclass; the other entries list every key, with help.
        assert set(mapping) == (set() if group == "model" else {field.name for field in dataclasses.fields(kind)})
        assert convert(kind, resolved(mapping, read_yaml(CONF / "train.yaml")), group) == kind()


def resolved(part, mapping):
    """Return an entry with the values in `mapping` of the keys that it refers to, as in ${execution.dtype}."""
    if isinstance(part, dict):
        return {key: resolved(value, mapping) for key, value in part.items()}
    if isinstance(part, str) and part.startswith("${"):
        return functools.reduce(operator.getitem, part[2:-1].split("."), mapping)
    return part


def test_train_yaml_agrees_with_the_settings():
    mapping = read_yaml(CONF / "train.yaml")
    assert set(mapping["execution"]) == {field.name for field in dataclasses.fields(ExecutionSettings)}
    checks = Checks(INNER_TAG)
    assert convert(ExecutionSettings, mapping["execution"], "execution", checks) == ExecutionSettings()
    assert set(mapping["guard"]) == {field.name for field in dataclasses.fields(GuardSettings)}
    assert convert(GuardSettings, mapping["guard"], "guard") == GuardSettings()
    assert set(top_keys()) == {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize("key", ["remat", "routing"])
def test_the_help_of_a_key_names_its_words(key):
    """The help prints the comments of `train.yaml`, and the value of a key before its comment."""
    line = re.search(rf"^  {key}: .*$", (CONF / "train.yaml").read_text(), re.MULTILINE)
    assert line
    assert set(typing.get_args(typing.get_type_hints(ExecutionSettings)[key])) <= set(re.findall(r"\w+", line[0]))


def test_the_comments_of_train_yaml_list_all_backends():
    lines = (CONF / "train.yaml").read_text().splitlines()
    assert tuple(KERNELS) == Kernels._fields
    for key, backends in KERNELS.items():
        (line,) = (line for line in lines if line.startswith(f"  {key}: null"))
        assert [name for name in backends if name not in line] == []


def test_every_entry_of_every_group_composes():
    for choices in itertools.zip_longest(*groups().values()):
        chosen = {group: name for group, name in zip(groups(), choices, strict=True) if name is not None}
        mapping = as_mapping(compose(*(f"{group}={name}" for group, name in chosen.items())))
        for group, name in chosen.items():
            path = CONF / group / f"{name}.yaml"
            entry = {key: value for key, value in read_yaml(path).items() if key != "defaults"}
            entry = resolved(entry, mapping)
            assert holds(mapping, entry if path.read_text().startswith(PACKAGE) else {group: entry})


def holds(mapping, part):
    """Whether `mapping` has every value of `part`."""
    if not isinstance(part, dict) or not isinstance(mapping, dict):
        return mapping == part
    return all(key in mapping and holds(mapping[key], value) for key, value in part.items())


def test_mesh_entries_are_named_by_their_sizes():
    for option in groups()["mesh"]:
        mapping = read_yaml(CONF / "mesh" / f"{option}.yaml")
        assert tuple(mapping) == (*AXES, "axis_types")
        shape = convert(MeshShape, mapping, "mesh")
        assert shape.axis_types == MeshShape().axis_types
        assert shape.devices == (1 if option == "single" else 8)
        short = {"fsdp": "fsdp", "expert": "ep"}
        name = "_".join(f"{short.get(axis, axis)}{size}" for axis, size in shape.sizes.items() if size > 1)
        assert option == (name or "single")
