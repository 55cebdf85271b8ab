"""Load the model of a Hugging Face folder onto the devices that hold it.

Each process reads the parts of tensors that its own devices hold, each byte once, and writes them where they stay. No
module here uses one above it:

| module | from a name in a folder to an array on devices |
|---|---|
| `loading` | starts all, and reads pieces in threads |
| `opening`, `other_names` | which model this is, by config.json and headers, and its tensors by the family's names |
| `holdings`, `few_bits` | how the folder holds a tensor, in numbers or in few bits, and the pieces that are read |
| `tensors`, `weight_files` | which arrays a tensor has, in which order of dimensions; its bytes in a file |
| `arrays`, `regions` | the boxes of arrays that devices hold, and where they are written; the bytes that cover them |
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moezoo.errors import UserError, check_type, describe_class
from moezoo.host.machine import check_host
from moezoo.hub.adapters import load_adapter
from moezoo.hub.arrays import Arriving, Boxes
from moezoo.hub.holdings import Holding, Piece
from moezoo.hub.opening import Found, OpenFolder, check_tensors, find_model, folder_argument, open_folder
from moezoo.hub.other_names import FREQUENCIES, check_frequencies
from moezoo.hub.tensors import arrays_by_path, count, list_names, require_names
from moezoo.hub.upcycling import NOT_UPCYCLED, Upcycle, complete, deviations, spread
from moezoo.hub.weight_files import DTYPES
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.nn.few_bits import cut_pieces
from moezoo.parallel import distributed
from moezoo.parallel.execution import Execution
from moezoo.parallel.memory import check_devices
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.terminal.progress import bar_on
from moezoo.typed import show

_THREADS = 4
_LARGEST_PIECE = 2**22  # bytes
_LEAST_SHOWN = 2**28  # bytes of a load whose progress is shown


def from_pretrained(
    folder: str | Path,
    execution: Execution | None = None,
    dtype: DTypeLike | Literal["stored"] | None = None,
    upcycle: Upcycle = NOT_UPCYCLED,
    adapter: str | Path | None = None,
) -> LanguageModel:
    """Load the model from a Hugging Face folder.

    Nothing is downloaded, and no code from the folder runs. Of a model for images the text model is loaded. A warning
    names tensors that no parameter has, such as those for images, and one those that hold NaN or infinities.

    The host needs little memory besides the arrays of its own devices: less than two of the largest tensors, or
    150 MB. If devices of several processes hold the model, all of these processes call this function, and each reads
    what its own devices hold.

    Args:
        folder: The folder, which holds config.json and safetensors, in one file or in several with an index.
        execution: The mesh and rules that lay out the arrays. By default every array is on one device.
        dtype: The dtype of the parameters: float32, bfloat16 or float16. By default the one that most stored numbers
            have, with float32 for float64 and bfloat16 for numbers of few bits, which are widened. Choice biases are
            always float32. `stored` keeps weights of few bits as they are, in containers (`moezoo.nn.few_bits`); all
            others have the dtype that most of them are stored in.
        upcycle: For the folder of a dense model: the experts that its MLPs are copied into.
        adapter: A folder with low-rank pairs for this model, as for `load_adapter`.

    Raises:
        UserError: The architecture or a key of config.json is unknown. A tensor is missing, has no parameter, has the
            wrong shape, is cut short, or is in a file outside the folder. Embeddings are tied, but the folder has two
            that differ. A file changes while it is read. `dtype` is another one. The arrays exceed the memory of this
            machine or of its devices. With several processes, one of them raised.
    """
    if execution is not None:
        check_type("execution", execution, Execution, "take one from moezoo.execution(cfg)")
    if not isinstance(upcycle, Upcycle):
        raise UserError(f"upcycle is {describe_class(upcycle)}; write upcycle=moezoo.Upcycle(experts=8, per_token=2)")
    where, target = folder_argument(folder), _dtype_argument(dtype)
    mesh = None if execution is None else execution.mesh
    if isinstance(mesh, AbstractMesh):
        raise UserError(
            "execution: its mesh has no devices; take one from moezoo.execution(cfg), on a machine with them"
        )

    def load() -> _Loaded:
        opened = open_folder(where, upcycle)
        found = find_model(opened, target)
        named = {path: x for path, x in arrays_by_path(found.shapes).items() if not upcycle.draws(path)}
        require_names(named, [holding.tensor for holding in found.holdings])
        shapes = found.shapes
        if execution is not None and mesh is not None:
            shapes = jax.eval_shape(functools.partial(cut_pieces, execution=execution), shapes)
        shardings = on_mesh(execution or Execution()).shardings(shapes)
        return _load(opened, found._replace(shapes=shapes), shardings, mesh)

    loaded = _load_everywhere(load, where, mesh, upcycle)
    if adapter is None:
        return loaded.model
    return load_adapter(loaded.model, adapter, execution, base_sha256=loaded.sha256)


def load_as(
    folder: Path, shapes: PyTree, wanted: PyTree, execution: Execution | None, sha256: str, upcycle: Upcycle
) -> PyTree:
    """Load the tensors of a folder into arrays that a run describes. All processes of the execution's mesh call it.

    Args:
        folder: A Hugging Face folder.
        shapes: The model of the run: each array has its dtype, or is a container that fits what the folder has.
        wanted: The same, with None in place of arrays that are not wanted.
        execution: The mesh and rules that lay out the arrays; None for one device.
        sha256: The hash that the folder had when the run began (`OpenFolder.sha256`).
        upcycle: What becomes of a dense model.

    Returns:
        `wanted` with arrays.

    Raises:
        UserError: The folder is missing, or another one. Otherwise as `from_pretrained` does.
    """
    mesh = None if execution is None else execution.mesh

    def load() -> _Loaded:
        if not folder.is_dir():
            raise UserError(
                f"init_from={folder}: the folder is not there any more; put it back, or set init_from to where it is"
            )
        opened = open_folder(folder, upcycle)
        if opened.sha256 != sha256:
            raise UserError(
                f"init_from={folder} is not the folder that the run began with (sha256 {sha256}, and now "
                f"{opened.sha256}); name that one"
            )
        opened = dataclasses.replace(opened, config=shapes.config)
        found = check_tensors(opened, Blueprint(shapes.config).shapes)
        needed = {path: x for path, x in arrays_by_path(wanted).items() if jax.tree.leaves(x)}
        holdings = [one for one in found.holdings if any(path in needed for path, _ in one.tensor.parts)]
        shardings = on_mesh(execution or Execution()).shardings(shapes)
        chosen = lambda x, sharding: None if x is None else sharding  # noqa: E731
        shardings = jax.tree.map(chosen, wanted, shardings, is_leaf=lambda x: x is None)
        return _load(opened, found._replace(shapes=wanted, holdings=holdings), shardings, mesh)

    return _load_everywhere(load, folder, mesh, upcycle).model


def _load_everywhere(
    load: Callable[[], "_Loaded"], folder: Path, mesh: Mesh | AbstractMesh | None, upcycle: Upcycle
) -> "_Loaded":
    """Return what `load` does on every process that has devices of the mesh, and warn of what a user should know."""
    if mesh is not None and mesh.is_multi_process:
        loaded = distributed.together(load)
        facts = {"the tensors of the folder": loaded.sha256}
        distributed.check_same(facts, f"the processes have different folders {folder}", "copy one to all of them")
    else:
        loaded = load()
    for note in loaded.notes:
        warnings.warn(f"{folder}: {note}", stacklevel=3)
    if upcycle.experts:
        loaded = loaded._replace(model=complete(loaded.model, upcycle, loaded.noise))
    return loaded


class _Loaded(NamedTuple):
    """What a process has loaded.

    Attributes:
        model: The model; with shapes in place of arrays that the folder does not have and `complete` draws.
        notes: What the user should know about it.
        sha256: The hash of the folder.
        noise: The noise that `complete` adds.
    """

    model: Any
    notes: Sequence[str]
    sha256: str
    noise: Mapping[str, Mapping[int, float]]


def _load(opened: OpenFolder, found: Found, shardings: PyTree, mesh: Mesh | AbstractMesh | None) -> _Loaded:
    shapes, holdings, unused = found
    folder, upcycle = opened.folder, opened.upcycle
    check_frequencies(opened.files, unused.get(FREQUENCIES, ()), shapes)
    notes = [f"{count(names)} not loaded, for {purpose}: {list_names(names)}" for purpose, names in unused.items()]
    leaves = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True)
    arrays = {jax.tree_util.keystr(path).lstrip("."): Arriving(shape, where) for (path, shape), where in leaves}
    what = f"{folder}: the model in {jax.tree.leaves(shapes)[0].dtype.name}"
    advice = "load it on a machine with more memory"
    if all(array.is_on_host for array in arrays.values()):
        check_host(what, sum(array.size for array in arrays.values()), advice)
    else:
        check_devices(what, sum(array.size_per_device for array in arrays.values()), mesh, advice)
    noise = deviations(holdings, arrays, upcycle)
    boxes = {path: array.begin() for path, array in arrays.items() if not upcycle.draws(path)}
    places = spread(boxes) if upcycle.experts else boxes
    odd = _read(sorted(holdings, key=lambda holding: holding.begins), places, folder)
    if odd:
        notes.append(f"tensors with NaN or infinities: {list_names(odd)}")
    filled = [array.finish() if path in boxes else array.to_draw for path, array in arrays.items()]
    return _Loaded(jax.tree.unflatten(jax.tree.structure(shapes), filled), notes, opened.sha256, noise)


def _read(holdings: Sequence[Holding], arrays: Mapping[str, Boxes], folder: Path) -> list[str]:
    """Read tensors into `arrays`; return the names of those with numbers that are not finite."""
    largest = max((holding.size for holding in holdings), default=0)
    most = min(max(largest // (2 * _THREADS), 2**20), _LARGEST_PIECE)
    pieces = [piece for holding in holdings for piece in holding.pieces(arrays)]
    sizes = collections.Counter[str]()
    for piece in pieces:
        sizes[piece.name] += piece.size
    odd: dict[str, None] = {}
    waiting = collections.deque[tuple[Piece, Future[bool]]]()
    total = sum(holding.size for holding in holdings)
    with ThreadPoolExecutor(_THREADS) as pool, _Progress(folder, total, sizes) as progress:

        def finish() -> None:
            piece, future = waiting.popleft()
            if not future.result():
                odd[piece.name] = None
            progress.add(piece.name, piece.size)

        try:
            for piece in itertools.chain.from_iterable(whole.cut(most) for whole in pieces):
                waiting.append((piece, pool.submit(piece.read)))
                while len(waiting) > 2 * _THREADS:
                    finish()
            while waiting:
                finish()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return list(odd)


class _Progress:
    """How far loading is, on stderr: a bar on a terminal, elsewhere one line at the end; neither for few bytes.

    Of several processes only the first prints.

    Args:
        folder: The folder that is loaded.
        size: The bytes of all tensors.
        read: The bytes that this process reads of each tensor of which it reads something, by name.
    """

    def __init__(self, folder: Path, size: int, read: Mapping[str, int]):
        self._folder, self._size, self._read = folder, size, read
        self._done, self._seen = 0, set[str]()
        self._shows, self._held = size >= _LEAST_SHOWN and distributed.is_first(), contextlib.ExitStack()
        self._bar: Any = None

    def __enter__(self) -> "_Progress":
        self._began = time.monotonic()
        if self._shows and (bar := self._held.enter_context(bar_on(sys.stderr))):
            # In bytes, because tensors differ in size, and the time left follows from what is done.
            total = sum(self._read.values())
            self._bar, self._task = bar, bar.add_task("", total=total / 1e6, unit="MB")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
        if self._shows and self._bar is None and error is None:
            seconds = time.monotonic() - self._began
            read = f"{self._done / 1e9:.2f} of {self._size / 1e9:.2f} GB"
            print(
                f"loaded {self._folder}: {len(self._seen)} tensors, {read}, {self._speed()}, {seconds:.1f} s",
                file=sys.stderr,
            )

    def add(self, name: str, size: int) -> None:
        """Show that `size` bytes of a tensor are read."""
        self._done += size
        self._seen.add(name)
        if self._bar is not None:
            text = f"{len(self._seen)} of {len(self._read)} tensors, {self._speed()}"
            self._bar.update(self._task, completed=self._done / 1e6, description=text)

    def _speed(self) -> str:
        return f"{self._done / 1e6 / max(time.monotonic() - self._began, 1e-3):,.0f} MB/s"


def _dtype_argument(dtype: DTypeLike | None) -> str | None:
    """Return the name of the dtype that the user asked for. Raises `UserError` for one that a model cannot have."""
    if dtype is None or (isinstance(dtype, str) and dtype == "stored"):
        return dtype
    valid = sorted({np.dtype(kind).name for kind in DTYPES.values()} | {"stored"})
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = show(dtype)[:80]
    if name not in valid:
        raise UserError(f"dtype={name}: expected one of {', '.join(valid)}")
    return name
