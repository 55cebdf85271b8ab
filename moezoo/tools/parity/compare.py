"""Compare a Hugging Face folder in moezoo and in transformers, module by module.

Two modules are paired if they hold the same parameters by the family's table of names.
"""

import dataclasses
import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import moezoo.terminal.tables as tables
from moezoo.errors import UserError
from moezoo.hub.loading import from_pretrained
from moezoo.hub.opening import open_folder
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.layers import layer_addresses
from moezoo.models.names import Rows
from moezoo.parallel.axes import Role, parameter_table
from moezoo.tools.parity import peer
from moezoo.tools.recording import ModuleRecord, Where, record_model

# Ends of the paths of modules that compute something else than those of transformers with the same parameters: of the
# delta rule, gates have their activation inside, and norms have no gate.
_APART = (".attention.gate", ".attention.norm")


@dataclasses.dataclass(frozen=True)
class ModuleDifference:
    """One module: its name in transformers, its path in moezoo, and how far apart the two are.

    The output of a router is the gate of each token for each expert, zero for experts that were not chosen.

    Attributes:
        difference: The largest difference between the outputs, divided by the largest output of transformers.
        before: The same for the inputs; None if the inputs are not comparable.
        rerouted: For a router, the number of tokens that go to other experts.
    """

    theirs: str
    ours: str
    difference: float
    before: float | None
    rerouted: int = 0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All modules in the order in which they finish. `str` gives a table.

    Attributes:
        tolerance: The largest difference that counts as agreement.
        tokens: The number of tokens that both models read.
        unreached: The attention window, if `tokens` is too small to test it; otherwise None.
    """

    rows: tuple[ModuleDifference, ...]
    tolerance: float
    tokens: int
    unreached: int | None = None

    @property
    def first(self) -> ModuleDifference | None:
        """The first module whose input or output diverges."""
        return next((row for row in self.rows if self._divergence(row)), None)

    @property
    def worst(self) -> ModuleDifference:
        """The module with the largest difference."""
        return max(self.rows, key=lambda row: np.inf if np.isnan(row.difference) else row.difference)

    @property
    def verdict(self) -> str:
        """One line: how closely all modules agree, or which is the first that does not."""
        row, bound = self.first, f"{self.tolerance:.0e}"
        if float(bound) != self.tolerance:
            bound = f"{self.tolerance:.2e}"
        if row is None:
            worst = f"worst: {self.worst.theirs}, {self.worst.difference:.1e}"
            text = f"all {len(self.rows)} modules agree within {bound} ({worst})"
            if self.unreached is not None:
                text += f"; the window of {self.unreached} was not tested: set tokens above it (now {self.tokens})"
            return text
        text = f"first divergence: {self._divergence(row)} relative, expected at most {bound}"
        if row.rerouted:
            text += f"; {row.rerouted} of {self.tokens} tokens go to other experts"
            few = row.rerouted <= max(1, self.tokens // 20)
            text += ", possibly because two experts tie: try another seed" if few else ""
        return text

    def _divergence(self, row: ModuleDifference) -> str:
        """Return what of a module diverges and how far: its input, or else its output; empty where both agree."""
        for what, difference in (("input of ", row.before), ("", row.difference)):
            if difference is not None and not difference <= self.tolerance:  # also NaN
                return f"{what}{row.theirs} (ours: {row.ours}), {difference:.1e}"
        return ""

    def __str__(self) -> str:
        rows = (
            [row.theirs, row.ours, f"{row.difference:.1e}", "<-" * bool(self._divergence(row))] for row in self.rows
        )
        lines = tables.plain(["transformers", "moezoo", "difference"], rows, right=(2,), rule=False)
        return "\n".join([*lines, "", self.verdict])


def compare(folder: str | Path, tokens: int = 16, *, seed: int = 0, tolerance: float = 1e-4) -> Comparison:
    """Load a folder in moezoo and in transformers and compare every module on the same random tokens, in float32.

    Both models are in memory at the same time.

    Args:
        folder: A Hugging Face folder.
        tokens: How many tokens both models read.
        seed: The seed of the tokens.
        tolerance: The largest relative difference that counts as agreement.

    Raises:
        UserError: The folder is missing or damaged, PyTorch or transformers is not installed, one of the two libraries
            cannot load the folder, or `tokens` is more than `config.longest` of the model.
    """
    folder = Path(folder).expanduser()
    opened = open_folder(folder)
    peer.require_peers()
    peer.require_class(folder, opened.mapping["model_type"], opened.hub.type_of(opened.config))
    model = from_pretrained(folder, dtype=jnp.float32)
    if tokens > (limit := model.config.longest).tokens:
        raise UserError(f"tokens={tokens} exceeds {limit}; compare at most {limit.tokens}")
    ids = np.random.default_rng(seed).integers(0, model.vocab, (1, tokens))
    theirs_by_ours = pair_modules(model)
    ours = record_model(model, ids)
    names = {where: theirs_by_ours[where] for where in ours if where in theirs_by_ours}
    theirs = peer.record_modules(peer.load_peer(folder), ids, set(names.values()))
    rows = tuple(
        _compare_module(opened.nesting.to_folder(name), _path_in_model(where, model), ours[where], theirs[name])
        for where, name in names.items()
    )
    most = model.config.max_length
    windows = {b.attention.state(most).num_slots for stack in model.stacks for b in stack.blocks} - {most}
    return Comparison(rows, tolerance, tokens, max((w for w in windows if w >= tokens), default=None))


def _path_in_model(where: Where, model: LanguageModel) -> str:
    """Return a module's path in our model, with the index of its layer in the stack."""
    path, number = where
    if number is None:
        return path
    layer = layer_addresses(model.stacks)[number]
    return path.replace(layer.path, f"{layer.path}[{layer.index}]", 1)


def pair_modules(model: LanguageModel) -> dict[Where, str]:
    """Map our modules to the names of transformers' modules with the same parameters.

    A single matrix of ours can be a module of theirs.
    """
    rows = family_of(model.config).hub.rows(model.config)
    # transformers keeps a choice bias in the router of some models and beside it in others.
    held = [path.lstrip(".") for path, axes, _ in parameter_table(model) if axes.role is not Role.BUFFER]
    if model.unembedding.weight is None:  # tied: transformers has a module for it too
        held.append("unembedding.weight")
    found: dict[Where, str] = {}
    for prefix, number in (("", None), *((f"{layer.path}.", layer.number) for layer in layer_addresses(model.stacks))):
        same = _same_parameters(held, prefix, rows)
        found |= {(path, number): name.replace("{layer}", str(number)) for path, name in same.items()}
    return found


def _same_parameters(held: list[str], prefix: str, rows: Rows) -> dict[str, str]:
    """Map our paths below `prefix` to the names of the innermost modules with exactly the same parameters.

    All experts are one module.
    """
    # Ours -> theirs, for parameters that this model has.
    mine = [row for row in rows if not row.beside or prefix + row.beside in held]
    tensors = {prefix + path: row.name for row in mine for path in row.ours if prefix + path in held}
    found = {}
    modules = {module for path in tensors for module in itertools.accumulate(path.split("."), "{}.{}".format)}
    for module in sorted(modules):
        here = {name for path, name in tensors.items() if f"{path}.".startswith(f"{module}.")}
        levels = zip(*(name.split(".")[:-1] for name in here), strict=False)
        shared = itertools.takewhile(lambda parts: len(set(parts)) == 1 and parts[0] != "{expert}", levels)
        theirs = ".".join(parts[0] for parts in shared)
        if (
            theirs
            and not module.endswith(_APART)
            and here == {name for name in tensors.values() if name.startswith(f"{theirs}.")}
        ):
            found[module] = theirs
    return found


def _compare_module(theirs: str, path: str, ours: ModuleRecord, wanted: ModuleRecord) -> ModuleDifference:
    before = None if ours.input is None or wanted.input is None else _relative(ours.input, wanted.input)
    rerouted = 0
    if path.endswith(".router"):
        rerouted = int(((ours.output > 0) != (wanted.output > 0)).any(-1).sum())
    return ModuleDifference(theirs, path, _relative(ours.output, wanted.output), before, rerouted)


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference divided by the largest value of `theirs`; NaN if either array has one."""
    ours = ours.reshape(theirs.shape)
    scale = max(float(np.abs(theirs).max()), float(np.finfo(np.float32).tiny))
    with np.errstate(invalid="ignore"):  # the difference of two infinities is NaN
        return float(np.abs(ours - theirs).max()) / scale
