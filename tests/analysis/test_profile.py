"""Where the time of a step goes: operations by scope, and the division of instants."""

from typing import Any

import pytest

from moezoo.analysis.profile import Event, Operation, divide, operations

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
    assert found["scan"] == Operation("copies", "forward", moves=True)
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
