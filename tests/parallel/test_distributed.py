"""Settings of several processes, without starting any; tests/training/test_processes.py does."""

import dataclasses
import json
import os
import threading
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused

import moezoo
from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.parallel import distributed
from moezoo.parallel.distributed import Alone, Auto, Manual
from moezoo.parallel.mesh import mesh_of
from moezoo.training import supervisor
from moezoo.training.feed import Feed

FULL = ("distributed=manual", "distributed.coordinator=localhost:8476", "distributed.processes=2")


def test_one_process_by_default():
    assert moezoo.compose().distributed == Alone()
    assert moezoo.compose("distributed=auto", "distributed.heartbeat_seconds=60").distributed == Auto(60, 300)
    manual = moezoo.compose(*FULL, "distributed.process=1").distributed
    assert manual == Manual("localhost:8476", 2, 1, 30, 300)


def test_missing_settings_are_named(monkeypatch):
    monkeypatch.setattr("moezoo.parallel.mesh.has_started", lambda: False)
    for settings, missing in ((Manual(), "coordinator=HOST:PORT"), (Manual("a:1", 2), "process=0")):
        with refused("distributed=manual", f"distributed.{missing}"):
            distributed.start(settings, 8)


def test_a_new_way_to_meet_is_one_class(monkeypatch):
    """It inherits the checks of seconds; `start` and the command's supervisor use only the contract."""

    @dataclasses.dataclass(frozen=True)
    class FromFile(distributed.Distributed):
        name: ClassVar[str] = "file"
        start_seconds: int = 7

        def arguments(self) -> dict[str, Any]:
            return {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}

    asked = {}
    monkeypatch.setattr("moezoo.parallel.mesh.has_started", lambda: False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: asked.update(arguments))
    monkeypatch.setattr("moezoo.parallel.mesh.prepare", asked.setdefault)
    distributed.start(Alone(), 8)
    assert asked == {}
    distributed.start(FromFile(), 8)
    wanted = {"initialization_timeout": 7, "heartbeat_timeout_seconds": 30, **FromFile().arguments()}
    assert wanted.items() <= asked.items()
    assert [supervisor.is_wanted(settings) for settings in (FromFile(), Alone())] == [True, False]
    with refused("distributed.start_seconds=0", "at least 1"):
        FromFile(start_seconds=0)


def test_processes_must_meet_before_jax_starts():
    jax.devices()
    with refused("distributed=auto", "JAX has already started"):
        moezoo.train(moezoo.compose("distributed=auto", "mesh=ep8"))


def test_one_process_agrees_with_itself():
    assert distributed.is_first()
    assert not distributed.several()
    assert distributed.gather_texts("ü") == ["ü"]
    assert distributed.largest(15) == 15
    assert distributed.first(lambda: [1, {"a": None}]) == [1, {"a": None}]
    distributed.check_same({"seed": 1}, "no", "no")
    with refused("no"):
        distributed.together(lambda: (_ for _ in ()).throw(UserError("no")))


def test_what_differs_between_processes_is_named(monkeypatch):
    theirs = {"a": 2, "b": None, "c": "x", "e": 5, "f": 0}
    monkeypatch.setattr(distributed, "gather_texts", lambda own: [own, own, json.dumps(theirs)])
    with refused("settings differ: a is 1 on process 0 and 2 on process 2, c is true on process 0", "; start again"):
        distributed.check_same({**theirs, "a": 1, "c": True}, "settings differ", "start again")
    with refused("settings differ: a is 1 on", "d is 4 on process 0 and null on process 2, and 2 more differ; again"):
        distributed.check_same({"a": 1, "b": 2, "d": 4, "e": 5, "f": 1}, "settings differ", "again")


def test_a_wait_for_others_is_bounded(monkeypatch, capsys):
    """At its end the process ends from another thread; a single process waits for nobody."""
    ended, codes = threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    with distributed.within(0, "no other process"):
        assert not ended.wait(0.05)
    monkeypatch.setattr(distributed, "several", lambda: True)
    with distributed.within(0, "they did not come"):
        assert ended.wait(60)
    assert codes == [2]
    assert capsys.readouterr().err.endswith("error: they did not come\n")
    ended.clear()
    with distributed.within(0.05, "they came"):
        pass
    assert not ended.wait(0.2)


def test_several_processes_take_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with refused("mesh.expert=4", "4 of 8 devices", "2 processes", "choose a larger mesh"):
        mesh_of(moezoo.MeshShape(expert=4), jax.devices())
    assert mesh_of(moezoo.MeshShape(expert=8), jax.devices()).size == 8


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp"), PartitionSpec("expert", "fsdp"), PartitionSpec()])
@pytest.mark.parametrize("devices", [(1, 6), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_a_process_reads_the_rows_of_its_devices(spec, devices, monkeypatch):
    """For any set of devices, it puts the same part of the batch on each as a single process does."""
    mesh = mesh_of(moezoo.MeshShape(fsdp=2, expert=4), jax.devices())
    sharding, shape = NamedSharding(mesh, PartitionSpec(None, *spec)), (2, 8, 6)
    whole = np.arange(2 * 8 * 6, dtype=np.int32).reshape(shape)
    all_there = {device.id: index for device, index in sharding.devices_indices_map(shape).items()}
    here = {jax.devices()[i]: all_there[i] for i in devices}
    with monkeypatch.context() as patch:
        patch.setattr(NamedSharding, "addressable_devices_indices_map", lambda *_: here)
        feed = Feed(sharding, shape, np.arange(6))
    wanted = sorted({row for index in here.values() for row in range(8)[index[1]]})
    assert feed.rows.tolist() == wanted

    placed = {}

    def put(shape, sharding, part):
        placed.update({str(index): part(index) for index in here.values()})
        return jax.numpy.zeros(())

    monkeypatch.setattr(jax, "make_array_from_callback", put)
    feed(Batch(*(whole[:, feed.rows],) * 4))
    for index in here.values():
        np.testing.assert_array_equal(placed[str(index)], whole[index])
