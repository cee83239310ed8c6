"""Pictures as SVG: their frame, and the shapes that they are made of. All lengths are pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from math import floor, log10

# Classes of text: heading, muted, ending at its place.
_STYLE = ("text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1f2933}.h{font-size:15px;font-weight:bold}"
          ".m{fill:#6b7785}.e{text-anchor:end}")


def picture(width: float, height: float, shapes: Iterable[str], style: str = "") -> str:
    """A whole file. style: more rules of CSS."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}{style}</style>'
    return "\n".join([frame, rect(0, 0, width, height, "#fff"), *shapes, "</svg>"]) + "\n"


def rect(x: float, y: float, width: float, height: float, fill: str = "", kind: str = "") -> str:
    """A rectangle; `kind`: its class."""
    looks = f' fill="{fill}"' * bool(fill) + f' class="{kind}"' * bool(kind)
    return f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{looks}/>'


def text(x: float, y: float, content: object, kind: str = "") -> str:
    """A line of text, whose baseline is at `y`."""
    looks = f' class="{kind}"' * bool(kind)
    return f'<text x="{number(x)}" y="{number(y)}"{looks}>{escape(str(content))}</text>'


def titled(title: str, shapes: Iterable[str]) -> str:
    """Shapes over which a pointer makes the title appear."""
    return f"<g><title>{escape(title)}</title>{''.join(shapes)}</g>"


def legend(x: float, y: float, colours: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A row of names and colours, whose boxes have their upper edge at `y`."""
    for name, colour in colours:
        yield rect(x, y, 12, 12, colour)
        yield text(x + 17, y + 10, name)
        x += 34 + 6.2 * len(name)


def tick_step(least: float) -> float:
    """The least of 1, 2, 5, 10, 20, ... and 0.5, 0.2, 0.1, ... that is not below `least`, to put numbers on an axis."""
    magnitude = 10.0 ** floor(log10(least))
    return next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= least * (1 - 1e-9))


def number(value: float) -> str:
    """At most two decimals, and none where there are none."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
