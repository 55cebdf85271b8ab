"""Hooks of MkDocs: pages from files outside `docs`, links that work in the repository and on the site, no network."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Files outside `docs`, and where they are on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/README.md": "tests.md",
}
OUTSIDE |= {name: name for name in (f"notebooks/{path.name}" for path in sorted(ROOT.glob("notebooks/*.ipynb")))}
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
_LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=["']?((?:https?:)?//[^\s"'>]*)""")
_log = get_plugin_logger(__name__)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of `OUTSIDE`, and a page for each example."""
    for path, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for example in sorted(ROOT.glob("docs/examples/*.*")):
        text = f"# {example.name}\n\n```{example.suffix[1:]}\n{example.read_text()}```\n"
        uri = f"examples/{example.name}.md"
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between files of the repository point to pages of the site; a link to any other file is only text."""
    del config
    uri = page.file.src_uri
    home = posixpath.dirname({there: here for here, there in OUTSIDE.items()}.get(uri, f"docs/{uri}"))

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(home, target))
        if not (ROOT / path).exists():
            _log.warning(f"docs/{uri} has a link to {target}, which is no file of the repository")
        there = OUTSIDE.get(path, path.removeprefix("docs/"))
        there = next((each for each in (f"{there}.md", there) if files.get_file_from_path(each)), None)
        if there is None:
            return text
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(uri))}{anchor or ''})"

    return _LINK.sub(replace, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of what a browser would load from the network."""
    del config
    for loaded in _LOADED.findall(output):
        _log.warning(f"{page.file.src_uri} loads {loaded}; put the file into docs/assets")
    return output
