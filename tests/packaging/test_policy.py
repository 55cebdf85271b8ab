"""Versions and tools that are stated in several files agree."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
PYTEST = tomllib.loads(PYPROJECT)["tool"]["pytest"]["ini_options"]
RUN = (ROOT / ".ci" / "run").read_text()
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_hooks_before_a_commit_are_the_linters_of_ci():
    """The same commands, in the versions of the extra `lint`; another extra with one of them has that version too."""
    lines = re.findall(r"^ *\.ci/venv-peers/bin/((?:ruff|pyright|shellcheck|hadolint)\b.*)$", RUN, re.MULTILINE)
    assert [hook["entry"].replace(".venv", ".ci/venv-peers") for hook in HOOKS] == lines
    pinned = PROJECT["optional-dependencies"]["lint"]
    assert {tool for hook in HOOKS for tool in hook["additional_dependencies"]} == set(pinned)
    for hook in HOOKS:
        (tool,) = hook["additional_dependencies"]
        assert re.match(rf"{hook['entry'].split()[0]}(-py|-bin)?==", tool)
    for extra in PROJECT["optional-dependencies"].values():
        assert {tool for tool in extra if tool.startswith(("ruff", "pyright"))} <= set(pinned)


def test_a_newer_python_runs_a_file_of_each_package():
    """But `conf`, which has no code; and what is marked for it, from all folders but two."""
    files = re.findall(r"\S+", RUN.partition("files=(")[2].partition(")\n")[0])
    folders = {path.parent.name for path in ROOT.glob("moezoo/*/__init__.py")} - {"conf"}
    assert folders <= {Path(file).parent.name for file in files}
    assert [file for file in files if "{" not in file and not (ROOT / file).is_file()] == []
    assert "(newer or interpreted)" in RUN
    left_out = [path for folder in ("hub", "vendors") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    assert [path.name for path in left_out if re.search(r"mark\.(newer|interpreted)", path.read_text())] == []
    weekly = [step.get("run", "") for job in WORKFLOWS["nightly.yml"]["jobs"].values() for step in job["steps"]]
    assert "pytest -m weekly tests/hub" in weekly
    assert [path for path in (ROOT / "tests" / "vendors").glob("test_*.py") if "mark.weekly" in path.read_text()] == []


def test_what_the_suite_leaves_out_runs_in_ci_or_each_week():
    """Or by hand: all combinations, the commands of the pages, and planted errors."""
    left_out = {*re.findall(r"not (\w+)", PYTEST["addopts"])}
    steps = [step.get("run", "") for job in WORKFLOWS["nightly.yml"]["jobs"].values() for step in job["steps"]]
    chosen = re.findall(r"pytest.* -m (\w+|\"[^\"]+\")", "\n".join([RUN, *steps]))
    marks = {*re.findall(r"\w+", re.sub(r"not \w+", "", " ".join(chosen)))}
    assert left_out - marks == {"docs", "full", "mutations"}


def test_folders_are_read_with_one_older_transformers():
    pins = [
        re.findall(r"transformers==([\d.]+\d)", (ROOT / path).read_text())
        for path in (".ci/run", "CONTRIBUTING.md", "tests/hub/test_readers.py")
    ]
    assert all(pins)
    assert len(set().union(*pins)) == 1


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], str(citation["version"])) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]


def test_every_upper_bound_has_its_reason():
    """On its line; an extra that repeats the bound of a dependency needs none."""
    section = PYPROJECT.partition("\ndependencies = [\n")[2].partition("\n]")[0]
    bounded = [line for line in section.splitlines() if "<" in line]
    assert bounded
    assert [line for line in bounded if not re.search(r",  # \w.{20}", line)] == []
    bounds = {re.split(r"[\[><=]", each)[0]: each.partition(">")[2] for each in PROJECT["dependencies"]}
    for extra in PROJECT["optional-dependencies"].values():
        for each in (each for each in extra if "<" in each.partition(";")[0]):
            assert bounds[re.split(r"[\[><=]", each)[0]] == each.partition(">")[2]


def test_pythons_agree():
    """The workflow tests the classifiers and one more; pages and pyright begin with the oldest."""
    listed = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    tested = WORKFLOWS["tests.yml"]["jobs"]["suite"]["strategy"]["matrix"]["python"]
    assert tested[:-1] == listed
    assert PROJECT["requires-python"] == f">={listed[0]}"
    assert tomllib.loads(PYPROJECT)["tool"]["pyright"]["pythonVersion"] == listed[0]
    page = (ROOT / "docs" / "versions.md").read_text()
    assert re.findall(r"^\| (3\.\d+) \|", page, re.MULTILINE) == tested


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_may_only_read(name):
    """Except for the job that publishes, which may ask for an identity, and has no other right."""
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    asked = {key: job["permissions"] for key, job in workflow["jobs"].items() if "permissions" in job}
    assert asked == ({"publish": {"id-token": "write"}} if name == "release.yml" else {})
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
