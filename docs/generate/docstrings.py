"""Turn the docstrings of this library into Markdown."""

from __future__ import annotations

import re

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):$")
ITEM = re.compile(r"^\*{0,2}[a-z_]\w*(, [a-z_]\w*)*: ")  # how the description of an argument or attribute starts


def escape(text: str) -> str:
    """Escape what Markdown would take for its own, outside of code between backticks."""
    parts = re.split(r"(``.*?``|`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _escape_plain(part) for part in parts)


def _escape_plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("](", "]\\(")


def to_markdown(text: str) -> list[str]:
    """Return the lines of a docstring as Markdown: paragraphs, and lists for arguments and other described names."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.rstrip()):
        rows = block.splitlines()
        while rows:
            head, rows = _next_part(rows)
            lines += _part(head)
    return lines


def _next_part(rows: list[str]) -> tuple[list[str], list[str]]:
    """Split a block before a section that starts inside of it."""
    for index in range(1, len(rows)):
        if SECTION.match(rows[index]):
            return rows[:index], rows[index:]
    return rows, []


def _part(rows: list[str]) -> list[str]:
    if not rows or not rows[0].strip():
        return []
    section = SECTION.match(rows[0])
    if section:
        described = section[1] in ("Args", "Attributes", "Raises")
        body = _dedented(rows[1:])
        return [f"**{section[1]}**", "", *([*_items(body), ""] if described else _part(body))]
    if all(row.startswith("    ") for row in rows):  # an example or a formula
        return ["```py", *_dedented(rows), "```", ""]
    if ITEM.match(rows[0]) or any(row.startswith("    ") for row in rows):
        return [*_items(rows), ""]
    return [escape(" ".join(row.strip() for row in rows)), ""]


def _dedented(rows: list[str]) -> list[str]:
    indent = min((len(row) - len(row.lstrip()) for row in rows if row.strip()), default=0)
    return [row[indent:] for row in rows]


def _items(rows: list[str]) -> list[str]:
    """Return a list. An item starts at a row that is not indented, and without indented rows, that describes a name."""
    hangs = any(row.startswith("    ") for row in rows)
    items: list[str] = []
    for row in rows:
        goes_on = row.startswith("    ") if hangs else not ITEM.match(row)
        if items and goes_on:
            items[-1] += " " + row.strip()
        else:
            items.append(row.strip())
    return [f"- {_named(item)}" for item in items]


def _named(item: str) -> str:
    """Return an item with the names in front of its colon as code."""
    names, colon, rest = item.partition(": ")
    if not colon or not re.fullmatch(r"[\w*., ]+", names) or len(names.split(", ")) != len(names.split()):
        return escape(item)
    return ", ".join(f"`{name}`" for name in names.split(", ")) + ": " + escape(rest)
