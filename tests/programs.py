"""Reading compiled programs."""

import math
import re


def largest_array(text: str) -> int:
    """Numbers in the largest array that a compiled program names."""
    shapes = re.findall(r"\b[a-z]\w*\[([\d,]+)\]", text)
    return max(math.prod(map(int, dims.split(","))) for dims in set(shapes))
