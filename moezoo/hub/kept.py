"""Models whose weights of few bits stay as a folder holds them: which arrays become containers."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.few_bits import FewBitTensor, Format
from moezoo.hub.holdings import Holding, Kept
from moezoo.models.base import LanguageModel
from moezoo.nn.few_bits import FewBits, first_of_pieces


class _Form(NamedTuple):
    """How an array is kept: the format, the size of blocks, and the dtype of scales; None for numbers."""

    format: Format
    block: tuple[int, int]
    scale: np.dtype

    def __str__(self) -> str:
        rows, columns = self.block
        return f"{self.format.name} with blocks of {rows} x {columns} and scales in {self.scale.name}"


def keep(shapes: LanguageModel, holdings: Iterable[Holding]) -> LanguageModel:
    """Return the shapes of a model in which every array that `Kept` holdings fill is a container.

    Raises `UserError` where an array would have two formats, or a format cannot hold it.
    """
    found: dict[str, tuple[Holding, _Form | None]] = {}
    containers: dict[str, FewBits] = {}
    for holding in holdings:
        form = None
        if isinstance(holding, Kept):
            form = _Form(holding.few.format, holding.few.block, holding.scale_dtype)
        for part, (path, _) in enumerate(holding.tensor.parts):
            other, same = found.setdefault(path, (holding, form))
            if same != form:
                raise UserError(
                    f"dtype=stored: {other.names[0]} has {same or 'plain numbers'}, and {holding.names[0]}, which is "
                    f"in the same array, has {form or 'plain numbers'}; load the folder with dtype=bfloat16"
                )
            if form is not None and path not in containers and isinstance(holding, Kept):
                containers[path] = _container(holding.few, part, form)

    def put(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path).lstrip(".")
        return _stacked(containers[name], leaf) if name in containers else leaf

    return jax.tree_util.tree_map_with_path(put, shapes) if containers else shapes


def _container(few: FewBitTensor, part: int, form: _Form) -> FewBits:
    """Return the container of one part, with shapes in place of arrays."""
    first, cut = few.tensor.split
    shape = few.tensor.shapes[part]
    if shape[cut - 1] % form.format.container.PER_BYTE:
        raise UserError(
            f"dtype=stored: {few.values} has {shape[cut - 1]} neighbours in an array, expected an even number, because "
            "a byte holds two; load the folder with dtype=bfloat16"
        )
    of_rows, of_columns = (first_of_pieces(blocks).shape for blocks in few.part_blocks(part))
    return form.format.container(
        values=jax.ShapeDtypeStruct(few.kept_values.shapes[part], jnp.uint8),
        scale=jax.ShapeDtypeStruct((*shape[:first], *of_columns, *of_rows), form.scale),
        outputs=len(shape) - cut,
        block=form.block,
        dtype=np.dtype(jnp.bfloat16),
    )


def _stacked(container: FewBits, whole: jax.ShapeDtypeStruct) -> FewBits:
    """Return the container with the leading dimensions that the whole array has besides those of a part."""
    lead = whole.shape[: len(whole.shape) - len(container.shape)]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), container)
