"""Models whose weights of few bits stay as a folder holds them: which arrays become containers, and how they leave."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.few_bits import FORMATS, FewBitTensor, Format
from moezoo.hub.holdings import Holding, Kept, Widened
from moezoo.hub.tensors import Tensor, list_names, tensors
from moezoo.hub.values import Values
from moezoo.hub.weight_files import DTYPES
from moezoo.hub.writing import Piece, few_bit_pieces, own_piece
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.nn.few_bits import FewBits, first_of_pieces
from moezoo.parallel.axes import Role, parameter_table
from moezoo.parallel.patterns import pattern_of
from moezoo.typed import show

# The dtypes of numbers that are not in few bits.
_PLAIN = {np.dtype(kind).name for kind in DTYPES.values()}


class _Form(NamedTuple):
    """How an array is kept: the format, the size of blocks, and the dtype of scales; None for numbers."""

    format: Format
    block: tuple[int, int]
    scale: np.dtype

    def __str__(self) -> str:
        rows, columns = self.block
        return f"{self.format.name} with blocks of {rows} x {columns} and scales in {self.scale.name}"

    @property
    def text(self) -> str:
        """One line that `read` understands, with a space: "fp8 128x128 float32"."""
        return f"{self.format.name} {self.block[0]}x{self.block[1]} {self.scale.name}"

    @classmethod
    def read(cls, text: str) -> "_Form":
        """Return the form of a `text`. Raises `UserError` for any other."""
        match = re.fullmatch(r"(\w+) (\d+)x(\d+) (float32|bfloat16|uint8)", text)
        forms = {form.name: form for form in FORMATS}
        if match is None or match[1] not in forms:
            raise UserError(f"init_forms has {show(text)}, which is no form of this version; leave init_forms out")
        return cls(forms[match[1]], (int(match[2]), int(match[3])), jnp.dtype(match[4]))


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
                    f"few bits cannot be kept: {other.names[0]} has {same or 'plain numbers'}, and {holding.names[0]}, "
                    f"which is in the same array, has {form or 'plain numbers'}; write dtype=bfloat16"
                )
            if form is not None and path not in containers and isinstance(holding, Kept):
                containers[path] = _container(holding.few, part, form)

    return _with_containers(shapes, containers) if containers else shapes


def _with_containers(shapes: LanguageModel, containers: Mapping[str, FewBits]) -> LanguageModel:
    def put(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path).lstrip(".")
        return _stacked(containers[name], leaf) if name in containers else leaf

    return jax.tree_util.tree_map_with_path(put, shapes)


def describe_forms(blueprint: Blueprint, holdings: Iterable[Holding]) -> dict[str, str]:
    """Return what a folder stores the arrays as that are not trained, by patterns of paths: a dtype, or few bits.

    Arrays whose tensors have several dtypes have the one that holds all their numbers. Raises `UserError` where tensors
    of one array have several formats.
    """
    found: dict[str, str] = {}
    for path, holding in ((f".{path}", each) for each in holdings for path, _ in each.tensor.parts):
        if path not in blueprint.constant_paths:
            continue
        text = holding.dtype.name
        if isinstance(holding, Kept | Widened):
            text = _Form(holding.few.format, holding.few.block, holding.scale_dtype).text
        if (other := found.setdefault(path, text)) != text:
            if " " in other + text:
                raise UserError(
                    f"few bits cannot be kept: {path} has {other} and {text} in one array; write "
                    "execution.param_dtype=bfloat16, or train it"
                )
            found[path] = jnp.promote_types(other, text).name
    kinds: dict[str, set[str]] = {}
    for path, *_ in parameter_table(blueprint.shapes):  # a pattern must not match what is trained
        kinds.setdefault(pattern_of(path), set()).add(found.get(path, ""))
    return {pattern_of(path) if len(kinds[pattern_of(path)]) == 1 else path: text for path, text in found.items()}


def in_forms(model: LanguageModel, forms: Mapping[str, str], constant: Collection[str]) -> LanguageModel:
    """Return a model whose arrays at the paths `constant` are as `forms` describes them; containers hold zeros.

    Raises `UserError` for a form that no folder has.
    """
    for text in forms.values():
        if text not in _PLAIN:
            _Form.read(text)
    names = {path: (path, pattern_of(path), "*") for path in constant}
    chosen = {path: forms[name] for path, some in names.items() for name in reversed(some) if name in forms}
    containers = {}
    for tensor in tensors(model, family_of(model.config).hub):
        for part, (path, _) in enumerate(tensor.parts):
            text = chosen.get(f".{path}", "")
            if " " in text and path not in containers:
                form = _Form.read(text)
                containers[path] = _container(form.format.tensor(tensor, form.block), part, form)

    def put(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if name[1:] in containers:
            shapes = _stacked(containers[name[1:]], x)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return x.astype(chosen[name]) if name in chosen else x

    return jax.tree_util.tree_map_with_path(put, model)


def in_format(shapes: LanguageModel, name: str) -> LanguageModel:
    """Return the shapes of a model whose weights have few bits where released folders of this format have them.

    Raises `UserError` where no weight fits the format.
    """
    form = next(form for form in FORMATS if form.name == name)
    containers = {}
    for tensor in tensors(shapes, family_of(shapes.config).hub):
        if form.has(tensor) and is_of_products(tensor) and (name != "int4" or ".experts." in tensor.parts[0][0]):
            few = form.tensor(tensor, form.block)
            for part, (path, _) in enumerate(tensor.parts):
                if path not in containers:
                    containers[path] = _container(few, part, _Form(form, few.block, form.scale_dtype))
    if not containers:
        raise UserError(f"--few-bits={name}: folders of this family have no weight that fits it; choose another format")
    return _with_containers(shapes, containers)


def _container(few: FewBitTensor, part: int, form: _Form) -> FewBits:
    """Return the container of one part, with shapes in place of arrays."""
    first, cut = few.tensor.split
    shape = few.tensor.shapes[part]
    if shape[cut - 1] % form.format.container.PER_BYTE:
        raise UserError(
            f"few bits cannot be kept: {few.values} has {shape[cut - 1]} neighbours in an array, expected an even "
            "number, because a byte holds two; write dtype=bfloat16"
        )
    of_rows, of_columns = (first_of_pieces(blocks).shape for blocks in few.part_blocks(part))
    return jax.eval_shape(
        lambda: form.format.container(
            values=jnp.zeros(few.kept_values.shapes[part], jnp.uint8),
            scale=jnp.zeros((*shape[:first], *of_columns, *of_rows), form.scale),
            outputs=len(shape) - cut,
            block=form.block,
            dtype=np.dtype(jnp.bfloat16),
        )
    )


def _stacked(container: FewBits, whole: jax.ShapeDtypeStruct) -> FewBits:
    """Return the container with the leading dimensions that the whole array has besides those of a part."""
    lead = whole.shape[: len(whole.shape) - len(container.shape)]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), container)


class Leaving(NamedTuple):
    """How the tensors of a model are written.

    Attributes:
        few: The weights that are written in few bits, by the name that they have in numbers.
        format: Their format; None if there are none.
        refused: Why containers of few bits become numbers, in words that follow "weights of few bits"; None if none do.
    """

    few: Mapping[str, FewBitTensor]
    format: Format | None = None
    refused: str | None = None


def leaving(own: Iterable[Tensor], arrays: Mapping[str, Any], rounds_to: Format | None = None) -> Leaving:
    """Return which tensors of a model, with `arrays` by their paths, are written in few bits.

    A folder has one format and one size of blocks, and all parts of a tensor are containers of it. Otherwise
    containers are written as the arrays that they stand for.

    Args:
        own: All tensors of the model.
        arrays: Its arrays and containers.
        rounds_to: The format that weights of products in layers get, those of routers apart.

    Raises:
        UserError: No weight fits `rounds_to`, or containers have another format.
    """
    found: dict[str, FewBitTensor] = {}
    others: list[str] = []
    for tensor in own:
        parts = [arrays[path] for path, _ in tensor.parts]
        kinds = {(type(part), part.block) if isinstance(part, FewBits) else None for part in parts}
        kind = kinds.pop()
        form = next((form for form in FORMATS if kind and form.container is kind[0]), None)
        if kinds or (kind and (form is None or not form.has(tensor))):
            others.append(tensor.name)
        elif form and kind:
            found[tensor.name] = form.tensor(tensor, kind[1])
        elif rounds_to and rounds_to.has(tensor) and is_of_products(tensor):
            found[tensor.name] = rounds_to.tensor(tensor, rounds_to.block)
    formats = {few.format.name: few.format for few in found.values()}
    sizes = {few.block for few in found.values()}
    refused = None
    if others:
        refused = f"such as {others[0]} are in a format that folders of this family do not have"
    elif len(formats) > 1:
        refused = f"are in {len(formats)} formats ({', '.join(sorted(formats))}), and a folder has one"
    elif len(sizes) > 1 and all(few.block == few.matrix for few in found.values()):
        found = {name: few.format.tensor(few.plain, None) for name, few in found.items()}
    elif len(sizes) > 1:
        refused = f"have blocks of {len(sizes)} sizes, and a folder has one"
    if rounds_to and rounds_to.name not in formats:
        raise UserError(f"format={rounds_to.name}: folders of this family have no weight that fits it; leave it out")
    if rounds_to and refused:
        raise UserError(f"format={rounds_to.name}: weights of few bits {refused}; load the folder with dtype=bfloat16")
    return Leaving({}, None, refused) if refused else Leaving(found, next(iter(formats.values()), None))


def rounding_warnings(few: Collection[FewBitTensor]) -> Iterator[str]:
    """Yield which weights, rounded to few bits, transformers does not read as they are written."""
    fp8 = [one for one in few if one.format.name == "fp8"]
    joined = [one.values for one in fp8 if one.lead]
    cut = [one.values for one in fp8 if any(n % size for n, size in zip(one.matrix, one.block, strict=True))]
    for names, why in ((joined, "have all experts of a layer"), (cut, "have blocks that are not whole")):
        if names:
            yield f"transformers 5.23 and 5.24 do not read FP8 weights that {why}: {list_names(names)}"


def is_of_products(tensor: Tensor) -> bool:
    """Return whether a weight is in a layer, and not in a router: these have few bits in released folders."""
    path, index = tensor.parts[0]
    return bool(index) and ".router." not in path


def own_pieces(tensor: Tensor, leaves: Leaving, values: Values) -> list[Piece]:
    """Return what a folder has of a tensor of the model: itself, or numbers of few bits and scales."""
    if (few := leaves.few.get(tensor.name)) is None:
        return [own_piece(tensor, values.dtype(tensor))]
    return few_bit_pieces(few, values.dtype(few.kept_scale))


def modules_in_numbers(own: Iterable[Tensor], few: Mapping[str, FewBitTensor]) -> set[str]:
    """Return the names of transformers' modules with a matrix in numbers."""
    names = {tensor.name for tensor in own if tensor.axes.role is Role.WEIGHT} - few.keys()
    return {name.removesuffix(".weight") for name in names}
