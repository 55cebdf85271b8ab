import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moezoo.hub import regions
from moezoo.hub.regions import Region


@st.composite
def cases(draw):
    """Return the shape of an array, boxes in it, the fewest bytes of a run, and the most of a piece."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    interval = lambda size: st.sampled_from([(i, j) for i in range(size) for j in range(i + 1, size + 1)])  # noqa: E731
    boxes = draw(st.lists(st.tuples(*map(interval, shape)), min_size=1, max_size=4))
    return shape, boxes, draw(st.sampled_from([1, 16, 40, 1000])), draw(st.sampled_from([1, 10, 64, 1000]))


@given(cases())
def test_boxes_are_read_from_a_file_and_each_byte_once(tmp_path_factory, case):
    shape, boxes, least, most = case
    array = np.random.default_rng(0).integers(0, 2**15, shape).astype(np.uint16)
    path = tmp_path_factory.getbasetemp() / "array"
    path.write_bytes(b"before!" + array.tobytes() + b"after")
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(regions, "LEAST", least)
        region = Region.of(shape, array.dtype, 7, boxes)
        found, count = [np.zeros(tuple(e - s for s, e in box), np.uint16) for box in boxes], np.zeros(shape, int)
        for piece in region.cut(most):
            numbers = piece.read(file.fileno())
            for box, target in zip(boxes, found, strict=True):
                if hit := piece.find(box):
                    inside, where = hit
                    at = tuple(slice(s - first, e - first) for (s, e), (first, _) in zip(inside, box, strict=True))
                    target[at] = numbers[where]
            runs = [range((at - 7) // 2, (at - 7 + size) // 2) for at, size in piece.runs()]
            np.add.at(count.reshape(-1), [i for run in runs for i in run], 1)
    for box, target in zip(boxes, found, strict=True):
        np.testing.assert_array_equal(target, array[tuple(slice(*interval) for interval in box)])
    assert count.max() == 1
    wanted = np.zeros(shape, bool)
    for box in boxes:
        wanted[tuple(slice(*interval) for interval in box)] = True
    assert (count[wanted] == 1).all()
    if least == 1:  # nothing besides the indices that some box has in each dimension
        assert count.sum() == math.prod(len({i for box in boxes for i in range(*box[d])}) for d in range(len(shape)))


def test_short_runs_are_read_with_what_lies_between():
    """Half of each row of 2,048 bytes is shorter than the least run; half of 131,072 is not."""
    narrow = Region.of((100, 1024), np.dtype(np.uint16), 0, [((0, 100), (0, 512))])
    wide = Region.of((100, 65536), np.dtype(np.uint16), 0, [((0, 100), (0, 32768))])
    assert list(narrow.runs()) == [(0, 204800)]
    assert (len(list(wide.runs())), wide.size) == (100, 100 * 65536)


def test_a_file_that_ends_early(tmp_path):
    (tmp_path / "short").write_bytes(bytes(10))
    with (tmp_path / "short").open("rb") as file, pytest.raises(EOFError):
        Region.of((6,), np.dtype(np.uint16), 0, [((0, 6),)]).read(file.fileno())
    assert os.path.getsize(tmp_path / "short") == 10
