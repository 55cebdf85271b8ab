"""`save_pretrained`: the same bytes from every mesh and from two processes; what is not whole yet never loads."""

import contextlib
import dataclasses
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS
from two_saves import SAVED, adapted, contained, lay_out, model

import moezoo
import moezoo.interrupts as interrupts
from moezoo.hub import carry, saving, unfinished, writing
from moezoo.hub.adapters import save_adapter
from moezoo.models.blueprint import Blueprint

TWO_SAVES = Path(__file__).with_name("two_saves.py")
INDEX = "model.safetensors.index.json"
SECONDS = 300  # far above what the two processes take

pytestmark = pytest.mark.filterwarnings("ignore:.*transformers has no key for")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of each model, saved from arrays of NumPy, in which nothing is to be put together."""
    folder = tmp_path_factory.mktemp("whole")
    for name, (_, _, most) in SAVED.items():
        moezoo.save_pretrained(model(name), folder / name, max_shard_size=most)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", SAVED)
def test_files_are_those_of_safetensors(whole, tmp_path, name):
    """Header, order, alignment, padding; the index has every tensor of every file."""
    files = sorted((whole / name).glob("*.safetensors"))
    for file in files:
        save_file(load_file(file), tmp_path / file.name, metadata={"format": "pt"})
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()
    assert (len(files) > 1) == (whole / name / INDEX).exists() == (SAVED[name][2] is not None)
    if len(files) > 1:
        index = json.loads((whole / name / INDEX).read_text())
        assert index["weight_map"] == {tensor: file.name for file in files for tensor in load_file(file)}
        sizes = [[x.nbytes for x in load_file(file).values()] for file in files]
        assert all(sum(of_file) <= SAVED[name][2] or len(of_file) == 1 for of_file in sizes)


class Layout(NamedTuple):
    """How a model lies on eight devices."""

    name: str
    mesh: moezoo.MeshShape
    rules: str = "fsdp_ep"


LAYOUTS = (
    Layout("mixtral", moezoo.MeshShape(fsdp=2, expert=4)),
    Layout("deepseek", moezoo.MeshShape(expert=8)),
    Layout("gpt_oss", moezoo.MeshShape(fsdp=8), "pure_fsdp"),
    Layout("tied", moezoo.MeshShape(fsdp=2, expert=2, tensor=2), "tensor"),
    Layout("deepseek", moezoo.MeshShape(data=2, fsdp=2, expert=2, axis_types="explicit")),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_eight_devices(whole, tmp_path, layout):
    placed = lay_out(model(layout.name), layout.mesh, layout.rules)
    moezoo.save_pretrained(placed, tmp_path / "new", max_shard_size=SAVED[layout.name][2])
    assert read_files(tmp_path / "new") == read_files(whole / layout.name)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes with two devices each have saved, and what they have printed."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    run = [sys.executable, str(TWO_SAVES), port]
    pair = [subprocess.Popen([*run, str(i), str(folder)], stdout=subprocess.PIPE, text=True) for i in (0, 1)]
    printed = [process.communicate(timeout=SECONDS)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    # The library that connects CPUs prints too.
    return folder, [json.loads(next(line for line in text.splitlines() if line.startswith("{"))) for text in printed]


def test_two_processes(two, whole):
    folder, printed = two
    for name in SAVED:
        assert read_files(folder / name) == read_files(whole / name)
    assert read_files(folder / "like") == read_files(whole / "deepseek")
    assert not any(found["changed"] for found in printed)


def test_containers_of_two_processes_stand_for_arrays(two, tmp_path):
    moezoo.save_pretrained(contained(model("tied")), tmp_path / "one")
    assert read_files(two[0] / "contained") == read_files(tmp_path / "one")


def test_an_adapter_of_two_processes(two, tmp_path):
    save_adapter(adapted(model("mixtral")), tmp_path / "adapter")
    assert read_files(two[0] / "adapter") == read_files(tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore:.*transformers 5.23 and 5.24 do not read FP8 weights that")
def test_weights_of_few_bits_of_two_processes(two, tmp_path):
    """Rounded by both, kept by both, and written again."""
    moezoo.save_pretrained(model("deepseek"), tmp_path / "one", max_shard_size=3000, format="fp8")
    assert read_files(two[0] / "rounded") == read_files(tmp_path / "one") == read_files(two[0] / "kept")


def test_processes_fail_together(two):
    folder, printed = two
    assert {path.name for path in folder.iterdir()} == {*SAVED, "like", "contained", "adapter", "rounded", "kept"}
    full = f"{folder}/full: cannot be written (No space left on device); name another folder"
    assert [found["full"] for found in printed] == [f"process 1: {full}", full]
    for found in printed:
        assert found["other"].startswith("save_pretrained: the processes differ: embedding.weight is float32[40, 16]")
        assert "bfloat16[40, 16]" in found["other"]


def test_two_processes_load_what_each_holds(two):
    """Numbers are compared in the processes. Their devices split every matrix, and only vectors are on all of them."""
    folder, printed = two
    for name in SAVED:
        size = sum(x.nbytes for x in jax.tree.leaves(model(name)))
        for found in printed:
            read, held = found["loaded"][name]
            assert held <= read <= size  # tiny rows: what lies between is read too
        assert sum(found["loaded"][name][1] for found in printed) < 1.2 * size
    for key, begin, end in (
        ("two folders", f"the processes have different folders {folder}", "copy one to all of them"),
        ("failed read", f"{folder}/mixtral/model.safetensors: ", "download the file again"),
    ):
        for found in printed:
            assert found[key].removeprefix("process 1: ").startswith(begin)
            assert found[key].endswith(end)


def test_one_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIGS["mixtral"], embed=64, expert_mlp=128)
    numbers = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), Blueprint(config).shapes)
    placed, peaks, write = lay_out(numbers, moezoo.MeshShape(expert=8)), [], carry.write_folder

    def measured(*arguments: Any) -> None:
        tracemalloc.start()
        write(*arguments)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    monkeypatch.setattr(carry, "write_folder", measured)
    for name in ("first", "second"):  # what is computed once stays in memory
        moezoo.save_pretrained(placed, tmp_path / name)
    largest = max(x.nbytes for x in load_file(tmp_path / "second" / "model.safetensors").values())
    total = sum(x.nbytes for x in jax.tree.leaves(numbers))
    # A tensor, its transpose, and the objects of Python that describe the tensors.
    assert peaks[1] < 2 * largest + 80_000 < total / 8


class Killed(BaseException):
    """Stands for the end of the process."""


@contextlib.contextmanager
def killed(patch: pytest.MonkeyPatch, where: Any, name: str, at: int) -> Any:
    """Stop at the call number `at` of a function, without any clean-up, as a process that is killed."""
    really, calls = getattr(where, name), []

    def call(*arguments: Any) -> Any:
        if len(calls) == at:
            raise Killed
        calls.append(1)
        return really(*arguments)

    with patch.context() as inner:
        inner.setattr(where, name, call)
        inner.setattr(interrupts, "undoing", lambda undo: contextlib.nullcontext())
        with pytest.raises(Killed):
            yield


@pytest.mark.parametrize(
    ("target", "like"), [("new", None), ("new", "deepseek"), ("empty", None), ("with a file", "deepseek")]
)
@pytest.mark.parametrize(
    ("where", "name", "at"),
    [
        (writing._Output, "begin", 2),
        (writing._Output, "write", 0),
        (writing._Output, "write", 40),
        (writing, "_write_others", 0),
        (unfinished, "_finish", 0),
        (os, "rename", 0),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_a_killed_save_leaves_nothing_that_loads(whole, tmp_path, monkeypatch, like, target, where, name, at):
    """And the next one replaces what it left."""
    arguments: dict[str, Any] = {"max_shard_size": 3000} if like is None else {"like": whole / like}
    folder = tmp_path / "model"
    if target != "new":
        folder.mkdir()
    if target == "with a file":
        (folder / "notes.txt").write_text("mine")
    with killed(monkeypatch, where, name, at):
        moezoo.save_pretrained(model("deepseek"), folder, **arguments)
    with refused(f"{folder}: {'there is no such folder' if target == 'new' else 'no config.json'}"):
        moezoo.from_pretrained(folder)
    moezoo.save_pretrained(model("deepseek"), folder, **arguments)
    found = read_files(folder)
    assert found.pop("notes.txt", b"mine") == b"mine"
    assert found == read_files(whole / "deepseek")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("at", [1, 10, -1])
def test_a_save_that_is_killed_while_it_moves_files(whole, tmp_path, monkeypatch, at):
    """Into a folder that exists. config.json is the last one."""
    (tmp_path / "model").mkdir()
    with killed(monkeypatch, os, "rename", at % len(read_files(whole / "deepseek"))):
        moezoo.save_pretrained(model("deepseek"), tmp_path / "model", max_shard_size=3000)
    with refused(f"{tmp_path}/model: no config.json"):
        moezoo.from_pretrained(tmp_path / "model")
    with refused(f"{tmp_path}/model"):  # which file it is differs
        moezoo.save_pretrained(model("deepseek"), tmp_path / "model", max_shard_size=3000)


@pytest.mark.parametrize("target", ["new/model", "old"])
def test_a_full_disk(tmp_path, monkeypatch, target):
    """Where its size is known before, nothing is written; while writing, nothing is left."""
    (tmp_path / "old").mkdir()
    numbers, free = model("tied"), 80_000
    with monkeypatch.context() as patch:
        patch.setattr(unfinished.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
        patch.setattr(writing._Output, "begin", None)
        with refused(f"{tmp_path}/{target}: cannot be written: it needs 90,", "bytes", "80,000 bytes free", "disk"):
            moezoo.save_pretrained(numbers, tmp_path / target)
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]

    def write(self: Any, place: Any, value: Any) -> None:
        if place.start > 3000:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing._Output, "write", write)
        with refused(f"{tmp_path}/{target}: cannot be written (No space left on device)"):
            moezoo.save_pretrained(numbers, tmp_path / target)
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]


@pytest.mark.parametrize("target", ["new", "old"])
def test_a_file_that_the_system_refuses_to_extend(tmp_path, target):
    """A failure of the system itself, in the middle of a file."""
    (tmp_path / "old").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with refused(f"{tmp_path}/{target}: cannot be written (File too large)"):
            moezoo.save_pretrained(model("tied"), tmp_path / target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]


def test_a_file_that_is_not_whole_is_no_part_of_a_model(tmp_path, monkeypatch):
    """As where the processes do not share the disk."""
    monkeypatch.setattr(writing._Output, "write", lambda self, place, value: None)
    with refused(f"{tmp_path}/model: model.safetensors has ", "not whole"):
        moezoo.save_pretrained(model("mixtral"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_two_saves_of_one_folder(tmp_path):
    """The second is refused and leaves the files of the first alone; a link in place of the folder is not followed."""
    work = tmp_path / ".model.unfinished"
    work.mkdir()
    (work / "x").touch()
    handle = os.open(work, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with refused(f"{tmp_path}/model: another process is writing it, in {work}"):
            moezoo.save_pretrained(model("mixtral"), tmp_path / "model")
    finally:
        os.close(handle)
    assert list(work.iterdir()) == [work / "x"]
    (tmp_path / ".other.unfinished").symlink_to(work)
    with refused(f"{tmp_path}/other: cannot be written"):
        moezoo.save_pretrained(model("mixtral"), tmp_path / "other")
    assert list(work.iterdir()) == [work / "x"]


@pytest.mark.parametrize("target", ["absent", "empty"])
def test_files_that_appear_in_the_folder_meanwhile_stay_as_they_are(tmp_path, monkeypatch, target):
    """Also in a folder that was made meanwhile. Another save is refused at once."""
    folder, write = tmp_path / "model", writing._write_others
    if target == "empty":
        folder.mkdir()

    def meanwhile(*arguments: Any) -> None:
        write(*arguments)
        folder.mkdir(exist_ok=True)
        with refused(f"{folder}: another process is writing it"):
            moezoo.save_pretrained(model("tied"), folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(writing, "_write_others", meanwhile)
    with refused(f"{folder}: cannot be written ("):
        moezoo.save_pretrained(model("mixtral"), folder)
    assert read_files(folder) == {"config.json": b"{}"}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_signal_in_a_notebook_leaves_what_the_next_save_removes(tmp_path, made):
    """Outside of commands no clean-up runs. The folder may be made before the save or after the signal."""
    folder = tmp_path / "model"
    folder.mkdir()
    if made == "after":
        folder.rmdir()
    program = f"""if True:
        import os, signal
        from two_saves import model, moezoo, writing
        writing._write_others = lambda *arguments: os.kill(os.getpid(), signal.SIGTERM)
        moezoo.save_pretrained(model("mixtral"), {str(folder)!r})
    """
    ended = subprocess.run([sys.executable, "-c", program], cwd=TWO_SAVES.parent, timeout=SECONDS, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1
    folder.mkdir(exist_ok=True)
    moezoo.save_pretrained(model("mixtral"), folder)
    assert list(tmp_path.iterdir()) == [folder]
    assert read_files(folder).keys() == {"config.json", "model.safetensors"}


def test_a_folder_that_was_renamed_is_not_taken_for_the_temporary_one(tmp_path, monkeypatch):
    """Between the moments in which a second save opens and locks the temporary folder, the first one has ended."""
    lock = fcntl.flock

    def late(handle: int, how: int) -> None:
        (tmp_path / ".model.unfinished").rename(tmp_path / "model")
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with refused(f"{tmp_path}/model: another process is writing it"):
        moezoo.save_pretrained(model("mixtral"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), (7, 7), ("7", 7), (5 * 10**9, 5 * 10**9), (None, 5 * 10**9)],
)
def test_sizes(size, bytes_):
    assert saving._shard_bytes(size) == bytes_


@pytest.mark.parametrize(
    "size", ["5G", "", "0GB", "-1", "GB", "inf", "9" * 400 + "GB", "9" * 5000, "1.5", 0, -1, 2.5, True]
)
def test_impossible_sizes_are_refused(tmp_path, size):
    with refused("max_shard_size="):
        saving._shard_bytes(size)
    assert not list(tmp_path.iterdir())


def test_the_files_of_another_folder_have_their_size(whole, tmp_path):
    with refused("max_shard_size=5GB", f"{whole}/mixtral"):
        moezoo.save_pretrained(model("mixtral"), tmp_path / "new", like=whole / "mixtral", max_shard_size="5GB")


def test_config_json_has_the_dtype_of_most_numbers(whole, tmp_path):
    """As loading decides; alone, and in a copy of a folder of another dtype."""
    mixed = jax.tree.map(lambda x: x.astype(np.float32), model("mixtral"))
    mixed = eqx.tree_at(lambda m: m.embedding.weight, mixed, replace_fn=lambda x: x.astype(jax.numpy.bfloat16))
    moezoo.save_pretrained(mixed, tmp_path / "new")
    moezoo.save_pretrained(mixed, tmp_path / "copy", like=whole / "mixtral")
    for name in ("new", "copy"):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"
        assert moezoo.from_pretrained(tmp_path / name).embedding.weight.dtype == np.float32


def _narrow(x: Any) -> Any:
    return x[:, :-4]


def _deleted(x: Any) -> Any:
    array = jax.numpy.array(x)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_narrow, "has shape [40, 12], expected shape [40, 16] by model.config; save a model whose config"),
        (_deleted, "is deleted, as by a program that donates it; save before that"),
        (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), "is a ShapeDtypeStruct, expected an array"),
        (lambda x: None, "has no array, expected shape [40, 16] by model.config"),
        (lambda x: 0.5, "is a float, expected an array"),
        (lambda x: x.astype(">f4"), "has the byte order >f4; convert it to this machine's"),
    ],
)
@pytest.mark.parametrize("like", [None, "tied"])
def test_arrays_that_cannot_be_written(whole, tmp_path, change, message, like):
    changed = eqx.tree_at(lambda m: m.embedding.weight, model("tied"), replace_fn=change)
    with refused(f"save_pretrained: embedding.weight {message}"):
        moezoo.save_pretrained(changed, tmp_path / "new", like=like and whole / like)
    assert list(tmp_path.iterdir()) == []


def test_a_model_under_jit(tmp_path):
    save = jax.jit(lambda numbers: moezoo.save_pretrained(numbers, tmp_path / "new"))
    with refused("save_pretrained: embedding.weight is traced; call it outside of jax.jit"):
        save(model("tied"))
    assert list(tmp_path.iterdir()) == []


def test_dtypes_that_no_folder_has(tmp_path):
    with refused("model.embed_tokens.weight is int32", "bfloat16"):
        moezoo.save_pretrained(jax.tree.map(lambda x: x.astype(np.int32), model("mixtral")), tmp_path / "new")
