"""Where the time of a step goes: operations by scope, and the division of instants."""

import os
from pathlib import Path
from typing import Any

import jax
import pytest

from moezoo.profiling.profile import Event, Operation, divide, operations, read_trace

PROGRAM = """HloModule jit_f

%moved (a: f32[4,8], b: s32[]) -> f32[8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %c = s32[] add(%b, %b)
  ROOT %s = f32[8]{0} dynamic-slice(%a, %c), dynamic_slice_sizes={1,8}
}

%computed (d: f32[8]) -> f32[8] {
  %d = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%d)
}

ENTRY %main (p: f32[4,8], q: s32[]) -> f32[8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = s32[] parameter(1)
  %scan = f32[8]{0} fusion(%p, %q), kind=kLoop, calls=%moved, metadata={op_name="jit(f)/jvp(layers)/while/body/slice"}
  %swap = f32[8]{0} fusion(%p, %q), kind=kLoop, calls=%moved, metadata={op_name="f/jvp(layers)/attention/transpose"}
  %act = f32[8]{0} fusion(%scan), kind=kLoop, calls=%computed, metadata={op_name="jit(f)/transpose(jvp(layers))/body/checkpoint/rematted_computation/feed_forward/experts/jit(loss)/neg"}
  %gather = f32[8]{0} all-gather(%act), dimensions={0}, metadata={op_name="jit(f)/jvp(head)/weights/all_gather"}
  ROOT %last = f32[8]{0} negate(%gather), metadata={op_name="jit(f)/transpose(jvp(head))/neg"}
}
"""  # noqa: E501


def test_operations():
    """Part and phase follow from the scopes; what only moves data is a copy unless it belongs to a part."""
    found = operations(PROGRAM)
    assert found["scan"] == Operation("copies", "forward", moves=True, copied="f32[8] slice")
    assert found["swap"] == Operation("attention", "forward", moves=True)
    assert found["act"] == Operation("experts", "recomputed", moves=False)
    assert found["gather"] == Operation("collectives", "forward", moves=False)
    assert found["last"] == Operation("loss", "backward", moves=False)


def frame(name: str, thread: int, start: float, end: float) -> list[Event]:
    long = float(end - start)
    return [Event(float(start), -long, thread, "begin", name), Event(float(end), long - 1e15, thread, "end", name)]


def task(thread: int, what: Any, time: float, number: int) -> Event:
    order = {"StopRegion": -1e14, "StartRegion": -1e13, "Record": 0.0}[what]
    return Event(float(time), order, thread, what, number)


def test_instants_are_divided():
    """Two threads work for one operation, wait for each other, and at times do nothing.

    | ns | thread 0 | thread 1 |
    |---|---|---|
    | 0 to 10 | act | nothing |
    | 10 to 20 | act | a task of act |
    | 20 to 40 | last | waits in gather |
    | 40 to 50 | waits in gather | waits in gather |
    | 50 to 60 | gather, for all | waits in gather |
    | 60 to 100 | nothing; a task that nobody named from 70 to 80 | nothing |
    """
    events = [*frame("act", 0, 0, 20), task(0, "Record", 5, 7)]
    events += [task(1, "StartRegion", 10, 7), task(1, "StopRegion", 20, 7)]
    events += [*frame("last", 0, 20, 40), *frame("gather", 1, 20, 60), *frame("Rendezvous", 1, 20, 60)]
    events += [*frame("gather", 0, 40, 60), *frame("Rendezvous", 0, 40, 60), *frame("InvokeRendezvous", 0, 50, 60)]
    events += [task(0, "StartRegion", 70, 8), task(0, "StopRegion", 80, 8)]
    expected = {"experts": 20, "loss": 20, "waiting in collectives": 10, "collectives": 10, "no operation": 40}
    later = [event._replace(time=event.time + 500) for event in events]  # a second step, after a pause
    for steps, happened in (([(0.0, 100.0)], events), ([(500.0, 600.0), (0.0, 100.0)], events + later)):
        whole, parts = divide(steps, happened, operations(PROGRAM))
        assert {name: sum(part.values()) * 1e6 for name, part in parts.items()} == pytest.approx(expected)
        assert whole * 1e6 == pytest.approx(100)


GPU_TRACE = """
planes { name: "/host:CPU" lines { name: "main" timestamp_ns: 0
  events { metadata_id: 1 offset_ps: 0 duration_ps: 100000 } }
  event_metadata { key: 1 value { id: 1 name: "moezoo step" } } }
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 10000 duration_ps: 30000 stats { metadata_id: 7 str_value: "act" } }
    events { metadata_id: 1 offset_ps: 60000 duration_ps: 20000 stats { metadata_id: 7 str_value: "last" } }
    events { metadata_id: 2 offset_ps: 90000 duration_ps: 5000 } }
  lines { name: "Stream #14(Compute)" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 20000 duration_ps: 20000 stats { metadata_id: 7 str_value: "swap" } } }
  event_metadata { key: 1 value { id: 1 name: "a_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "act" } }
  stat_metadata { key: 7 value { id: 7 name: "hlo_op" } } }
"""


def test_a_trace_of_a_gpu(tmp_path):
    """Kernels count for the operations that they name; streams share the time in which both run."""
    write(tmp_path, GPU_TRACE)
    whole, parts = read_trace(tmp_path, operations(PROGRAM))
    found = {name: sum(part.values()) * 1e6 for name, part in parts.items()}
    assert whole * 1e6 == pytest.approx(100)
    assert found == pytest.approx({"experts": 20, "attention": 10, "loss": 20, "no operation": 50})


TPU_TRACE = """
planes { name: "/host:CPU" lines { name: "main" timestamp_ns: 0
  events { metadata_id: 1 offset_ps: 0 duration_ps: 100000 } }
  event_metadata { key: 1 value { id: 1 name: "moezoo step" } } }
planes { name: "/device:TPU:0"
  lines { name: "XLA Modules" timestamp_ns: 0 events { metadata_id: 2 offset_ps: 0 duration_ps: 90000 } }
  lines { name: "XLA Ops" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 10000 duration_ps: 30000 }
    events { metadata_id: 3 offset_ps: 50000 duration_ps: 20000 } }
  event_metadata { key: 1 value { id: 1 name: "%act = f32[8]{0:T(128)} fusion(%scan), kind=kLoop" } }
  event_metadata { key: 2 value { id: 2 name: "last" } }
  event_metadata { key: 3 value { id: 3 name: "last" } } }
"""


def write(folder: Path, trace: str, name: str = "now") -> Path:
    place = folder / "plugins/profile" / name
    place.mkdir(parents=True)
    path = place / "host.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(trace))
    return path


def test_a_trace_of_a_tpu(tmp_path):
    """Operations are named by their text, on one line of each core."""
    write(tmp_path, TPU_TRACE)
    whole, parts = read_trace(tmp_path, operations(PROGRAM))
    found = {name: sum(part.values()) * 1e6 for name, part in parts.items()}
    assert whole * 1e6 == pytest.approx(100)
    assert found == pytest.approx({"experts": 30, "loss": 20, "no operation": 50})


def test_the_newest_trace_is_read_and_must_have_steps_and_operations(tmp_path):
    old = write(tmp_path, GPU_TRACE, "before")
    os.utime(old, (1, 1))
    write(tmp_path, TPU_TRACE)
    assert read_trace(tmp_path, operations(PROGRAM)).parts.keys() == {"experts", "loss", "no operation"}
    with pytest.raises(ValueError, match="has 1 steps, and no operation of the program"):
        read_trace(tmp_path, {})


def test_attributes_on_lines_of_their_own():
    """XLA for TPUs prints a kernel's over several lines; the scope comes after them."""
    text = """ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %kernel.1 = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block\\": 128}"
}}, metadata={op_name="jit(f)/jvp(layers)/attention/pallas_call"}
  ROOT %ragged-dot-none = f32[8]{0} custom-call(%kernel.1), metadata={op_name="ragged-dot-none"}
}
"""
    found = operations(text)
    assert found["kernel.1"] == Operation("attention", "forward", moves=False)
    assert found["ragged-dot-none"].part == "experts"
