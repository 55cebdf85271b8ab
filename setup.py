"""What pyproject.toml cannot state about building: links to folders, and equal bytes for equal files."""

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

# Folders at the top, linked into moezoo/. In a source distribution it is reversed.
LINKED = ("conf", "kernels", "models")
TIME = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

for name in LINKED:
    if not Path("moezoo", name).is_dir():
        sys.exit(
            f"error: moezoo/{name} is not a folder, expected a link to ../{name}: this checkout has no symbolic links; "
            "clone with git -c core.symlinks=true, or build from a source distribution, which has none inside moezoo/"
        )
# Setuptools would add to the source distribution what an earlier build listed here.
Path("moezoo.egg-info", "SOURCES.txt").unlink(missing_ok=True)


class Packages(build_py):
    """The modules, without those that an earlier build left and the tree no longer has."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    """The wheel, with the same modes of files whatever the umask is; setuptools itself uses SOURCE_DATE_EPOCH."""

    def write_wheelfile(self, *args, **kwargs) -> None:
        super().write_wheelfile(*args, **kwargs)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)


class Source(sdist):
    """The source distribution: its members have no user, the time of SOURCE_DATE_EPOCH, and one of two modes."""

    def run(self) -> None:
        self._tracked = _tracked()
        super().run()

    def make_release_tree(self, base_dir, files) -> None:
        if self._tracked:  # of a checkout no file that git does not know: notes, runs, settings
            files = [name for name in files if name.startswith("moezoo.egg-info") or _in_git(name) in self._tracked]
        super().make_release_tree(base_dir, files)

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None) -> str:
        del format, root_dir, owner, group
        for name in LINKED:  # for tests, and for people; a build needs only what is in moezoo/
            Path(base_dir, name).symlink_to(Path("moezoo", name))
        target = Path(f"{base_name}.tar.gz")
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            target.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=TIME) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            tar.add(base_dir, filter=_plain)
        return str(target)


def _tracked() -> set[str]:
    """Return the files that git tracks here; none without git or a checkout."""
    if not Path(".git").exists() or shutil.which("git") is None:
        return set()
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=False)
    return set(listed.stdout.split("\0")) - {""}


def _in_git(name: str) -> str:
    """Return the name that git has for a file: those behind the links have their own."""
    top, _, rest = name.partition("/")
    return rest if top == "moezoo" and rest.partition("/")[0] in LINKED else name


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.mode = TIME, 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


setup(cmdclass={"build_py": Packages, "bdist_wheel": Wheel, "sdist": Source})
