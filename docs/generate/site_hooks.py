"""Hooks for mkdocs: adapt the documents, which are written to be read on GitHub, to the site.

README, CONTRIBUTING and CHANGELOG become pages. Links to files that are no pages lose their target, since the site has
no sources. The picture of the page of schedules becomes the page itself. mkdocstrings fills in docs/api.md.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpipe.schedule import Costs, build, simulate, to_html

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "out/packages"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
SCHEDULE_PICTURE = re.compile(r"!\[[^\]]*\]\(pictures/schedule-page\.png\)")
SCHEDULE_PAGE = "pictures/schedules.html"
FRAME = f'<iframe src="{SCHEDULE_PAGE}" title="Schedules" style="width:100%;height:36rem;border:0"></iframe>'


def on_startup(command: str, dirty: bool) -> None:
    """Copy the sources into one tree, as an installation has them: mkdocstrings reads them there, without an import."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    for name, package in (("dualpipe", "dualpipe"), ("kernels", "dualpipe/kernels"), ("models", "dualpipe/models")):
        shutil.copytree(ROOT / name, PACKAGES / package, ignore=shutil.ignore_patterns("__pycache__"))


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of the root as pages, and the page that `dualpipe schedule --html` writes."""
    from mkdocs.structure.files import File

    costs = Costs(F=1, B=2, W=1, FB=2.6, p2p=0.1)
    timelines = [simulate(build(name, 4, 10), costs) for name in ("dualpipev", "zbv")]
    page = to_html(timelines, title="Schedules of 4 ranks and 10 micro-batches")
    files.append(File.generated(config, SCHEDULE_PAGE, content=page))
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page."""
    uri = page.file.src_uri
    source = next((name for name, generated in PAGES.items() if generated == uri), f"docs/{uri}")
    return rewrite(markdown, source, uri)


def rewrite(markdown: str, source: str, uri: str) -> str:
    """Return a document with links that hold on the site, and the schedule page embedded.

    source: path of the document from the root. uri: its path on the site.
    """
    parts = re.split(r"(^```.*?^```[^\n]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):  # outside of code
        embedded = SCHEDULE_PICTURE.sub(FRAME, parts[index])
        parts[index] = LINK.sub(lambda match: _link(match, source, uri), embedded)
    return "".join(parts)


def _link(match: re.Match[str], source: str, uri: str) -> str:
    is_picture, label, target = match.groups()
    file, hash_sign, anchor = target.partition("#")
    if "://" in target or not file:
        return match[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
    page = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is None or page.startswith("generate/"):
        return label
    link = posixpath.relpath(page, posixpath.dirname(uri) or ".")
    return f"{is_picture}[{label}]({link}{hash_sign}{anchor})"
