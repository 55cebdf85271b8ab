"""The order in which the tokens of a split sequence lie on devices.

With causal attention a token has as many keys as tokens before it, so the device with the last tokens would do most of
the work. The balanced order gives each of n devices an early and a late part: the sequence is cut into 2n chunks of
equal length, and device r has chunks r and 2n - 1 - r. For n = 2 and 8 tokens: 0 1 6 7 | 2 3 4 5.

Only the host reorders: all arrays of a batch, once, before the devices get them. Everything on the devices goes by the
positions and segments that lie next to the tokens, and by labels that were shifted before.
"""

from typing import Literal

import numpy as np

from moezoo.errors import UserError

SequenceOrder = Literal["balanced", "contiguous"]


def balanced_order(length: int, devices: int) -> np.ndarray:
    """Return, for each position of the reordered sequence, the index of its token; int64 [length].

    Raises:
        UserError: `length` is not divisible by twice the number of devices.
    """
    chunks = 2 * devices
    if length % chunks:
        below = length // chunks * chunks
        fitting = " or ".join(f"seq_len={n}" for n in (below, below + chunks) if n)
        raise UserError(
            f"seq_len={length} is not divisible by {chunks}, the chunks of the balanced order on {devices} devices; "
            f"set {fitting}, or execution.sequence_order=contiguous"
        )
    return np.arange(length).reshape(chunks, -1)[list(balanced_chunks(devices))].ravel()


def balanced_chunks(devices: int) -> tuple[int, ...]:
    """Return the numbers of the chunks, in the order of devices."""
    return tuple(chunk for device in range(devices) for chunk in (device, 2 * devices - 1 - device))
