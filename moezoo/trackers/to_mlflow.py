"""MLflow: a run in an SQLite file in the folder `mlflow` of the run, or on a server."""

# The library is an extra.
# pyright: reportMissingImports=false

import dataclasses
import logging
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from moezoo.trackers.base import MetricsRow, RunStart, Tracker, Writer, numbers_in
from moezoo.typed import Size


@dataclasses.dataclass(frozen=True)
class MLflow(Tracker):
    """A run of MLflow with the name of the run's folder. Its id is in the file `mlflow/id` there, so a resume goes on.

    MLflow cannot remove a row. Where it has rows after the checkpoint, of a run that was killed, that run is deleted
    and another gets all rows.
    """

    library: ClassVar[str] = "mlflow"

    uri: str | None = None
    experiment: str = "moezoo"
    folder: str | None = None
    finish_seconds: Size = 30

    def start(self, run: RunStart) -> Writer:
        """Begin the run, or open it again, and write the rows that it lacks."""
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports on its tables between the lines of the run
        folder = run.folder / "mlflow" if self.folder is None else Path(self.folder).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        store, mark = self.uri or f"sqlite:///{folder}/mlflow.db", run.folder / "mlflow" / "id"
        is_new = self.uri is None and not (folder / "mlflow.db").exists()
        client = MlflowClient(store)
        experiment = client.get_experiment_by_name(self.experiment)
        artifacts = None if self.uri else (folder / "artifacts").resolve().as_uri()
        number = (
            client.create_experiment(self.experiment, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        where, _, name = mark.read_text().rpartition(" ") if mark.exists() and not is_new else ("", "", "")
        name = name if where == store else ""
        there = {each.step for each in client.get_metric_history(name, _EACH)} if name else set()
        if max(there, default=0) > (run.history[-1]["step"] if run.history else 0):
            client.delete_run(name)
            name, there = "", set()
        if not name:
            name = client.create_run(number, run_name=run.folder.name).info.run_id
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(f"{store} {name}")
        client.update_run(name, status="RUNNING")
        client.set_tag(name, "mlflow.note.content", "\n".join(f"    {line}" for line in run.text.splitlines()))
        client.log_text(name, run.yaml, "config.yaml")
        writer = _Run(client, name)
        for row in run.history:
            if row["step"] not in there:
                writer.row(row, None)
        return writer


_EACH = "logged"  # a metric of every row


class _Run(Writer):
    def __init__(self, client: Any, name: str):
        self._client, self._name = client, name

    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Log its numbers in one call, and a metric that every row has."""
        from mlflow.entities import Metric

        del load
        at = int(1000 * row.get("time", 0))
        numbers = {_EACH: 1.0, **numbers_in(row)}
        metrics = [Metric(name, number, at, row["step"]) for name, number in numbers.items()]
        self._client.log_batch(self._name, metrics=metrics)

    def picture(self, path: Path) -> None:
        """Copy the picture to the artifacts."""
        self._client.log_artifact(self._name, str(path))

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._name)
