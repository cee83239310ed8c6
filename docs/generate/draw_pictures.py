"""Draw the pictures of the documents into docs/pictures.

    python docs/generate/draw_pictures.py            draw them
    python docs/generate/draw_pictures.py --check    draw nothing; exit status 1 if a picture is not current

Schedules are drawn by the library itself, as `dualpipe schedule --svg` does. All pictures have the colours of its
schedules, and a dark mode.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dualpipe.schedule import Costs, build, simulate, to_html, to_svg
from dualpipe.schedule.draw import LOOKS
from dualpipe.schedule.svg import picture, rect, text

FOLDER = Path(__file__).parents[1] / "pictures"

# Rules for dark mode. Cells keep their colours, and so the text in them (n, p, i) stays dark.
DARK = (
    '@media(prefers-color-scheme:dark){text{fill:#d1d9e0}.m,.a{fill:#9198a1}.n,.p,.i,.j{fill:#1f2933}'
    'rect[fill="#fff"]{fill:#0d1117}rect{stroke:#0d1117}.b{fill:#1c2128}.o{stroke:#f0f6fc}line{stroke:#3d444d}'
    ".w{stroke:#9198a1}.g{fill:#1c2128;stroke:#3d444d}}"
)
# Text in the middle of a cell (i) or at its left (j), a frame for a group (g), an arrow (w).
DRAWN = (
    ".t{font-weight:bold;font-size:12.5px}"
    ".i{text-anchor:middle;font-size:11px}.j{font-size:11px}.g{fill:#f6f8fa;stroke:#d5dbe1;stroke-width:1}"
    ".w{stroke:#6b7785;stroke-width:1.4;fill:none}.m,.a{font-size:11px}.c{text-anchor:middle}"
    "line{stroke:#d5dbe1;stroke-width:1}"
)
FORWARD, FORWARD_LIGHT = LOOKS["F"][1:]
BACKWARD, BACKWARD_LIGHT = LOOKS["B"][1:]
WEIGHTS, WEIGHTS_LIGHT = LOOKS["W"][1:]
INPUTS, INPUTS_LIGHT = LOOKS["I"][1:]


def with_dark_mode(svg: str) -> str:
    """Return a picture with the rules for dark mode, once."""
    return svg if DARK in svg else svg.replace("</style>", f"{DARK}</style>", 1)


# -- schedules

EXAMPLE = Costs(F=1, B=2, W=1, FB=2.6)  # a pair takes 2.6 instead of 3


def schedule(name: str, costs: Costs = EXAMPLE, num_ranks: int = 4, num_microbatches: int = 10) -> str:
    """Draw a schedule by name."""
    return with_dark_mode(to_svg(simulate(build(name, num_ranks, num_microbatches), costs)))


def page() -> str:
    """Return the interactive page of two schedules, as `dualpipe schedule --html` writes it."""
    costs = Costs(F=1, B=2, W=1, FB=2.6, p2p=0.1)
    timelines = [simulate(build(name, 4, 10), costs) for name in ("dualpipev", "zbv")]
    return to_html(timelines, title="Schedules of 4 ranks and 10 micro-batches")


# -- the pair

PAIR = (  # a layer of each: compute segment, its colour, and the communication in flight meanwhile, with its colour
    ("B: rest of the layer", BACKWARD, "", ""),
    ("F: attention, router", FORWARD, "B: combine", BACKWARD_LIGHT),
    ("B: experts, W", BACKWARD, "F: dispatch", FORWARD_LIGHT),
    ("F: experts, W", FORWARD, "B: dispatch", BACKWARD_LIGHT),
    ("B: attention, router, W", BACKWARD, "F: combine", FORWARD_LIGHT),
    ("F: rest of the layer", FORWARD, "", ""),
)


def pair_shapes(left: float, top: float, width: float) -> Iterator[str]:
    """Yield the shapes of an overlapped pair, by stream."""
    step = (width - left) / len(PAIR)
    yield text(left - 10, top + 19, "compute", "e")
    yield text(left - 10, top + 53, "all-to-all", "e")
    for index, (name, colour, communication, light) in enumerate(PAIR):
        x = left + index * step
        yield rect(x, top, step - 2, 30, colour) + text(x + step / 2 - 1, top + 19, name, "i")
        if communication:
            yield rect(x, top + 34, step - 2, 30, light) + text(x + step / 2 - 1, top + 53, communication, "i")


def overlap() -> str:
    """Draw the streams of an overlapped pair, with what orders them."""
    left = 96.0
    top = 70.0
    width = 1060.0
    step = (width - left) / len(PAIR)
    shapes = [
        text(left, 26, "A pair: the forward of one micro-batch beside the backward of another", "h"),
        text(left, 48, "An all-to-all of one runs on its side stream while the other computes.", "m"),
        *pair_shapes(left, top, width),
    ]
    for index in range(1, len(PAIR)):
        x = left + index * step - 1
        shapes.append(f'<path class="w" d="M{x:.0f} {top + 30:.0f}v4"/>')
    shapes += [
        text(left, top + 92, "The side stream waits for the event of the segment that computed the rows. The compute "
             "stream waits for the rows before it reads them.", "m"),
        text(left, top + 108, "record_stream keeps their memory until both streams are done with it. W: weight "
             "gradients that fill in.", "m"),
    ]
    return drawn(width + 20, top + 126, shapes)


def readme() -> str:
    """Draw DualPipeV's order with one of its pairs below."""
    order = schedule("dualpipev")
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', order)[0])
    style = re.findall(r"<style>(.*?)</style>", order, re.DOTALL)[0].replace(DARK, "")
    (inside,) = re.findall(r"</style>\n<rect [^>]*/>\n(.*)</svg>", order, re.DOTALL)
    panel = [
        text(64, height + 20, "One framed pair, by stream", "h"),
        text(300, height + 20, "the all-to-all of one micro-batch runs while the other one computes", "m"),
        *pair_shapes(64, height + 34, width - 74),
    ]
    moved = [shape.replace(">compute<", ">GPU<").replace(">all-to-all<", ">network<") for shape in panel]
    frame = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + 110:.0f}" '
             f'width="{width:.0f}" height="{height + 110:.0f}">\n<style>{style}{DRAWN}{DARK}</style>')
    background = rect(0, 0, width, height + 110, "#fff")
    return "\n".join([frame, background, inside.rstrip("\n"), *moved, "</svg>"]) + "\n"


# -- the system


def drawn(width: float, height: float, shapes: Iterable[str]) -> str:
    """Return a picture that is not a schedule."""
    return with_dark_mode(picture(width, height, shapes, DRAWN))


def box(x: float, y: float, width: float, title: str, note: str, colour: str, height: float = 44) -> str:
    """Draw a cell with a title and a note below it."""
    below = text(x + 10, y + 36, note, "j") if note else ""
    return rect(x, y, width, height, colour) + text(x + 10, y + 19, title, "j t") + below


LAYERS = (  # from the top, as tests/test_layers.py has them: rooms with what is in them
    (("cli", "the `dualpipe` command", WEIGHTS_LIGHT),),
    (("plan", "memory, step time and meshes, from a configuration alone", WEIGHTS_LIGHT),),
    (("train", "the trainer: config, data, optimizers, launch, health, checkpointing", WEIGHTS_LIGHT),),
    (("hf", "models of transformers as stages", FORWARD_LIGHT),),
    (("checkpoint", "any layout to any layout; hub/ for Hugging Face", FORWARD_LIGHT),),
    (("models", "Qwen3-MoE, DeepSeek, gpt-oss", FORWARD_LIGHT),),
    (("pipeline", "the engine: lowers a schedule, runs it, overlaps pairs", FORWARD),),
    (("parallel", "mesh, FSDP2, the dtype contract, expert and context parallelism", BACKWARD_LIGHT),),
    (("nn", "layers whose weight gradients can be deferred, routers, attention, segments", BACKWARD_LIGHT),),
    (("quantized", "tensors of blocks with scales", INPUTS_LIGHT), ("trace", "all ranks on one clock", INPUTS_LIGHT)),
    (("schedule", "the order of work as data; imports no torch", INPUTS),
     ("kernels", "Triton kernels and their PyTorch references", INPUTS_LIGHT)),
    (("runtime", "devices and streams, agreement and failure of ranks, records, files", INPUTS_LIGHT),),
)


def layers() -> str:
    """Draw the rooms of the library; a room imports those below it."""
    left, width = 20.0, 900.0
    shapes = [text(left, 26, "The rooms of dualpipe", "h"), text(left + 210, 26, "a room imports those below it", "m")]
    y = 44.0
    for row in LAYERS:
        cell = (width - 6 * (len(row) - 1)) / len(row)
        for index, (title, note, colour) in enumerate(row):
            shapes.append(box(left + index * (cell + 6), y, cell, title, note.replace("`", ""), colour))
        y += 48
    return drawn(left + width + 20, y + 12, shapes)


FLOW = (  # the boxes of a step from the top, with the file of each
    ("loader", "train/data/loader.py: tokens of this rank's rows, one step ahead", WEIGHTS_LIGHT),
    ("Pipeline.step", "pipeline/engine.py: ranks agree on the arguments, the batch is split into micro-batches",
     INPUTS_LIGHT),
    ("program of the rank", "pipeline/lower.py: receives, actions and sends, one after the other", INPUTS_LIGHT),
    ("F: forward of a stage", "pipeline/stage_runner.py: its segments; activations go to the next stage", FORWARD),
    ("loss", "the criterion, on the rank of the last stage: rank 0 in a V", FORWARD_LIGHT),
    ("B or I: backward", "input gradients go to the stage before; I leaves weight gradients in the WeightGradStore",
     BACKWARD),
    ("W: weight gradients", "nn/deferral.py: the store runs them; kernels add to float32 accumulators", WEIGHTS),
    ("reduce, per stage", "parallel/fsdp/driver.py: after the last W of a stage, while the other stage computes",
     BACKWARD_LIGHT),
    ("clip, optimizer", "parallel/clipping.py, train/optim/: by the norm of the whole model", WEIGHTS_LIGHT),
)


def step() -> str:
    """Draw the way of a batch through a step."""
    left = 20.0
    width = 720.0
    gap = 14.0
    shapes = [text(left, 26, "A training step", "h"),
              text(left + 145, 26, "each arrow is one call; none goes back up", "m")]
    y = 44.0
    for index, (title, note, colour) in enumerate(FLOW):
        shapes.append(box(left, y, width, title, note, colour))
        if index < len(FLOW) - 1:
            x = left + width / 2
            shapes.append(f'<path class="w" d="M{x:.0f} {y + 46:.0f}v{gap:.0f}m-4 -5l4 5l4 -5"/>')
        y += 46 + gap
    loop_top, loop_bottom = 44 + 3 * (46 + gap), 44 + 7 * (46 + gap) - gap
    x = left + width + 10
    shapes.append(f'<path class="w" d="M{x:.0f} {loop_top:.0f}h10v{loop_bottom - loop_top:.0f}h-10"/>')
    shapes.append(text(x + 18, (loop_top + loop_bottom) / 2 - 4, "for every micro-batch,", "m"))
    shapes.append(text(x + 18, (loop_top + loop_bottom) / 2 + 12, "in the order of the schedule", "m"))
    return drawn(x + 190, y + 6, shapes)


def placement() -> str:
    """Draw the stages of a V on four ranks."""
    left = 80.0
    cell = 150.0
    top = 64.0
    shapes = [text(left, 26, "A V of 8 stages on 4 ranks", "h"),
              text(left, 46, "rank r holds stages r and 2P - 1 - r; rank 0 has both the inputs and the loss", "m")]
    for rank in range(4):
        x = left + rank * (cell + 26)
        shapes += [text(x + cell / 2, top + 14, f"rank {rank}", "c"),
                   rect(x, top + 24, cell, 32, FORWARD) + text(x + cell / 2, top + 44, f"stage {rank}", "i"),
                   rect(x, top + 66, cell, 32, FORWARD_LIGHT) + text(x + cell / 2, top + 86, f"stage {7 - rank}", "i")]
        if rank < 3:
            right = x + cell
            shapes += [f'<path class="w" d="M{right:.0f} {top + 40:.0f}h26m-6 -4l6 4l-6 4"/>',
                       f'<path class="w" d="M{right + 26:.0f} {top + 82:.0f}h-26m6 -4l-6 4l6 4"/>']
    x = left + 3 * (cell + 26) + cell
    shapes.append(f'<path class="w" d="M{x:.0f} {top + 40:.0f}h14v42h-14m6 -4l-6 4l6 4"/>')
    shapes += [text(left - 10, top + 44, "tokens", "e"), text(left - 10, top + 86, "loss", "e"),
               text(x + 20, top + 64, "turn", "m")]
    return drawn(x + 70, top + 116, shapes)


PICTURES: dict[str, Callable[[], str]] = {
    "readme.svg": readme,
    "layers.svg": layers,
    "step.svg": step,
    "overlap.svg": overlap,
    "placement.svg": placement,
    "1f1b.svg": lambda: schedule("1f1b", Costs(F=2, B=4, W=2)),  # half as many stages, twice as large
    "interleaved_1f1b.svg": lambda: schedule("interleaved_1f1b", Costs(F=1, B=2, W=1)),
    "zbv.svg": lambda: schedule("zbv", Costs(F=1, B=2, W=1)),
    "v_half.svg": lambda: schedule("v_half", Costs(F=1, B=2, W=1)),
    "dualpipev.svg": lambda: schedule("dualpipev"),
    "schedules.html": page,
}
STORED = ("plan.svg", "trace.svg", "auto.svg")  # made by commands in docs/planning.md, tracing.md and schedules.md


def pictures() -> Iterator[tuple[str, str]]:
    """Yield every picture, by the name of its file."""
    for name, draw in PICTURES.items():
        yield name, draw()
    for name in STORED:
        yield name, with_dark_mode((FOLDER / name).read_text(encoding="utf-8"))


def main() -> int:
    """Draw the pictures, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit status 1 if a picture is not current")
    check = parser.parse_args().check
    stale = [(FOLDER / name, svg) for name, svg in pictures()
             if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != svg]
    for path, svg in stale:
        if not check:
            path.write_text(svg, encoding="utf-8")
        print(f"docs/pictures/{path.name}: {'not current; run make reference' if check else 'drawn'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
