"""Processes that a cluster has started and describes."""

import dataclasses
from typing import ClassVar, NamedTuple

from jax._src.clusters import ClusterEnv  # JAX has no public function that reports what it would detect

from moezoo.parallel.distributed.base import Distributed


@dataclasses.dataclass(frozen=True)
class Auto(Distributed):
    """The processes of a TPU slice, Slurm, Open MPI or Kubernetes: the entry `distributed=auto`."""

    name: ClassVar[str] = "auto"
    heartbeat_seconds: int = 30
    start_seconds: int = 300


class Cluster(NamedTuple):
    """What describes the processes of a run to JAX.

    Attributes:
        name: JAX's name of it, such as "slurm".
        processes: The number of processes; None where only a server knows it.
        process: The number of this process; None likewise.
    """

    name: str
    processes: int | None = None
    process: int | None = None


def detect() -> Cluster | None:
    """Return what `distributed=auto` would join, as JAX detects it; None where nothing describes other processes.

    Nothing is started. On a TPU the machine's own metadata server is asked, as when JAX starts.
    """
    kinds = (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)
    found = next((kind for kind in kinds if kind.is_env_present()), None)
    if found is None:
        return None
    if found.name not in ("slurm", "ompi"):  # others ask servers, or wait for other machines
        return Cluster(found.name)
    return Cluster(found.name, found.get_process_count(), found.get_process_id())
