"""`moved`: the bytes that a compiled program reads and writes, of programs written by hand."""

import pytest

from moezoo.profiling.hlo import moved

# A loop of 4 steps adds a row of x [4, 8] to a sum and keeps it in y [4, 8]: numbers are f32, a row has 32 bytes.
LOOP = """HloModule loop

%take (p0: f32[4,8], p1: s32[], p2: f32[8]) -> f32[8] {
  %p0 = f32[4,8] parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8] parameter(2)
  %row = f32[1,8] dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,8}
  %flat = f32[8] bitcast(%row)
  ROOT %sum = f32[8] add(%flat, %p2)
}

%keep (p0: f32[4,8], p1: f32[8], p2: s32[]) -> f32[4,8] {
  %p0 = f32[4,8] parameter(0)
  %p1 = f32[8] parameter(1)
  %p2 = s32[] parameter(2)
  %row = f32[1,8] bitcast(%p1)
  ROOT %put = f32[4,8] dynamic-update-slice(%p0, %row, %p2, %p2)
}

%body (p: (s32[], f32[8], f32[4,8], f32[4,8])) -> (s32[], f32[8], f32[4,8], f32[4,8]) {
  %p = (s32[], f32[8], f32[4,8], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %old = f32[8] get-tuple-element(%p), index=1
  %x = f32[4,8] get-tuple-element(%p), index=2
  %y = f32[4,8] get-tuple-element(%p), index=3
  %new = f32[8] fusion(%x, %i, %old), kind=kLoop, calls=%take
  %put = f32[4,8] fusion(%y, %new, %i), kind=kLoop, calls=%keep
  ROOT %next = (s32[], f32[8], f32[4,8], f32[4,8]) tuple(%i, %new, %x, %put)
}

%condition (p: (s32[], f32[8], f32[4,8], f32[4,8])) -> pred[] {
  %p = (s32[], f32[8], f32[4,8], f32[4,8]) parameter(0)
  ROOT %goes_on = pred[] constant(true)
}

ENTRY %main (x: f32[4,8], sum: f32[8], y: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8] parameter(0)
  %sum = f32[8] parameter(1)
  %y = f32[4,8] parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8], f32[4,8], f32[4,8]) tuple(%zero, %sum, %x, %y)
  %loop = (s32[], f32[8], f32[4,8], f32[4,8]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %result = f32[4,8] get-tuple-element(%loop), index=3
}
"""  # noqa: E501
# Reads a row, the sum and the number of the step, and writes a sum; reads it and the number, and writes it as a row.
STEP = (32 + 32 + 4 + 32) + (32 + 4 + 32)


def test_a_loop_reads_and_writes_slices():
    """Each step counts, and of the arrays that hold all rows only the step's row; arguments and results count once."""
    assert moved(LOOP) == (4 * STEP, 128 + 32 + 128 + 128, 1)


@pytest.mark.parametrize(
    ("type", "bytes"),
    [
        ("f32[4,16]{1,0:T(8,128)}", 8 * 128 * 4),
        ("f32[16,4]{0,1:T(8,128)}", 8 * 128 * 4),
        ("bf16[8,200]{1,0:T(8,128)(2,1)}", 8 * 256 * 2),
        ("f32[4,16]{1,0:T(8,128)S(1)}", 0),
        ("f32[4,16]{1,0}", 4 * 16 * 4),
    ],
    ids=["padded", "the other order", "packed", "in fast memory", "without tiles"],
)
def test_memory_of_a_tpu(type, bytes):
    """Its arrays are padded to whole tiles, and those in its fast memory take no time of the other."""
    text = f"ENTRY %main (x: {type}) -> {type} {{\n  %x = {type} parameter(0)\n  ROOT %y = {type} negate(%x)\n}}\n"
    assert moved(text) == (2 * bytes, 2 * bytes, 0)
