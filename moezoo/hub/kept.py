"""Models whose weights of few bits stay as a folder holds them: which arrays become containers of which form."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.few_bits import BY_NAME, FORMATS
from moezoo.hub.formats.base import FewBitTensor, Format, outputs_first
from moezoo.hub.holdings import FewBits, Holding
from moezoo.hub.tensors import Tensor, is_of_products, tensors
from moezoo.hub.weight_files import DTYPE_NAMES
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.nn.few_bits import FewBits as Container
from moezoo.nn.few_bits import first_of_pieces
from moezoo.parallel.axes import parameter_table, pattern_of
from moezoo.typed import check_fields, show

# The dtypes of numbers, and of the scales of few bits.
_SCALES = {*DTYPE_NAMES, "uint8"}


@dataclasses.dataclass(frozen=True)
class Form:
    """What an array is kept as that is not trained.

    Args:
        dtype: The dtype of its numbers, or of the scales of few bits.
        format: The format of few bits; None for numbers.
        block: The size of a block of few bits along outputs and inputs, each with its dimensions joined.

    Raises:
        UserError: This version has no such form.
    """

    dtype: str
    format: str | None = None
    block: tuple[int, ...] = ()

    def __post_init__(self):
        check_fields("init_forms", self)
        is_few = self.format is not None
        has_kind = self.dtype in (_SCALES if is_few else DTYPE_NAMES) and (not is_few or self.format in BY_NAME)
        if not has_kind or len(self.block) != 2 * is_few or min(self.block, default=1) < 1:
            raise _no_form(self)

    def __str__(self) -> str:
        if self.format is None:
            return self.dtype
        return f"{self.format} with blocks of {' x '.join(map(str, self.block))} and scales in {self.dtype}"

    @classmethod
    def of(cls, holding: Holding) -> "Form":
        """Return that of a tensor of a folder. Raises `UserError` for a format that is only widened."""
        if isinstance(holding, FewBits):
            return cls.of_few_bits(holding.few, holding.scale_dtype)
        return cls(holding.dtype.name)

    @classmethod
    def of_few_bits(cls, few: FewBitTensor, scale: np.dtype) -> "Form":
        """Return that of a weight with scales in this dtype. Raises `UserError` for a format that is only widened."""
        if few.format.NAME not in BY_NAME:
            raise UserError(
                f"few bits cannot be kept: {few.values} is in the format {few.format.NAME}, which is only widened; "
                "write dtype=bfloat16, or in a run execution.param_dtype=bfloat16"
            )
        return cls(scale.name, few.format.NAME, few.block)

    @classmethod
    def from_text(cls, text: str) -> "Form":
        """Return that of a run of an earlier version: "bfloat16", or "fp8 128x128 float32"."""
        try:
            *few, dtype = text.split(" ")
            return cls(dtype, few[0], tuple(map(int, few[1].split("x")))) if few else cls(dtype)
        except (ValueError, IndexError):
            raise _no_form(text) from None

    def tensor(self, tensor: Tensor) -> FewBitTensor | None:
        """Return a weight in this form; None for one in numbers. Raises `UserError` where the format has no such."""
        if self.format is None:
            return None
        *_, rows, columns = outputs_first(tensor).shape
        ways = BY_NAME[self.format].stating((self.block[0], self.block[1]), (rows, columns))
        if not ways:
            raise _no_form(self)
        return ways[0].tensor(tensor)


def _no_form(form: Any) -> UserError:
    return UserError(f"init_forms has {show(str(form))}, which is no form of this version; leave init_forms out")


def keep(shapes: LanguageModel, holdings: Iterable[Holding]) -> LanguageModel:
    """Return the shapes of a model in which every array that holdings in few bits fill is a container.

    Raises `UserError` where an array would have two formats, or a format cannot hold it.
    """
    found: dict[str, tuple[Holding, Form | None]] = {}
    containers: dict[str, Container] = {}
    for holding in holdings:
        form = Form.of(holding) if isinstance(holding, FewBits) else None
        for part, (path, _) in enumerate(holding.tensor.parts):
            other, same = found.setdefault(path, (holding, form))
            if same != form:
                raise UserError(
                    f"few bits cannot be kept: {other.names[0]} has {same or 'plain numbers'}, and {holding.names[0]}, "
                    f"which is in the same array, has {form or 'plain numbers'}; write dtype=bfloat16"
                )
            if isinstance(holding, FewBits) and path not in containers:
                containers[path] = _container(holding.few, part, holding.scale_dtype)

    return _with_containers(shapes, containers) if containers else shapes


def _with_containers(shapes: LanguageModel, containers: Mapping[str, Container]) -> LanguageModel:
    def put(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path).lstrip(".")
        return _stacked(containers[name], leaf) if name in containers else leaf

    return jax.tree_util.tree_map_with_path(put, shapes)


def describe_forms(blueprint: Blueprint, holdings: Iterable[Holding]) -> dict[str, Form]:
    """Return what a folder stores the arrays as that are not trained, by patterns of paths.

    Arrays whose tensors have several dtypes have the one that holds all their numbers. Raises `UserError` where tensors
    of one array have several formats.
    """
    found: dict[str, Form] = {}
    for path, holding in ((f".{path}", each) for each in holdings for path, _ in each.tensor.parts):
        if path not in blueprint.constant_paths:
            continue
        form = Form.of(holding)
        if (other := found.setdefault(path, form)) != form:
            if form.format or other.format:
                raise UserError(
                    f"few bits cannot be kept: {path} has {other} and {form} in one array; write "
                    "execution.param_dtype=bfloat16, or train it"
                )
            found[path] = Form(jnp.promote_types(other.dtype, form.dtype).name)
    kinds: dict[str, set[Form | None]] = {}
    for path, *_ in parameter_table(blueprint.shapes):  # a pattern must not match what is trained
        kinds.setdefault(pattern_of(path), set()).add(found.get(path))
    return {pattern_of(path) if len(kinds[pattern_of(path)]) == 1 else path: form for path, form in found.items()}


def in_forms(model: LanguageModel, forms: Mapping[str, Form], constant: Collection[str]) -> LanguageModel:
    """Return a model whose arrays at the paths `constant` are as `forms` describes them; containers hold zeros.

    Raises `UserError` for a form that no folder has.
    """
    names = {path: (path, pattern_of(path), "*") for path in constant}
    chosen = {path: forms[name] for path, some in names.items() for name in reversed(some) if name in forms}
    containers = {}
    for tensor in tensors(model, family_of(model.config).hub):
        for part, (path, _) in enumerate(tensor.parts):
            form = chosen.get(f".{path}")
            if form and path not in containers and (few := form.tensor(tensor)):
                containers[path] = _container(few, part, jnp.dtype(form.dtype))

    def put(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if name[1:] in containers:
            shapes = _stacked(containers[name[1:]], x)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return x.astype(chosen[name].dtype) if name in chosen else x

    return jax.tree_util.tree_map_with_path(put, model)


def usual_tensors(shapes: LanguageModel, form: Format | None) -> Iterator[Tensor | FewBitTensor]:
    """Yield the tensors of a model, in few bits where released folders of the format have them."""
    for tensor in tensors(shapes, family_of(shapes.config).hub):
        of_experts = ".experts." in tensor.parts[0][0]
        if form is not None and form.has(tensor) and is_of_products(tensor) and (of_experts or not form.OF_EXPERTS):
            yield form.tensor(tensor)
        else:
            yield tensor


def usual_forms(shapes: LanguageModel, form: Format | None, dtype: str) -> dict[str, Form]:
    """Return what released folders of a format store the arrays of a model as, by path; those in numbers have `dtype`.

    Raises `UserError` for a format that is only widened.
    """
    found = {}
    for tensor in usual_tensors(shapes, form):
        is_few = isinstance(tensor, FewBitTensor)
        for path, _ in (tensor.tensor if is_few else tensor).parts:
            if f".{path}" not in found:
                found[f".{path}"] = Form.of_few_bits(tensor, tensor.format.SCALE_DTYPE) if is_few else Form(dtype)
    return found


def usual_bytes(shapes: LanguageModel, form: Format | None, dtype: str) -> int:
    """Return the bytes of all tensors that a released folder of a format has, with numbers in `dtype`."""
    total = 0
    for tensor in usual_tensors(shapes, form):
        if isinstance(tensor, FewBitTensor):
            total += tensor.stored_bytes
        else:
            total += math.prod(tensor.shape) * jnp.dtype(dtype).itemsize
    return total


def in_format(shapes: LanguageModel, name: str) -> LanguageModel:
    """Return the shapes of a model whose weights have few bits where released folders of this format have them.

    Raises `UserError` where no weight fits the format, for a format that is only widened, and for another name.
    """
    if name not in BY_NAME:
        is_read = name in {form.NAME for form in FORMATS}
        why = f"{name} is only widened while loading, so leave --few-bits out; else " if is_read else ""
        raise UserError(f"--few-bits={show(name)[:80]}: {why}expected one of {', '.join(BY_NAME)}")
    form = BY_NAME[name]()
    containers = {}
    for few in (each for each in usual_tensors(shapes, form) if isinstance(each, FewBitTensor)):
        for part, (path, _) in enumerate(few.tensor.parts):
            if path not in containers:
                containers[path] = _container(few, part, form.SCALE_DTYPE)
    if not containers:
        raise UserError(f"--few-bits={name}: folders of this family have no weight that fits it; choose another format")
    return _with_containers(shapes, containers)


def _container(few: FewBitTensor, part: int, scale: np.dtype) -> Container:
    """Return the container of one part, with shapes in place of arrays; `scale` is the dtype of the scales."""
    first, cut = few.tensor.split
    shape, kind = few.tensor.shapes[part], few.format.CONTAINER
    if shape[cut - 1] % kind.PER_BYTE:
        raise UserError(
            f"few bits cannot be kept: {few.values} has {shape[cut - 1]} neighbours in an array, expected an even "
            "number, because a byte holds two; write dtype=bfloat16"
        )
    of_rows, of_columns = (first_of_pieces(blocks).shape for blocks in few.part_blocks(part))
    return jax.eval_shape(
        lambda: kind(
            values=jnp.zeros(few.kept_values.shapes[part], jnp.uint8),
            scale=jnp.zeros((*shape[:first], *of_columns, *of_rows), scale),
            outputs=len(shape) - cut,
            block=few.block,
            dtype=np.dtype(jnp.bfloat16),
        )
    )


def _stacked(container: Container, whole: jax.ShapeDtypeStruct) -> Container:
    """Return the container with the leading dimensions that the whole array has besides those of a part."""
    lead = whole.shape[: len(whole.shape) - len(container.shape)]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), container)
