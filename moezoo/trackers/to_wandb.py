"""Weights & Biases: a run in the folder `wandb` of the run, which `wandb sync` uploads, or at once with mode=online."""

# The library is an extra.
# pyright: reportMissingImports=false

import dataclasses
import netrc
import os
import shutil
import urllib.parse
import uuid
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from moezoo.errors import UserError
from moezoo.trackers.base import MetricsRow, RunStart, Tracker, Writer, numbers_in
from moezoo.typed import Size


@dataclasses.dataclass(frozen=True)
class WandB(Tracker):
    """A run of W&B with the name of the run's folder. Its id is in the file `wandb/id` there, so a resume goes on.

    Offline, a run that continues replaces what it has here by a folder that begins with the rows so far. Online, W&B
    keeps the rows that it has, also those after the checkpoint of a killed run, and gets those that it lacks.
    """

    library: ClassVar[str] = "wandb"

    project: str = "moezoo"
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"
    folder: str | None = None
    finish_seconds: Size = 30

    def check(self) -> None:
        """Also refuse an upload without a key: W&B would ask for one."""
        super().check()
        if self.mode == "online" and not _has_key():
            raise UserError("tracker.mode=online: W&B has no key here; run wandb login, or write tracker.mode=offline")

    def start(self, run: RunStart) -> Writer:
        """Begin the run, or open it again, and write the rows that it lacks."""
        import wandb

        folder = run.folder if self.folder is None else Path(self.folder).expanduser()
        mark = run.folder / "wandb" / "id"
        name = mark.read_text() if mark.exists() else uuid.uuid4().hex[:8]
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(name)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (folder / "wandb").glob(f"offline-run-*-{name}"):
            shutil.rmtree(old)
        opened = wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.folder.name,
            id=name,
            dir=folder,
            config=dict(run.config),
            notes=run.text,
            mode=self.mode,
            resume="allow" if self.mode == "online" else None,
            # Only what the run reports: no copy of the terminal, the machine's figures, code or git.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                finish_timeout=self.finish_seconds,
            ),
        )
        writer = _Run(opened)
        for row in run.history:
            writer.row(row, None)
        return writer


class _Run(Writer):
    def __init__(self, run: Any):
        self._run, self._first, self._last = run, run.step, 0

    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Log its numbers, unless W&B has this step."""
        del load
        self._last = row["step"]
        if row["step"] >= self._first:
            at = {"_timestamp": row["time"]} if "time" in row else {}
            self._run.log({**numbers_in(row), **at}, step=row["step"], commit=True)

    def picture(self, path: Path) -> None:
        """Put the picture into the summary of the run, because the row of the last step is complete."""
        import wandb

        self._run.summary[f"pictures/{path.stem}"] = wandb.Image(str(path))

    def finish(self) -> None:
        """Write, and with mode=online upload, what is left."""
        self._run.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
