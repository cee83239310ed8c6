"""Hooks for mkdocs: adapt the documents, which are written to be read on GitHub, to the site.

README, CONTRIBUTING and CHANGELOG become pages. Links to files that are no pages lose their target, since the site has
no sources. The picture of the schedule page becomes the page itself.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
SCHEDULE_PAGE = re.compile(r"\[!\[[^\]]*\]\(pictures/schedule-page\.png\)\]\((pictures/schedules\.html)\)")
FRAME = '<iframe src="{}" title="Interactive schedule page" style="width:100%;height:36rem;border:0"></iframe>'


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of the root as pages."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
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
        embedded = SCHEDULE_PAGE.sub(lambda match: FRAME.format(match[1]), parts[index])
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
