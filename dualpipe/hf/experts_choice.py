"""Choose the experts implementation of transformers' models: check the requested one, or time all for the fastest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dualpipe.hf.cut import top_k_of
from dualpipe.hf.experts import NAME
from dualpipe.hf.stage import CausalLMStage
from dualpipe.parallel.experts.dispatcher import is_interface_experts, stacked_parameters
from dualpipe.runtime.device import min_seconds
from dualpipe.runtime.errors import first_line
from dualpipe.runtime.ranks.rank_sync import RankSync

log = logging.getLogger(__name__)
AUTO = "auto"
_ALTERNATIVES = ("grouped_mm", "sonicmoe", "deepgemm")  # implementations of transformers that "auto" times
_TIMED_TOKENS = 4096
_TIMED_CALLS = 3
_TRIAL_TOKENS = 4


def choose_experts(stages: Sequence[CausalLMStage], experts: str, ranks: RankSync) -> None:
    """Set the experts implementation of all stages, and log the choice. Collective.

    experts: name of the implementation; "auto": the fastest one that runs.

    Raises ValueError, on every rank, if the implementation fails on any rank.
    """
    if experts == AUTO:
        experts = _find_fastest(stages, ranks)
    else:
        ranks.agree(lambda: _check_runs(stages, experts))
        log.info("experts run by %r", experts)
    for module in _expert_modules(stages):
        module.config._experts_implementation = experts


def _find_fastest(stages: Sequence[CausalLMStage], ranks: RankSync) -> str:
    """Return the fastest implementation on the first rank that has experts. Collective."""

    def measure() -> dict[str, float]:
        if not _expert_modules(stages):
            return {}
        return {name: _measure_seconds(stages, name) for name in (NAME, *_ALTERNATIVES)}

    measured_ranks = [seconds for seconds in ranks.gather(measure) if seconds]
    if not measured_ranks:
        return NAME
    seconds = measured_ranks[0]
    fastest = min(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{1e3 * time:.2f} ms by {name!r}" for name, time in seconds.items() if time < float("inf"))
    log.info(
        "experts run by %r: %d tokens, forward and backward, take %s; only those of %r defer weight gradients", fastest,
        _TIMED_TOKENS, times, NAME)
    return fastest


def _check_runs(stages: Sequence[CausalLMStage], experts: str) -> None:
    """Raise ValueError if an implementation fails on a few tokens, for example because it is not installed."""
    modules = _expert_modules(stages)
    if experts == NAME or not modules:
        return
    try:
        _run(modules[0], experts, _TRIAL_TOKENS)
    except Exception as error:  # transformers raises many types for a missing package, a device or a dtype
        raise ValueError(f"experts={experts!r} does not run here ({type(error).__name__}: {first_line(error)}); "
                         f"expected an implementation that is installed and supports this device and dtype: install "
                         f"its packages, or use experts={NAME!r}") from error


def _measure_seconds(stages: Sequence[CausalLMStage], experts: str) -> float:
    """Return the time in seconds of one layer's experts, forward and backward; infinity if they fail."""
    module = _expert_modules(stages)[0]
    run = partial(_run, module, experts, _TIMED_TOKENS)
    try:
        return min_seconds(run, module.down_proj.device, num_calls=_TIMED_CALLS)
    except Exception as error:  # as in `_check_runs`
        log.info("experts=%r does not run here: %s", experts, first_line(error))
        return float("inf")


def _run(module: Any, experts: str, num_tokens: int) -> None:
    """Run a module of experts by an implementation, forward and backward, on random tokens and random routing."""
    weight = module.down_proj
    hidden_size = weight.shape[-1] if module.is_transposed else weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden_size, generator=generator, device="cpu")
    scores = torch.rand(num_tokens, module.num_experts, generator=generator, device="cpu")
    weights, index = scores.topk(min(top_k_of(module.config), module.num_experts))
    old_implementation = module.config._experts_implementation
    module.config._experts_implementation = experts
    try:
        x = x.to(weight.device, weight.dtype).requires_grad_()
        y = module(x, index.to(weight.device), weights.to(weight.device, weight.dtype))
        torch.autograd.grad(y.sum(), [x, *stacked_parameters(module).values()], allow_unused=True)
    finally:
        module.config._experts_implementation = old_implementation


def _expert_modules(stages: Sequence[CausalLMStage]) -> list[Any]:
    """Return the modules that transformers calls through its experts interface."""
    return [module for stage in stages for module in stage.modules() if is_interface_experts(module)]
