"""SVG pictures: the frame, and shapes to put into it. All lengths are in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from math import floor, log10

# CSS classes of text: heading (h), muted (m), ending at its x instead of starting there (e).
_STYLE = ("text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1f2933}.h{font-size:15px;font-weight:bold}"
          ".m{fill:#6b7785}.e{text-anchor:end}")


def picture(width: float, height: float, shapes: Iterable[str], style: str = "") -> str:
    """Return the text of an SVG file with `shapes` on a white background. style: additional CSS rules."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}{style}</style>'
    return "\n".join([frame, rect(0, 0, width, height, "#fff"), *shapes, "</svg>"]) + "\n"


def rect(x: float, y: float, width: float, height: float, fill: str = "", kind: str = "") -> str:
    """Return a rectangle with its upper left corner at (x, y). kind: its CSS class."""
    attributes = ""
    if fill:
        attributes += f' fill="{fill}"'
    if kind:
        attributes += f' class="{kind}"'
    return f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{attributes}/>'


def text(x: float, y: float, content: object, kind: str = "") -> str:
    """Return a line of text with its baseline at `y`. kind: its CSS class."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{number(x)}" y="{number(y)}"{attribute}>{escape(str(content))}</text>'


def titled(title: str, shapes: Iterable[str]) -> str:
    """Group shapes that show `title` when the pointer is over them."""
    return f"<g><title>{escape(title)}</title>{''.join(shapes)}</g>"


def legend(x: float, y: float, colours: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the shapes of a row of (name, colour), whose boxes have their upper edge at `y`."""
    for name, colour in colours:
        yield rect(x, y, 12, 12, colour)
        yield text(x + 17, y + 10, name)
        x += 34 + 6.2 * len(name)


def tick_step(least: float) -> float:
    """Return the smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, ... that is at least `least`, as the step of an axis."""
    magnitude = 10.0 ** floor(log10(least))
    return next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= least * (1 - 1e-9))


def number(value: float) -> str:
    """Format a number with at most two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
