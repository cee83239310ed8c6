"""The kernels that a run chooses at its start: GEMMs of the experts, and attention. A replay uses the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from dualpipe.kernels.routing import SortedTokens, sort_tokens
from dualpipe.nn import GroupedLinear
from dualpipe.nn.accumulators import local
from dualpipe.nn.attention import AttentionChoice, choose_attention_kernel, head_size
from dualpipe.nn.grouped_linear import GemmLibrary
from dualpipe.nn.lora import Adapter
from dualpipe.nn.pick_fastest import check_runs, pick_fastest
from dualpipe.quantized import QuantizedTensor
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train.step import StepRunner

LIBRARIES: tuple[str, ...] = get_args(GemmLibrary)


class GemmChoice(NamedTuple):
    """The library of the expert layers' GEMMs. text: for the log, with times; "" if there was nothing to choose."""

    library: str
    text: str = ""


class KernelChoice(NamedTuple):
    """The kernels of a run."""

    expert_gemm: GemmChoice
    attention: AttentionChoice


def choose_kernels(runner: StepRunner) -> KernelChoice:
    """Choose the kernels that [model] asks for, and set those of the experts. Collective.

    `use_attention_kernel` applies the choice of attention. Raises ValueError, on all ranks, if one does not run.
    """
    stages = runner.model.stages
    config = runner.config
    device = runner.job.device
    dtype = runner.resolved.dtypes.compute
    tokens = config.train.micro_batch_size * config.train.sequence_length // config.parallel.cp
    rows = tokens * runner.resolved.model.num_experts_per_tok  # on average
    work = ExpertWork(rows, config.parallel.ep, dtype, device)
    gemm = choose_expert_gemm(stages, config.model.expert_gemm, work, runner.job.ranks)
    sizes = [size for stage in stages for module in stage.modules() if (size := head_size(module)) is not None]
    attention = choose_attention_kernel(config.model.attention, device, sizes, runner.job.ranks, dtype=dtype)
    return KernelChoice(gemm, attention)


class ExpertWork(NamedTuple):
    """The work of a rank's expert layers in one micro-batch.

    rows: of a layer, shared evenly by its experts. expert_ranks: ranks that share the experts of a layer. dtype: of the
    GEMMs.
    """

    rows: int
    expert_ranks: int
    dtype: torch.dtype
    device: torch.device


class GemmShape(NamedTuple):
    """The sizes of a rank's expert layer: number of experts, out_features, in_features."""

    experts: int
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.experts} x {self.out_features} x {self.in_features}"


def choose_expert_gemm(stages: Sequence[nn.Module], library: str, work: ExpertWork, ranks: RankSync) -> GemmChoice:
    """Set `gemm_library` of all expert layers of the stages. Collective over `ranks`.

    library: one of `LIBRARIES`, or "auto" for the one that takes the least time for a forward and an input gradient of
    each layer size. Layers with quantized weights and adapters keep dualpipe's own GEMMs.

    Raises ValueError, on every rank, if the requested library does not run on some rank.
    """
    if library == "dualpipe":
        return GemmChoice(library)
    modules = [module for stage in stages for module in stage.modules()]
    factors = {id(factor) for module in modules if isinstance(module, Adapter) for factor in module.children()}
    layers = [module for module in modules
              if isinstance(module, GroupedLinear) and id(module) not in factors
              and not isinstance(local(module.weight.detach()), QuantizedTensor)]
    shapes = sorted({
        GemmShape(layer.num_groups // work.expert_ranks, layer.out_features, layer.in_features) for layer in layers})
    text = f"GEMMs of the experts by {library!r}, as configured"
    if library == "auto":
        trials = cache(lambda: [_trial(shape, work) for shape in shapes])

        def run(name: str) -> None:
            for trial in trials():
                _run(name, *trial)

        choice = pick_fastest(LIBRARIES, run if shapes else None, work.device, ranks, default="dualpipe")
        library = choice.name
        text = ""
        if choice.seconds:
            sizes = next(filter(None, ranks.gather(lambda: " and ".join(map(str, shapes)))))  # of the first rank
            text = (f"GEMMs of the experts by {library!r}: a forward and an input gradient of {work.rows} rows by "
                    f"{sizes} take {choice}")
    else:
        ranks.agree(lambda: _check_library(library, shapes, work))
    for layer in layers:
        layer.gemm_library = cast(GemmLibrary, library)
    return GemmChoice(library, text)


def _check_library(library: str, shapes: Sequence[GemmShape], work: ExpertWork) -> None:
    """Raise ValueError if a library is unknown or fails for a few rows."""
    if library not in LIBRARIES:
        raise ValueError(f"unknown library of expert GEMMs {library!r}; expected one of {', '.join(LIBRARIES)}, or "
                         "'auto'")
    for shape in shapes:
        trial = _trial(shape, work._replace(rows=shape.experts))
        check_runs(partial(_run, library, *trial), f"a GEMM of experts by {library!r}",
                   f"a library that takes {work.dtype} on {work.device}; use 'dualpipe'")


def _trial(shape: GemmShape, work: ExpertWork) -> tuple[GroupedLinear, Tensor, SortedTokens]:
    """Return a layer of this shape, and tokens in random order, as many for each expert."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.rows, shape.in_features, generator=generator, device="cpu")
    order = torch.randperm(work.rows, generator=generator, device="cpu")
    expert = order * shape.experts // max(1, work.rows)
    tokens = sort_tokens(expert.to(work.device).unsqueeze(1), shape.experts)
    layer = GroupedLinear(shape.experts, shape.in_features, shape.out_features, device=work.device, dtype=work.dtype)
    layer.requires_grad_(False)
    return layer, x.to(work.device, work.dtype).requires_grad_(), tokens


def _run(library: str, layer: GroupedLinear, x: Tensor, tokens: SortedTokens) -> None:
    """Run a forward from tokens, and an input gradient."""
    layer.gemm_library = cast(GemmLibrary, library)
    y = layer(x, tokens)
    torch.autograd.grad(y, x, y)
