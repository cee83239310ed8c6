"""Choose the implementation of transformers' experts: check that it runs, or time all and take the fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from dualpipe.hf.cut import top_k_of
from dualpipe.hf.experts import NAME
from dualpipe.hf.stage import CausalLMStage
from dualpipe.parallel.experts.dispatcher import is_interface_experts, stacked_parameters
from dualpipe.runtime.device import synchronize
from dualpipe.runtime.ranks.rank_sync import RankSync

log = logging.getLogger(__name__)
AUTO = "auto"
_OTHERS = ("grouped_mm", "sonicmoe", "deepgemm")  # of transformers, timed against this library's where they run
_TOKENS = 4096  # of a timed call
_TIMES = 3
_TRIAL_TOKENS = 4


def choose_experts(stages: Sequence[CausalLMStage], experts: str, ranks: RankSync) -> None:
    """Have all stages run their experts by `experts`, and log it; "auto": by the fastest that runs. Collective.

    Raises ValueError, on every rank, for an implementation that does not run on some rank.
    """
    if experts == AUTO:
        experts = _fastest(stages, ranks)
    else:
        ranks.agree(lambda: _check_that_it_runs(stages, experts))
        log.info("experts run by %r", experts)
    for module in _experts_of(stages):
        module.config._experts_implementation = experts


def _fastest(stages: Sequence[CausalLMStage], ranks: RankSync) -> str:
    """Return the implementation that is the fastest on the first rank that has experts, of those that run there."""
    measured = ranks.gather(
        lambda: {name: _seconds(stages, name) for name in (NAME, *_OTHERS) if _experts_of(stages)})
    seconds = next((times for times in measured if times), None)
    if seconds is None:
        return NAME
    choice = min(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{1e3 * time:.2f} ms by {name!r}" for name, time in seconds.items() if time < float("inf"))
    log.info(
        "experts run by %r: %d tokens, forward and backward, take %s; only those of %r defer weight gradients", choice,
        _TOKENS, times, NAME)
    return choice


def _check_that_it_runs(stages: Sequence[CausalLMStage], experts: str) -> None:
    """Raise ValueError where an implementation fails for a few tokens, as one that is not installed does."""
    modules = _experts_of(stages)
    if experts == NAME or not modules:
        return
    try:
        _run(modules[0], experts, _TRIAL_TOKENS)
    except Exception as error:  # whatever transformers raises for a package, a device or a dtype that it lacks
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"experts={experts!r} does not run here ({type(error).__name__}: {reason}); expected an "
                         f"implementation that is installed and takes this device and dtype: install what it needs, "
                         f"or use experts={NAME!r}") from error


def _seconds(stages: Sequence[CausalLMStage], experts: str) -> float:
    """Return the time of a forward and a backward of one layer's experts; infinity where they do not run."""
    module = _experts_of(stages)[0]
    device = module.down_proj.device
    times = []
    try:
        for _ in range(1 + _TIMES):
            start = time.perf_counter()
            _run(module, experts, _TOKENS)
            if device.type == "cuda":
                synchronize(device)
            times.append(time.perf_counter() - start)
    except Exception as error:  # as in `_check_that_it_runs`
        log.info("experts=%r does not run here: %s", experts, str(error).strip().partition("\n")[0])
        return float("inf")
    return min(times[1:])  # the first compiles


def _run(module: Any, experts: str, num_tokens: int) -> None:
    """Run a module of experts forward and backward on random tokens, routed at random, by an implementation."""
    weight = module.down_proj
    hidden_size = weight.shape[-1] if module.is_transposed else weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden_size, generator=generator, device="cpu")
    scores = torch.rand(num_tokens, module.num_experts, generator=generator, device="cpu")
    weights, index = scores.topk(min(top_k_of(module.config), module.num_experts))
    before = module.config._experts_implementation
    module.config._experts_implementation = experts
    try:
        x = x.to(weight.device, weight.dtype).requires_grad_()
        y = module(x, index.to(weight.device), weights.to(weight.device, weight.dtype))
        torch.autograd.grad(y.sum(), [x, *stacked_parameters(module).values()], allow_unused=True)
    finally:
        module.config._experts_implementation = before


def _experts_of(stages: Sequence[CausalLMStage]) -> list[Any]:
    """Return the modules that transformers calls through its experts interface."""
    return [module for stage in stages for module in stage.modules() if is_interface_experts(module)]
