"""A Hugging Face folder in moezoo and in transformers, module by module: where they part first, and by how much.

Two modules are the same where they hold the same parameters, as the family's table of names says.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from moezoo.hub import peer
from moezoo.hub.folders import from_pretrained
from moezoo.hub.recording import ModuleRecord, Where, record_model
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.layers import layer_places
from moezoo.parallel.axes import parameter_table


@dataclasses.dataclass(frozen=True)
class ModuleDifference:
    """One module: its name in the folder, its path in our model, and how far apart the two are.

    `difference` is the largest of its output, `before` that of its input (None: no counterpart), each over the largest
    value that transformers has there. Of a router, the output is each token's gate for each expert, and
    `rerouted` counts the tokens that go to other experts.
    """

    theirs: str
    ours: str
    difference: float
    before: float | None
    rerouted: int = 0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All modules in the order they finish, and the `tolerance` they were held to. Printed, it is a table.

    `unreached`: the window of attention that so few `tokens` do not fill, so that nothing is said of it.
    """

    rows: tuple[ModuleDifference, ...]
    tolerance: float
    tokens: int
    unreached: int | None = None

    @property
    def first(self) -> ModuleDifference | None:
        """The first module that diverges, in what enters it or in what it returns."""
        return next((row for row in self.rows if self._diverges(row)), None)

    @property
    def worst(self) -> ModuleDifference:
        """The module that is furthest apart."""
        return max(self.rows, key=lambda row: np.inf if np.isnan(row.difference) else row.difference)

    @property
    def verdict(self) -> str:
        """One line: that all agree and how closely, or the first that does not."""
        row = self.first
        if row is None:
            worst = f"worst: {self.worst.theirs}, {self.worst.difference:.1e}"
            text = f"all {len(self.rows)} modules agree within {self._bound} ({worst})"
            if self.unreached is not None:
                text += (
                    f"; {self.tokens} tokens do not reach the window of {self.unreached}, which more than that would"
                )
            return text
        difference, what = row.difference, f"{row.theirs} (ours: {row.ours})"
        if self._enters_apart(row):
            assert row.before is not None
            difference, what = row.before, f"what enters {what}"
        text = f"first divergence: {what}, {difference:.1e} relative, expected at most {self._bound}"
        if row.rerouted:
            text += f"; {row.rerouted} of {self.tokens} tokens go to other experts"
            text += ", which a tie of two can do: try another seed" if row.rerouted <= max(1, self.tokens // 20) else ""
        return text

    @property
    def _bound(self) -> str:
        short = f"{self.tolerance:.0e}"
        return short if float(short) == self.tolerance else f"{self.tolerance:.2e}"

    def _agrees(self, difference: float) -> bool:
        return difference <= self.tolerance  # which no NaN is

    def _diverges(self, row: ModuleDifference) -> bool:
        return self._enters_apart(row) or not self._agrees(row.difference)

    def _enters_apart(self, row: ModuleDifference) -> bool:
        return row.before is not None and not self._agrees(row.before)

    def __str__(self) -> str:
        columns = [("transformers", "moezoo", "difference")]
        columns += [(row.theirs, row.ours, f"{row.difference:.1e}") for row in self.rows]
        first, second = (max(len(line[i]) for line in columns) for i in (0, 1))
        marks = ["", *("  <-" if self._diverges(row) else "" for row in self.rows)]
        lines = [f"{a:<{first}}  {b:<{second}}  {c:>10}{m}" for (a, b, c), m in zip(columns, marks, strict=True)]
        return "\n".join([*lines, "", self.verdict])


def compare(folder: str | Path, tokens: int = 16, *, seed: int = 0, tolerance: float = 1e-4) -> Comparison:
    """Both read the same `tokens` random tokens, in float32, each from the folder; both are in memory at once.

    Raises `UserError` where PyTorch or transformers are not installed, and when either cannot load the folder.
    """
    peer.require_peers()
    folder = Path(folder).expanduser()
    model = from_pretrained(folder, dtype=jnp.float32)
    ids = np.random.default_rng(seed).integers(0, model.vocab, (1, tokens))
    theirs_by_ours = pair_modules(model)
    ours = record_model(model, ids)
    names = {where: theirs_by_ours[where] for where in ours if where in theirs_by_ours}
    theirs = peer.record_modules(peer.load_peer(folder), ids, set(names.values()))
    rows = tuple(
        _compare_module(name, _path_in_model(where, model), ours[where], theirs[name]) for where, name in names.items()
    )
    window = model.config.window
    return Comparison(rows, tolerance, tokens, window if window is not None and window >= tokens else None)


def _path_in_model(where: Where, model: LanguageModel) -> str:
    """A module's path in our model, with its layer's index in the stack."""
    path, number = where
    if number is None:
        return path
    place = layer_places(model.stacks)[number]
    return path.replace(place.path, f"{place.path}[{place.index}]", 1)


def pair_modules(model: LanguageModel) -> dict[Where, str]:
    """Our modules and the names of theirs with the same parameters; a part that is a matrix may be a module there."""
    hub = family_of(model.config).hub
    held = [path.lstrip(".") for path, _, _ in parameter_table(model)]
    found: dict[Where, str] = {(path, None): name for path, name in _same_parameters(held, "", hub.NAMES).items()}
    for place in layer_places(model.stacks):
        same = _same_parameters(held, f"{place.path}.", hub.LAYER_NAMES)
        found |= {(path, place.number): name.replace("{layer}", str(place.number)) for path, name in same.items()}
    return found


def _same_parameters(held: list[str], prefix: str, table: Any) -> dict[str, str]:
    """By our path, below `prefix`, the name of the module that has exactly the parameters there."""
    tensors = {}  # ours -> theirs, of the parameters that there are
    for ours, theirs in table.items():
        for name in (ours,) if isinstance(ours, str) else ours:
            if prefix + name in held:
                tensors[prefix + name] = theirs
    found = {}
    for ancestor in sorted({ancestor for path in tensors for ancestor in _ancestors(path)}):
        here = {name for path, name in tensors.items() if f"{path}.".startswith(f"{ancestor}.")}
        module = _common(here)
        if module and here == {name for name in tensors.values() if name.startswith(f"{module}.")}:
            found[ancestor] = module
    return found


def _ancestors(path: str) -> list[str]:
    """A path and the paths of all modules that it lies in."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _common(names: set[str]) -> str:
    """The module that all tensors of `names` lie in; one module holds all experts."""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1 or parts[0] == "{expert}":
            break
        shared.append(parts[0])
    return ".".join(shared)


def _compare_module(theirs: str, path: str, ours: ModuleRecord, wanted: ModuleRecord) -> ModuleDifference:
    before = None
    if ours.input is not None and wanted.input is not None:
        before = _relative(ours.input, wanted.input)
    rerouted = 0
    if path.endswith(".router"):
        differs = (ours.output > 0) != (wanted.output > 0)
        rerouted = int(differs.any(-1).sum())
    return ModuleDifference(theirs, path, _relative(ours.output, wanted.output), before, rerouted)


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference over the largest value; NaN where either has one."""
    ours = ours.reshape(theirs.shape)
    scale = max(float(np.abs(theirs).max()), float(np.finfo(np.float32).tiny))
    with np.errstate(invalid="ignore"):  # the difference of infinities is NaN
        return float(np.abs(ours - theirs).max()) / scale
