"""What vendors' trackers have written, read without moezoo: step -> all values of a figure that are there."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import collections
import json
import struct
from pathlib import Path
from typing import Any

Figures = dict[int, list[float]]


def read_tensorboard(folder: Path, name: str) -> Figures:
    """Read every event of every file with TensorBoard's own reader of records, which hides nothing."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: Figures = collections.defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == name:
                    found[event.step].append(value.simple_value)
    return dict(found)


def read_wandb(folder: Path, name: str) -> Figures:
    """Read the rows of all offline runs in a folder."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes the last rows when it ends
    found: Figures = collections.defaultdict(list)
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        for content in _log_records(path.read_bytes()):
            record: Any = Record()
            record.ParseFromString(content)
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if name in items:
                found[record.history.step.num].append(items[name])
    return dict(found)


def _log_records(content: bytes) -> list[bytes]:
    """Split a file of W&B: LevelDB's log format after a header of seven bytes, in blocks of 32 KiB."""
    assert content[:4] == b":W&B"
    at, block, whole, found = 7, 2**15, b"", []
    while at + 7 <= len(content):
        if block - at % block < 7:  # the rest of a block is too short for a record
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(whole)
            whole = b""
    return found


def read_mlflow(uri: str, name: str) -> Figures:
    """Read the values of all runs that are not deleted."""
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(uri), collections.defaultdict(list)
    experiments = [each.experiment_id for each in client.search_experiments()]
    for run in client.search_runs(experiments):
        for metric in client.get_metric_history(run.info.run_id, name):
            found[metric.step].append(metric.value)
    return dict(found)
