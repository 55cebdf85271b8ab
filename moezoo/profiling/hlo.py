"""Read compiled programs: their instructions, by computation, from HLO text."""

import math
import re
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
