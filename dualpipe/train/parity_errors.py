"""Errors of a pipelined model: how `dualpipe parity`, also with `--model`, measures, bounds and prints them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from dualpipe.runtime.printing import say
from dualpipe.schedule.draw import aligned

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}  # relative; rounding alone stays orders of magnitude below

T = TypeVar("T")


class Bounds(NamedTuple):
    """The largest errors allowed in bfloat16, as multiples of the unpipelined model's errors."""

    together: float  # of all gradients together
    single: float  # of a single tensor


BOUNDS = Bounds(1.5, 2.5)


class Difference(NamedTuple):
    """The distance of a tensor from its reference."""

    name: str
    shape: tuple[int, ...]
    max_abs: float  # largest element
    relative: float  # ||x - ref|| / max(||ref||, floor)


class Rounding(NamedTuple):
    """The distances of a tensor from float64, in the pipelined and in the unpipelined model."""

    name: str
    shape: tuple[int, ...]
    norm: float  # of the float64 tensor
    pipelined: float
    unpipelined: float
    # Pipelined error divided by the larger of the unpipelined error and one rounding; NaN for a NaN error.
    excess: float


class Accumulation(NamedTuple):
    """The distance of a step's gradient from the sum over its micro-batches. allowed: the largest valid distance."""

    name: str
    relative: float
    allowed: float


# -- measuring


def difference(name: str, value: Tensor, reference: Tensor, floor: float = 0.0) -> Difference:
    """Measure `value` against `reference`.

    floor: the relative error is divided by the larger of the reference's norm and this, or by 1 if both are 0.
    """
    delta = value - reference
    scale = max(reference.norm().item(), floor) or 1.0
    return Difference(name, tuple(value.shape), delta.abs().max().item(), delta.norm().item() / scale)


def measure_rounding(
    name: str, pipelined: Tensor, unpipelined: Tensor, exact: Tensor, floor: float = 2**-9
) -> Rounding:
    """Measure a tensor of both bfloat16 models against float64.

    floor: the relative error of the unpipelined model counts as at least this; 2^-9 is one rounding to bfloat16.
    """
    norm = float(exact.norm())
    error = float((pipelined.double() - exact).norm())
    unpipelined_error = float((unpipelined.double() - exact).norm())
    excess = error / (max(unpipelined_error, floor * norm) or 1.0)
    return Rounding(name, tuple(pipelined.shape), norm, error, unpipelined_error, excess)


def combine_gradients(rounding: Iterable[Rounding]) -> Rounding:
    """Return the errors of all gradients together, as if they were one tensor."""
    gradients = [error for error in rounding if "loss" not in error.name]
    norm = math.hypot(*(error.norm for error in gradients))
    pipelined = math.hypot(*(error.pipelined for error in gradients))
    unpipelined = math.hypot(*(error.unpipelined for error in gradients))
    return Rounding("all gradients", (), norm, pipelined, unpipelined, pipelined / (unpipelined or 1.0))


def worst_of(items: Iterable[T], measure: Callable[[T], float], count: int) -> list[T]:
    """Return the `count` items with the largest measure, the largest first; NaN is the largest."""

    def sort_key(item: T) -> float:
        value = measure(item)
        return math.inf if math.isnan(value) else value

    return heapq.nlargest(count, items, key=sort_key)


def _excess(error: Rounding) -> float:
    return error.excess


def _share_of_allowed(error: Accumulation) -> float:
    return error.relative / error.allowed


# -- judging


def rounding_failures(rounding: Sequence[Rounding], bounds: Bounds) -> list[str]:
    """Return a text for each bound that the errors against float64 exceed. NaN exceeds all."""
    failures = []
    (largest,) = worst_of(rounding, _excess, 1)
    if not largest.excess <= bounds.single:
        failures.append(f"{largest.name} is {largest.excess:.2f} times as far from float64 as in the unpipelined model")
    together = combine_gradients(rounding)
    if not together.pipelined <= bounds.together * together.unpipelined:  # also if the unpipelined error is 0
        failures.append("all gradients together are further from float64")
    return failures


def accumulation_failures(accumulation: Sequence[Accumulation]) -> list[str]:
    """Return a text for the gradient furthest from the sum over its micro-batches, if it is too far."""
    (largest,) = worst_of(accumulation, _share_of_allowed, 1)
    if largest.relative <= largest.allowed:
        return []
    return [f"{largest.name} is not the sum of its micro-batches' gradients"]


# -- printing


def print_table(heading: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of a tensor's name, its shape and the values of `columns`.

    Names are not wrapped, so that they can be searched for.
    """
    say(f"{heading} ({title})")
    say(aligned([("tensor", "shape", *columns), *rows]).rstrip())


def print_bf16(
    title: str, rounding: Sequence[Rounding], accumulation: Sequence[Accumulation], bounds: Bounds, worst: int
) -> None:
    """Print the `worst` largest errors of a comparison in bfloat16, and the error of all gradients together."""
    accumulation_by_name: dict[str, float] = {}
    for name, relative, _ in accumulation:
        accumulation_by_name[name] = max(accumulation_by_name.get(name, 0.0), relative)
    rows = []
    for error in worst_of(rounding, _excess, worst):
        norm = error.norm or 1.0
        added = f"{accumulation_by_name[error.name]:.2e}" if error.name in accumulation_by_name else "-"
        rows.append((error.name, str(error.shape), f"{error.pipelined / norm:.2e}", f"{error.unpipelined / norm:.2e}",
                     added))
    print_table("Largest errors against float64", title, ("pipelined", "unpipelined", "accumulation"), rows)
    together = combine_gradients(rounding)
    (largest,) = worst_of(rounding, _excess, 1)
    (worst_sum,) = worst_of(accumulation, _share_of_allowed, 1)
    say(f"error of all gradients together, relative to float64: {together.pipelined / together.norm:.2e} pipelined, "
        f"{together.unpipelined / together.norm:.2e} unpipelined: {together.excess:.2f} times (allowed: "
        f"{bounds.together}); of a single tensor: up to {largest.excess:.2f} times (allowed: {bounds.single})")
    say(f"error of accumulation: up to {worst_sum.relative:.1e} (allowed: {worst_sum.allowed:.1e})")
