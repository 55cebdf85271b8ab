"""The image's and Kubernetes' files: what they name exists, and what has to fit together does."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml

import moezoo
from moezoo.parallel.distributed import Manual

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
GPUS, TPUS = "nvidia.com/gpu", "google.com/tpu"


def read(name):
    """The parts of a manifest: all of it, its job, the pods of that, and their container."""
    whole = yaml.safe_load((LAUNCH / name).read_text())
    (jobs,) = whole["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return whole, job, job["template"]["spec"], container


@pytest.mark.parametrize(("name", "chip"), [("jobset.yaml", GPUS), ("jobset-tpu.yaml", TPUS)])
def test_a_manifest_starts_a_process_per_host_and_starts_them_again(name, chip):
    """Its settings are valid, their mesh has all chips, and any end but a mistake leads to another start."""
    whole, job, pod, container = read(name)
    assert (whole["apiVersion"], whole["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] > 1
    command, *words = container["args"]
    assert command == "train"
    known = {variable["name"] for variable in container["env"]} if "env" in container else set()
    assert set(re.findall(r"\$\((\w+)\)", " ".join(words))) == known
    for process in range(job["parallelism"]):
        cfg = moezoo.compose(*(re.sub(r"\$\((\w+)\)", str(process), word) for word in words))
        assert cfg.mesh.devices == job["parallelism"] * container["resources"]["limits"][chip]
        assert cfg.resume == "auto"
        if isinstance(cfg.distributed, Manual):
            assert (cfg.distributed.processes, cfg.distributed.process) == (job["parallelism"], process)
            assert str(cfg.distributed.coordinator).endswith(f":{container['ports'][0]['containerPort']}")
        assert cfg.run_dir == "/runs/NAME"
    (volume,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == "/runs")
    assert volume["name"] in {each["name"] for each in pod["volumes"] if "persistentVolumeClaim" in each}
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    # Kubernetes starts no single process again, which the others would not meet; JobSet starts all.
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)
    assert whole["spec"]["failurePolicy"]["maxRestarts"] > 0
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [1, 2]}
    assert pod["terminationGracePeriodSeconds"] >= 120


def test_gpus_meet_at_the_coordinator_of_the_jobset():
    whole, _, _, container = read("jobset.yaml")
    (jobs,) = whole["spec"]["replicatedJobs"]
    assert whole["spec"]["coordinator"] == {"replicatedJob": jobs["name"], "jobIndex": 0, "podIndex": 0}
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert fields["COORDINATOR"] == "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
    assert fields["JOB_COMPLETION_INDEX"].endswith("job-completion-index']")


def test_tpus_are_those_of_one_slice():
    _, job, pod, container = read("jobset-tpu.yaml")
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = job["parallelism"] * container["resources"]["limits"][TPUS]
    assert math.prod(map(int, topology.split("x"))) == chips


def test_the_image_is_built_from_what_the_checkout_has():
    """Each path that is copied exists and is sent to the build; what is installed needs no other."""
    text = (LAUNCH / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.M) for word in line.split()[:-1]]
    sent = {line[1:] for line in (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert set(copied) == sent
    assert all((ROOT / path).exists() for path in copied)
    linked = {path.resolve().name for path in (ROOT / "moezoo").iterdir() if path.is_symlink()}
    assert {"moezoo", *linked} <= set(copied)
    assert re.findall(r"^USER (\d+)$", text, re.M)[-1] != "0"
    (command,) = re.findall(r"^CMD (.*)$", text, re.M)
    train, *words = json.loads(command)
    assert train == "train"
    assert 0 < (moezoo.compose(*words).steps or 0) <= 50
