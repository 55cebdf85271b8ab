"""Read compiled programs: their instructions, by computation, from HLO text."""

import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|[^( ]\S*) ([a-z][\w\-]*)\((.*)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")

# HLO's name of a collective -> its name in `moezoo.parallel.traffic.received_bytes`.
COLLECTIVES = {
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "all-to-all": "all_to_all",
    "collective-broadcast": "ppermute",
    "collective-permute": "ppermute",
    "ragged-all-to-all": "ragged_all_to_all",
    "reduce-scatter": "reduce_scatter",
}


class Instruction(NamedTuple):
    """An instruction: the type of its result, the name of its operation, and the `text` after the opening parenthesis.

    `called` has the names of the computations that it calls.
    """

    type: str
    op: str
    text: str
    called: tuple[str, ...]

    @property
    def operands(self) -> list[str]:
        """The names of its operands, or a constant's value."""
        end = re.search(r"\)(?:, [a-z][\w-]*=|$)", self.text)
        assert end, self.text
        operands = self.text[: end.start()]
        return re.findall(r"%([\w.\-]+)", operands) or operands.split(", ")


Computation = dict[str, Instruction]

# Instructions that read and write no array: names of parts, and of what exists already.
_NAMES = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")
# How a custom call names a kernel that this library writes.
KERNEL = re.compile(r'custom_call_target="(mosaic|tpu_custom_call|__gpu\$xla\.gpu\.triton)')


def size_of(type_: str) -> int:
    """Return the bytes of a type, of a tuple all of its parts; numbers of less than a byte count as one."""
    sizes = re.findall(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]", type_)
    return sum(
        max(1, int(bits or 8) // 8) * math.prod(map(int, filter(None, dims.split(",")))) for _, bits, dims in sizes
    )


def bytes_outside_kernels(text: str) -> int:
    """Return the bytes of operands and results of a program's instructions, but for kernels and what they contain.

    Only the entry computation counts: a fusion reads its operands and writes its result once. A loop counts once too.
    """
    entry, found = read_computations(text)
    body = found[entry]
    counted = (
        each for name, each in body.items() if name != "ROOT" and each.op not in _NAMES and not KERNEL.search(each.text)
    )
    return sum(size_of(e.type) + sum(size_of(body[o].type) for o in e.operands if o in body) for e in counted)


def read_computations(text: str) -> tuple[str, dict[str, Computation]]:
    """Return the name of the entry computation, and for each computation its instructions by name and as "ROOT".

    Args:
        text: The program, as `compiled.as_text()` gives it.
    """
    entry, found, current = "", {}, {}
    # A kernel's attributes for xprof are on lines of their own, with the rest of the instruction after them.
    for line in re.sub(r'\n(?="|}})', " ", text).splitlines():
        if line[:1].isspace():
            if match := _INSTRUCTION.match(line):
                root, name, kind, op, rest = match.groups()
                branches = _BRANCHES.search(rest)
                called = *_CALLED.findall(rest), *(re.findall(r"[\w.\-]+", branches[1]) if branches else ())
                current[name] = Instruction(kind, op, rest, called)
                if root:
                    current["ROOT"] = current[name]
        elif match := _HEADER.match(line):
            current = found[match[2]] = {}
            entry = match[2] if match[1] else entry
    assert entry, "no ENTRY in the text of the program"
    return entry, found


def trips(loop: Instruction, body: Computation, computations: Mapping[str, Computation]) -> int:
    """Return how often the body of a loop runs. Raises `ValueError` where the program does not state it."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
        return int(known[1])
    names = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.text))
    condition, inner = computations[names["condition"]], computations[names["body"]]
    test = condition["ROOT"]
    counter = re.search(r"index=(\d+)", condition[test.operands[0]].text) if "direction=LT" in test.text else None
    if counter is None:
        raise ValueError(f"a loop of unknown length: {loop.text[:300]}")
    place = int(counter[1])
    step = inner[inner["ROOT"].operands[place]]
    assert step.op == "add", step
    bound, by = _constant(test.operands[1], condition), _constant(step.operands[1], inner)
    start = _constant(body[loop.operands[0]].operands[place], body)
    return -(-(bound - start) // by)


def _constant(name: str, body: Computation) -> int:
    while body[name].op == "copy":
        name = body[name].operands[0]
    if body[name].op != "constant":
        raise ValueError(f"a loop of unknown length: {name} is no constant")
    return int(body[name].operands[0])


class Moved(NamedTuple):
    """The bytes that a program reads and writes, those of its arguments and results, and its number of loops."""

    bytes: int
    least: int
    loops: int


_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_SLICES = ("dynamic-slice", "slice", "gather")


def _stored(type_: str) -> int:
    """Return the bytes that a type takes in the device's memory: with a TPU's padding, and without its fast memory."""

    def one(kind: str, bits: str, dims: str, order: str, rest: str) -> int:
        if "S(1)" in rest:
            return 0
        sizes = [int(size) for size in dims.split(",") if size]
        if tile := re.match(r"T\(([\d,]+)\)", rest):
            minor = [int(place) for place in order.split(",") if place]
            for place, size in zip(minor, reversed([int(size) for size in tile[1].split(",")]), strict=False):
                sizes[place] = -(-sizes[place] // size) * size
        return max(1, int(bits or 8) // 8) * math.prod(sizes)

    return sum(one(*(part or "" for part in found.groups())) for found in _ARRAY.finditer(type_))


def moved(text: str) -> Moved:
    """Return what a program reads and writes, if each instruction reads its operands and writes its result once.

    A loop counts as often as it runs. Of an array of which a fusion reads or writes a slice, the slice counts. A kernel
    counts like any instruction, whatever it reads again. Raises `ValueError` for a loop of unknown length.
    """
    entry, found = read_computations(text)

    @functools.cache
    def read(name: str, number: int) -> int:
        body = found[name]
        parameter = next(
            n for n, i in body.items() if i.op == "parameter" and i.operands == [str(number)] and n != "ROOT"
        )

        def via(array: str) -> int:
            total, whole = 0, _stored(body[array].type)
            for user, each in body.items():
                if user == "ROOT" or array not in each.operands:
                    continue
                if each.op == "bitcast":
                    total += via(user)
                elif each.op in _SLICES and each.operands[0] == array:
                    total += _stored(each.type)
                elif each.op == "fusion":
                    total += sum(read(each.called[0], n) for n, o in enumerate(each.operands) if o == array)
                elif each.op != "tuple" and (each.op != "dynamic-update-slice" or each.operands[0] != array):
                    return whole
            return min(total, whole)

        return via(parameter)

    @functools.cache
    def written(name: str) -> int:
        body = found[name]

        def of(each: Instruction) -> int:
            if each.op == "dynamic-update-slice":
                return _stored(body[each.operands[1]].type)
            if each.op == "fusion":
                return written(each.called[0])
            if each.op in ("bitcast", "tuple"):
                return sum(of(body[operand]) for operand in each.operands)
            return _stored(each.type)

        return of(body["ROOT"])

    def run(name: str) -> tuple[int, int]:
        total, loops, body = 0, 0, found[name]
        for each in (i for n, i in body.items() if n != "ROOT" and i.op not in _NAMES and not i.op.endswith("-done")):
            if each.op in ("while", "call", "conditional"):
                loop = each.op == "while"
                names = (
                    [dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", each.text))["body"]] if loop else each.called
                )
                inner = [run(called) for called in names]
                total += sum(size for size, _ in inner) * (trips(each, body, found) if loop else 1)
                loops += sum(count for _, count in inner) + loop
            elif each.op in ("fusion", "fusion-start"):
                total += written(each.called[0]) + sum(
                    read(each.called[0], n) for n, o in enumerate(each.operands) if o
                )
            elif each.op in ("copy-start", "slice-start"):  # the type has the source too
                total += _stored(each.type)
            elif each.op in _SLICES:
                total += 2 * _stored(each.type)
            elif each.op == "dynamic-update-slice":
                total += 2 * _stored(body[each.operands[1]].type)
            elif "AllocateBuffer" not in each.text:
                total += _stored(each.type) + sum(_stored(body[o].type) for o in each.operands if o in body)
        return total, loops

    total, loops = run(entry)
    body = found[entry]
    arguments = sum(_stored(i.type) for n, i in body.items() if i.op == "parameter" and n != "ROOT")
    return Moved(total, arguments + _stored(body["ROOT"].type), loops)
