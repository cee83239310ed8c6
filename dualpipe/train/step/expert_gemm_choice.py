"""Choose the library of the expert layers' GEMMs: check that the requested one runs, or time all of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dualpipe.nn import GroupedLinear
from dualpipe.nn.deferral import local
from dualpipe.nn.expert_gemm import DUALPIPE, EXPERT_GEMMS, ExpertGemm, expert_gemm, expert_gemm_dgrad
from dualpipe.quantized import QuantizedTensor
from dualpipe.runtime.device import min_seconds
from dualpipe.runtime.errors import first_line
from dualpipe.runtime.ranks.rank_sync import RankSync

AUTO = "auto"
_TIMED_CALLS = 5


class GemmShape(NamedTuple):
    """The sizes of a rank's expert layer: number of experts, out_features, in_features."""

    experts: int
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.experts} x {self.out_features} x {self.in_features}"


class ExpertWork(NamedTuple):
    """The work of a rank's expert layers in one micro-batch.

    rows: of a layer, shared evenly by its experts. expert_ranks: ranks that share the experts of a layer. dtype: of the
    GEMMs.
    """

    rows: int
    expert_ranks: int
    dtype: torch.dtype
    device: torch.device


class GemmChoice(NamedTuple):
    """The library of the expert layers' GEMMs. text: for the log, with times; "" if there was nothing to choose."""

    library: str
    text: str = ""


def choose_expert_gemm(stages: Iterable[nn.Module], library: str, work: ExpertWork, ranks: RankSync) -> GemmChoice:
    """Set `gemm_library` of all expert layers of the stages. Collective over `ranks`.

    library: one of `EXPERT_GEMMS`, or "auto" for the one that takes the least time on the first rank with experts, for
    a forward and an input gradient of each layer size. Layers with quantized weights keep dualpipe's own GEMMs.

    Raises ValueError, on every rank, if the requested library does not run on some rank.
    """
    if library == DUALPIPE:
        return GemmChoice(DUALPIPE)
    layers = [layer for stage in stages for layer in _expert_layers(stage)]
    shapes = sorted({
        GemmShape(layer.num_groups // work.expert_ranks, layer.out_features, layer.in_features) for layer in layers})
    if library == AUTO:
        library, text = _find_fastest(shapes, work, ranks)
    else:
        ranks.agree(lambda: _check_runs(library, shapes, work))
        text = f"GEMMs of the experts by {library!r}, as configured"
    for layer in layers:
        layer.gemm_library = cast(ExpertGemm, library)
    return GemmChoice(library, text)


def _expert_layers(stage: nn.Module) -> list[GroupedLinear]:
    """Return the expert layers of a stage whose weights are not quantized."""
    layers = [module for module in stage.modules() if isinstance(module, GroupedLinear)]
    return [layer for layer in layers if not isinstance(local(layer.weight.detach()), QuantizedTensor)]


def _find_fastest(shapes: list[GemmShape], work: ExpertWork, ranks: RankSync) -> tuple[str, str]:
    """Return the fastest library, and its choice as text. Collective."""

    def measure() -> tuple[str, dict[str, float]]:
        totals = {library: sum(_seconds(library, shape, work) for shape in shapes) for library in EXPERT_GEMMS}
        return " and ".join(map(str, shapes)), totals

    measured = [(sizes, totals) for sizes, totals in ranks.gather(measure) if sizes]
    if not measured:
        return DUALPIPE, ""
    sizes, totals = measured[0]
    fastest = min(totals, key=lambda library: totals[library])
    times = ", ".join(f"{1e3 * total:.3g} ms by {name!r}" for name, total in totals.items() if total < float("inf"))
    return fastest, (f"GEMMs of the experts by {fastest!r}: a forward and an input gradient of {work.rows} rows by "
                     f"{sizes} take {times}")


def _check_runs(library: str, shapes: list[GemmShape], work: ExpertWork) -> None:
    """Raise ValueError if a library is unknown or fails for a few rows."""
    if library not in EXPERT_GEMMS:
        raise ValueError(f"unknown library of expert GEMMs {library!r}; expected one of {', '.join(EXPERT_GEMMS)}, or "
                         f"{AUTO!r}")
    for shape in shapes:
        try:
            _run(library, *_operands(shape, work._replace(rows=shape.experts)))
        except Exception as error:  # whatever the library raises if it is not installed or refuses the operands
            raise ValueError(
                f"expert GEMMs by {library!r} do not run here ({type(error).__name__}: {first_line(error)}); expected "
                f"a library that is installed and takes {work.dtype} on {work.device}; use {DUALPIPE!r}") from error


def _seconds(library: str, shape: GemmShape, work: ExpertWork) -> float:
    """Return the seconds of a forward and an input gradient; infinity if the library does not run."""
    run = partial(_run, library, *_operands(shape, work))
    try:
        return min_seconds(run, work.device, num_calls=_TIMED_CALLS)
    except Exception:  # as in `_check_runs`; the library is left out of the table
        return float("inf")


def _operands(shape: GemmShape, work: ExpertWork) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens (M, H), the token of each row in random order (M,), a weight (E, N, H), experts' row ends (E,)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.rows, shape.in_features, generator=generator, device="cpu")
    gather = torch.randperm(work.rows, generator=generator, device="cpu")
    weight = torch.zeros(shape, device=work.device, dtype=work.dtype).normal_()
    ends = torch.arange(1, shape.experts + 1, device=work.device) * work.rows // shape.experts
    return x.to(work.device, work.dtype), gather.to(work.device, torch.int32), weight, ends.to(torch.int32)


def _run(library: str, x: Tensor, gather: Tensor, weight: Tensor, ends: Tensor) -> None:
    """Run a forward from tokens, and an input gradient."""
    name = cast(ExpertGemm, library)
    y = expert_gemm(name, x, weight, ends, gather_M=gather)
    expert_gemm_dgrad(name, y, weight, ends)
