"""Every command on every page exists: its program, its files, its options, and the configuration that it composes."""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from endurance import COMMAND as ENDURANCE
from pages import PAGES, ROOT, Command, Page, commands, read
from workspace import add_configurations, make_files

from benchmarks.parts import MODELS, PARTS, PEER_STEPS
from moezoo.cli.command import Command as MoezooCommand
from moezoo.cli.command import ConfiguredCommand
from moezoo.config import overrides
from moezoo.config.compose import compose
from moezoo.config.options import split, take, take_switches
from moezoo.models.family import MADE
from moezoo.tools.commands import COMMANDS
from moezoo.tools.plan import command as plan
from moezoo.tools.plan.candidates import check_mesh, fill, listed
from moezoo.tools.plan.hardware import parse_slice
from moezoo.tools.sweep import command as sweep
from moezoo.tools.sweep.expand import expand
from moezoo.typed import types_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MARKERS = {text.partition(":")[0] for text in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
RUNS_OTHERS = ("srun",)
OTHERS = {"gcloud", "git", "jupyter", "mkdocs", "pre-commit", "pyright", "ruff", "tensorboard", "xprof"}
OTHERS |= {"docker", "gcp-storage-emulator", "hadolint", "hf", "kubectl", "sbatch", "shellcheck"}
OTHERS |= {"bash", "cat", "cp", "find", "grep", "head", "ls", "mkdir", "rm", "sort", "tail", "wc", "xargs"}


def check(command: Command) -> None:
    """Raise an error unless there is such a command."""
    program, *words = (word for word in command.words if "..." not in word)
    while program in RUNS_OTHERS:
        program, *words = words
    if program in ("python", "python3"):
        program, *words = called(words)
    if program == "moezoo":
        (check_options if command.whole else check_words)(find_command(words[:1]), words[1:])
    elif program == "bench":
        assert is_placeholder(words[0]) or words[0] in PARTS, f"{words[0]}: no such part"
        if command.whole:
            check_bench(words)
    elif program == "pytest":
        check_pytest(words)
    elif program == "pip":
        check_pip(words)
    else:
        assert program in OTHERS | {"python"}, f"{program}: not known; fence what is no command with its language"


def called(words: Sequence[str]) -> list[str]:
    """Return the program that Python runs, with its arguments."""
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return ["python"]
    if words[0] == "-m":
        assert words[1] in ("build", "venv", "pytest", "moezoo"), f"-m {words[1]}: not known"
        return ["python"] if words[1] in ("build", "venv") else list(words[1:])
    words = [word for word in words if word != "-P"]
    path = Path(words[0])
    assert is_placeholder(path.stem) or (ROOT / path).is_file(), f"{path}: no such file"
    if path.parent.name != "scripts" or is_placeholder(path.stem):
        return ["moezoo", "endurance", *words[1:]] if path.stem == "endurance" else ["python"]
    return ["bench", *words[1:]] if path.stem == "bench" else ["moezoo", path.stem, *words[1:]]


def is_placeholder(word: str) -> bool:
    """Return whether a word of a sentence stands for others, such as NAME."""
    return re.search(r"\b[A-Z]{2,}\b", word) is not None


def find_command(name: Sequence[str]) -> MoezooCommand | None:
    """Return the command of a name, if one is named."""
    if not name or name[0].startswith("-") or is_placeholder(name[0]):
        assert name in ([], ["--version"]) or is_placeholder(name[0]), f"{name[0]}: no such option"
        return None
    return ENDURANCE if name[0] == "endurance" else COMMANDS[name[0]]


def check_words(command: MoezooCommand | None, words: Sequence[str]) -> None:
    """Check the keys and entries that a sentence names, each alone."""
    if not isinstance(command, ConfiguredCommand):
        return
    own = types_of(command.keys) if command.keys else {}
    for word in words:
        if "=" in word and word[0] not in "-[" and word.partition("=")[0] not in own and not is_placeholder(word):
            overrides.read([word], own)


def check_options(command: MoezooCommand | None, words: Sequence[str]) -> None:
    """Check the options of a command, and compose what it configures."""
    if command is None:
        return
    words = [word for word in words if word != "--help"]
    command.check(words, "moezoo")
    if not isinstance(command, ConfiguredCommand):
        return
    if command.name == "sweep":
        for element in expand(split(sweep.Keys, words)[1]).elements:
            compose(*element.words)
    elif command.name == "plan":
        check_plan(words)
    else:
        switches, words = take_switches(command.switches, words) if command.switches else (None, words)
        words = words if command.configure or not command.keys else split(command.keys, words)[1]
        words = overrides.replace(words, (getattr(switches, "against", None) or "").split())
        (command.configure or compose)(*words)


def check_plan(words: Sequence[str]) -> None:
    """Compose every layout that a plan compares."""
    keys, words = take(plan.Keys, take_switches(plan.Switches, words).rest)
    lists = [(value or "").replace("all", "").split(",") for value in (keys.mesh, keys.rules, keys.dispatch)]
    where = parse_slice(keys.topology)
    if not any(name for names in lists for name in names) and not any(word.startswith("mesh.") for word in words):
        compose(*words)  # a search
        return
    for candidate in listed(words, *([name for name in names if name] for names in lists)):
        check_mesh(fill(candidate, where), where)


def check_bench(words: Sequence[str]) -> None:
    """Check the keys of a part of the benchmarks, and compose its steps and layouts."""
    part, *words = words
    PARTS[part].check(words, "bench")
    given = {
        name: [word.partition("=")[2] for word in words if word.startswith(f"{name}=")] for name in ("step", "model")
    }
    for step in given["step"]:
        first, *rest = step.split()
        compose(*PEER_STEPS.get(first, first).split(), *rest)
    for layout in [word.partition("=")[2] for word in words if word.startswith("layout=")]:
        for model in given["model"] or ["mixtral"]:
            first, *rest = model.split()
            compose(*f"model={MODELS.get(first, first)}".split(), *rest, *layout.split())


def check_pytest(words: Sequence[str]) -> None:
    """Check that paths exist, that markers are registered, and that the words of -k occur in the tests."""
    values = {word: words[number + 1] for number, word in enumerate(words) if word in ("-m", "-k", "-n")}
    paths = [word for word in words if not word.startswith("-") and word not in values.values()]
    missing = [path for path in paths if not any(ROOT.glob(path))]
    assert not missing, f"{missing[0]}: no such tests"
    unknown = {*re.findall(r"\w+", values.get("-m", ""))} - {"and", "or", "not", *MARKERS}
    assert not unknown, f"-m {unknown}: no such markers"
    wanted = {*re.findall(r"\w+", values.get("-k", ""))} - {"and", "or", "not"}
    folders = [found for path in paths or ["tests"] for found in ROOT.glob(path)]
    files = [file for folder in folders for file in (folder.rglob("*") if folder.is_dir() else [folder])]
    text = "\n".join(file.read_text() for file in files if wanted and file.suffix in (".py", ".toml"))
    unknown = [word for word in wanted if word not in text and not is_placeholder(word)]
    assert not unknown, f"-k {unknown}: no such tests"


def check_pip(words: Sequence[str]) -> None:
    """Check that extras exist."""
    assert words[0] in ("install", "wheel"), words
    for names in re.findall(r"(?:^|\s)(?:\.|moezoo)\[([\w,]+)\]", " ".join(words)):
        unknown = {*names.split(",")} - {*EXTRAS}
        assert not unknown, f"{unknown}: no such extras"


def find_wrong(page: Page) -> list[str]:
    """Return the commands of a page that do not exist, with the reason."""
    wrong = []
    for command in commands(page):
        try:
            check(command)
        except Exception as error:
            wrong.append(f"{command.where}: {' '.join(command.words)}\n    {type(error).__name__}: {error}")
    return wrong


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with what the pages call FOLDER and the like."""
    folder = tmp_path_factory.mktemp("docs") / "files"
    make_files(folder)
    add_configurations(folder)
    return folder


@pytest.fixture
def forgotten(files):
    """Forget what a page imports of the examples."""
    modules, made = {*sys.modules}, dict(MADE)
    yield
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(files)):
            del sys.modules[name]
    MADE.clear()
    MADE.update(made)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_exists(name, files, forgotten, monkeypatch):
    page = read(name)
    monkeypatch.chdir(files)
    wrong = find_wrong(page)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("    moezoo train mesh=ep9", "no such mesh"),
        ("    moezoo train mesh=ep8 \\\n      model.layrs=2", "no key 'layrs'"),
        ("    for m in ep8 ep4; do moezoo train mesh=$m; done", "no such mesh"),
        ("    pytest tests/moe/test_{router,nothing}.py", "test_nothing.py"),
        ("    if moezoo --version; then moezoo train; else moezoo trian; fi", "trian"),
        ("    moezoo generate run_dir=runs/NAME prompt=a temprature=1", "temprature"),
        ("    moezoo convert runs/NAME NEW dtyp=bfloat16", "dtyp"),
        ("    moezoo plan model=mixtral topology=h200:8 mesh=fsdp4", "4 devices"),
        ("    moezoo sweep seed=0,1 mesh.exprt=8", "exprt"),
        ("    moezoo sharding --against rules=fsdp_pe", "fsdp_pe"),
        ("    python scripts/nothing.py", "no such file"),
        ('    python scripts/bench.py train_step step="mesh=ep9"', "no such mesh"),
        ("    python scripts/bench.py layots", "layots"),
        ("    python -c 'print('", "SyntaxError"),
        ("    pytest -m absentt tests/tools", "absentt"),
        ("    pytest tests/nothing", "no such tests"),
        ("    pytest tests/moe -k nothing_such", "nothing_such"),
        ("    pip install -e '.[nothing]'", "nothing"),
        ("    mezoo train", "mezoo"),
        ("    gcloud ssh --command='moezoo train mesh=ep9'", "no such mesh"),
        ("```sh\nsrun moezoo train mesh=ep9\n```", "no such mesh"),
        ("<!-- run with: NAME=ep9 -->\n\n    moezoo train mesh=NAME", "no such mesh"),
        ("Write `moezoo train stps=3`.", "stps"),
        ("| `moezoo trian` \\| `mesh=ep8` |", "trian"),
    ],
)
def test_a_command_that_does_not_exist_is_found(page, reason, files, monkeypatch, tmp_path):
    monkeypatch.chdir(files)
    (tmp_path / "page.md").write_text(f"Text.\n\n{page}\n\nText.\n")
    (wrong,) = find_wrong(read(str(tmp_path / "page.md")))
    assert reason in wrong
