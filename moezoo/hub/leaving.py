"""How the tensors of a model leave: as arrays, or in the few bits that containers hold or arrays are rounded to."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moezoo.errors import UserError
from moezoo.hub.few_bits import stating
from moezoo.hub.formats.base import CONFIG, FewBitTensor, Format, outputs_first
from moezoo.hub.plan import Entry, entry_in_numbers, few_bit_entries
from moezoo.hub.tensors import Tensor, is_of_products
from moezoo.hub.values import Values
from moezoo.hub.weight_files import common_dtype
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.axes import Role


class Leaving(NamedTuple):
    """How the tensors of a model are written.

    Attributes:
        own: All of them.
        values: Their numbers.
        few: The weights that are written in few bits, by the name that they have in numbers.
        format: Their format; None if there are none.
        refused: Why containers of few bits become numbers, in words that follow "weights of few bits"; None if none do.
    """

    own: Sequence[Tensor]
    values: Values
    few: Mapping[str, FewBitTensor]
    format: Format | None = None
    refused: str | None = None

    @property
    def rounded(self) -> list[FewBitTensor]:
        """Those of `few` that the model has in numbers."""
        return [few for few in self.few.values() if not self.values.has(few.kept_scale)]

    @property
    def dtype(self) -> np.dtype:
        """The dtype that most numbers have; those of few bits have that of their arrays."""
        return common_dtype((self.values.dtype(tensor), math.prod(tensor.shape)) for tensor in self.own)

    @property
    def table(self) -> dict[str, Any]:
        """What config.json states of few bits: nothing, or the format, and transformers' modules in numbers."""
        if self.format is None:
            return {}
        names = {tensor.name for tensor in self.own if tensor.axes.role is Role.WEIGHT} - self.few.keys()
        return {CONFIG: self.format.write(sorted({name.removesuffix(".weight") for name in names}))}

    def entries(self, tensor: Tensor) -> list[Entry]:
        """Return what a folder has of a tensor of the model: itself, or numbers of few bits and scales."""
        if (few := self.few.get(tensor.name)) is None:
            return [entry_in_numbers(tensor.name, self.values.dtype(tensor), tensor.shape, tensor)]
        return few_bit_entries(few, self.values)

    def notes(self) -> Iterator[str]:
        """Yield why weights of few bits are written in numbers, and which rounded ones transformers does not read."""
        if self.refused:
            yield f"weights of few bits {self.refused}; they are written as the arrays that they stand for"
        if self.format is not None:
            yield from self.format.unread(self.rounded)


def leaving(own: Sequence[Tensor], values: Values, rounds_to: Format | None = None) -> Leaving:
    """Return how the tensors of a model are written, and which of them in few bits.

    A folder states one format and one size of blocks, and all parts of a tensor are containers of it. Otherwise
    containers are written as the arrays that they stand for.

    Args:
        own: All tensors of the model.
        values: Their numbers.
        rounds_to: The format that weights of products in layers get, those of routers apart.

    Raises:
        UserError: No weight fits `rounds_to`, or containers have another format.
    """
    found: dict[str, tuple[Tensor, list[Format]]] = {}  # weights, and the ways to state each
    others: list[str] = []
    for tensor in own:
        parts = [values.wanted[path] for path, _ in tensor.parts]
        kinds = {(type(part), part.block) if isinstance(part, FewBits) else None for part in parts}
        if kinds == {None}:
            if rounds_to and rounds_to.has(tensor) and is_of_products(tensor):
                found[tensor.name] = tensor, [rounds_to]
            continue
        *_, rows, columns = outputs_first(tensor).shape
        ways = [way for way in stating(parts[0], (rows, columns)) if way.has(tensor)] if len(kinds) == 1 else []
        if ways:
            found[tensor.name] = tensor, ways
        else:
            others.append(tensor.name)
    first = next((ways for _, ways in found.values()), [])
    usual = [ways[0] for _, ways in found.values()]
    common = [way for way in first if all(way in ways for _, ways in found.values())]
    names = sorted({form.NAME for form in usual})
    refused = None
    if others:
        refused = f"such as {others[0]} are in a format that folders of this family do not have"
    elif not common and len(names) > 1:
        refused = f"are in {len(names)} formats ({', '.join(names)}), and a folder has one"
    elif found and not common:
        refused = f"have blocks of {len(set(usual))} sizes, and a folder has one"
    if rounds_to and rounds_to.NAME not in names:
        raise UserError(f"format={rounds_to.NAME}: folders of this family have no weight that fits it; leave it out")
    if rounds_to and refused:
        raise UserError(f"format={rounds_to.NAME}: weights of few bits {refused}; load the folder with dtype=bfloat16")
    if refused or not found:
        return Leaving(own, values, {}, None, refused)
    few = {name: common[0].tensor(tensor) for name, (tensor, _) in found.items()}
    return Leaving(own, values, few, common[0])
