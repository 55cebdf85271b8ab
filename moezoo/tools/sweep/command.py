"""`moezoo sweep`: train a run for every combination of listed values."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from moezoo.cli.command import ConfiguredCommand
from moezoo.config import overrides
from moezoo.config.options import key, take
from moezoo.errors import UserError
from moezoo.tools.sweep.expand import Sweep, expand
from moezoo.typed import Count, types_of


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    sweep_dir: str | None = key("the folder to write or continue (by default sweeps/DATE_TIME)", "FOLDER", default=None)
    only: Count | None = key("train only the run of this number, from 0", "N", default=None)


@dataclasses.dataclass(frozen=True)
class SweepCommand(ConfiguredCommand):
    """A command whose overrides may list several values."""

    def check(self, arguments: Sequence[str], prog: str) -> None:
        """Refuse what other commands refuse, in any of the runs."""
        _, words = take(Keys, self._split(arguments, prog)[0])
        for word in dict.fromkeys(word for element in expand(words).elements for word in element.words):
            overrides.read([word], types_of(Keys))


def main(arguments: Sequence[str]) -> int:
    """Check all runs, and train those that are not finished; return 0, or the exit code that docs/sweeps.md lists."""
    from moezoo.config.compose import folder_path
    from moezoo.tools.sweep.runs import check_same, run_all, start_process, write_report
    from moezoo.training.files import making, writing_to

    keys, words = take(Keys, arguments)
    sweep = expand(words, keys.only)
    if keys.only is not None and keys.sweep_dir is None:
        raise UserError(f"only={keys.only} is a part of a sweep; name the folder of the whole as sweep_dir=FOLDER")
    _check_runs(sweep)
    named = keys.sweep_dir or f"sweeps/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = folder_path(named, "sweep_dir")
    if keys.sweep_dir is not None:
        check_same(folder, sweep)
    with writing_to("sweep_dir", folder), making(folder, numbered=keys.sweep_dir is None) as made:
        write_report(made, sweep)
    return run_all(sweep, made, start_process)


def _check_runs(sweep: Sweep) -> None:
    """Compose and lay out every run. Raises `UserError` for what cannot be."""
    from moezoo.config.build import build_execution
    from moezoo.config.compose import compose
    from moezoo.parallel.mesh import abstract_mesh, cpu_devices, has_started

    if not has_started():
        cpu_devices(1)  # the devices are for the runs
    for element in sweep.elements:
        try:
            cfg = compose(*element.words)
            build_execution(cfg, abstract_mesh(cfg.mesh))
        except UserError as error:
            raise UserError(f"{error} (run {element.number}, {element.name})") from None


def _configure(*arguments: str) -> Any:
    """Return the configuration that `--cfg job` prints: of the run `only`, or of the first."""
    from moezoo.config.compose import compose

    keys, words = take(Keys, arguments)
    return compose(*expand(words, keys.only).chosen[0].words)


COMMAND = SweepCommand(
    "sweep",
    "train a run for every combination of listed values",
    main,
    keys=Keys,
    description="Train a run for every combination of the values that are listed, such as seed=0,1, one after the "
    "other. The same command with the same sweep_dir continues a sweep. Page: docs/sweeps.md of the repository.",
    configure=_configure,
    examples=(
        "optimizer.learning_rate=1e-3,3e-3 seed=0,1 model=mixtral steps=100",
        "dispatch=ring,ragged mesh=ep8 sweep_dir=sweeps/dispatch",
        "'seed=range(0,4)' sweep_dir=sweeps/seeds only=3",
    ),
)
