"""Experts implementation "dualpipe" for transformers: grouped GEMMs with deferred weight gradients.

transformers calls the stacked experts of a model through its experts interface, which looks up an implementation by the
name in `config._experts_implementation`. Importing this module registers the name "dualpipe", so that a model uses
these kernels inside and outside of a pipeline:

    import dualpipe.hf
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="dualpipe")

Attributes of a class of experts describe how it stores its weights; `use_experts_implementation` of transformers sets
them: `has_gate`, `has_bias`, `is_transposed`, `is_concatenated` and `has_post_expert_norm`.

Dimension letters: T tokens, K experts per token, M routed rows, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dualpipe.hf.cut import top_k_of
from dualpipe.kernels import SortedTokens
from dualpipe.kernels.swiglu import clamped_swiglu, swiglu, swiglu_form
from dualpipe.nn.grouped_linear import apply_swiglu, grouped_linear, refuse_transforms
from dualpipe.nn.lora import STACKED, adapted_grouped_linear
from dualpipe.nn.pick_fastest import check_runs, pick_fastest
from dualpipe.nn.segments import Communicate, Compute, Segment, run_segments
from dualpipe.parallel.experts.dispatcher import (
    Dispatcher,
    ExpertParallel,
    is_interface_experts,
    run_experts,
    stacked_parameters,
)
from dualpipe.runtime.ranks.rank_sync import RankSync

log = logging.getLogger(__name__)
NAME = "dualpipe"  # name of this implementation in `config._experts_implementation`
AUTO = "auto"
_ALTERNATIVES = ("grouped_mm", "sonicmoe", "deepgemm")  # implementations of transformers that "auto" times
_TIMED_TOKENS = 4096
_TRIAL_TOKENS = 4

SwiGLUForm = tuple[bool, float, float]  # (clamped, alpha, limit): see `dualpipe.kernels.swiglu.swiglu_form`
_forms: WeakKeyDictionary[Any, SwiGLUForm | None] = WeakKeyDictionary()  # cache of `swiglu_form_of`, by module


def compute_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor | SortedTokens, top_k_weights: Tensor
) -> Tensor:
    """Compute the weighted sum of every token's experts, as transformers' experts interface defines it -> (T, H).

    hidden_states: (T, H).
    top_k_index, top_k_weights: (T, K).

    With a dispatcher of several expert-parallel ranks, tokens are dispatched to their experts and combined: collective
    over these ranks, in the forward and in the backward.

    Inside of this function, `run_experts` calls the module again, to compute the local experts. In that call,
    `top_k_index` is a `SortedTokens` with the M rows sorted by expert, `top_k_weights` is (M,) in that order, and the
    result is (M, H): the output of each sorted row, multiplied by its weight.

    Raises ValueError if transformers has sharded the experts itself.
    """
    name = f"{type(experts).__name__}, run by dualpipe"
    refuse_transforms(name, hidden_states, top_k_weights, remedy='model.set_experts_implementation("eager")')
    if isinstance(top_k_index, SortedTokens):
        return _compute_sorted(experts, hidden_states, top_k_index, top_k_weights)
    if experts._is_expert_parallel:
        raise ValueError(f"{type(experts).__name__} is sharded by transformers' own expert parallelism; load the model "
                         "without a tensor-parallel plan, and give dualpipe.hf.load_stages a mesh with \"ep\"")
    carry = {"tokens": hidden_states.flatten(0, -2), "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    dispatcher = dispatcher_of(experts)
    plan = Compute(dispatcher.plan, ("tokens", "top_k_weights", "top_k_index"), ("rows", "weights", "plan"))
    finish = Compute(dispatcher.finish, ("rows", "plan"), "y")
    results = run_segments([plan, *exchange_segments(experts), finish], carry)
    y = results["y"]
    return y if y.shape == hidden_states.shape else y.view_as(hidden_states)  # FSDP2 warns of views


def dispatcher_of(experts: Any) -> Dispatcher:
    """Return the dispatcher of a layer's experts; by default one for a rank that has all experts."""
    dispatcher = getattr(experts, "dispatcher", None)
    if dispatcher is None:
        dispatcher = ExpertParallel(experts.num_experts).dispatcher()
    return dispatcher


def exchange_segments(experts: Any) -> list[Segment]:
    """Return the segments dispatch, experts and combine, which read "rows", "weights" and "plan" and write "rows"."""
    dispatcher = dispatcher_of(experts)

    def compute(rows: Tensor, weights_RK: Tensor, received: Any) -> Tensor:
        return run_experts(experts, rows, weights_RK, received)

    if dispatcher.dispatch is None or dispatcher.combine is None:
        return [Compute(compute, ("rows", "weights", "plan"), "rows")]
    return [
        Communicate(dispatcher.dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received")),
        Compute(compute, ("rows", "weights", "received"), "rows"),
        Communicate(dispatcher.combine, ("rows", "received"), "rows"),
    ]


def _compute_sorted(experts: Any, x_TH: Tensor, tokens: SortedTokens, weights_M: Tensor) -> Tensor:
    """Compute the results of the rows sorted by expert, multiplied by their weights -> (M, H)."""
    first_name = "gate_up_proj" if experts.has_gate else "up_proj"
    is_transposed = experts.is_transposed
    # Without a bias or a norm after the last GEMM, the weights can be applied before it. The result is the same, and
    # the backward need not save the last GEMM's result.
    has_post_norm = getattr(experts, "has_post_expert_norm", False)  # newer than transformers 5.17
    scales_input = not experts.has_bias and not has_post_norm
    form = swiglu_form_of(experts)
    scale_M = weights_M if scales_input and form is not None else None
    adapters = experts._modules.get(STACKED) or {}
    if first_name in adapters:
        y_MN = adapted_grouped_linear(
            x_TH, getattr(experts, first_name), _bias(experts, first_name), tokens, adapters[first_name],
            is_transposed=is_transposed)
        h_MI = y_MN if form is None else apply_swiglu(y_MN, scale_M, form)
    else:
        h_MI = grouped_linear(
            x_TH, getattr(experts, first_name), _bias(experts, first_name), tokens, is_transposed=is_transposed,
            form=form, scale=scale_M,
        )
    if form is None:
        h_MI = experts._apply_gate(h_MI) if experts.has_gate else experts.act_fn(h_MI)
        if scales_input:
            h_MI = (h_MI * weights_M.unsqueeze(1)).to(h_MI.dtype)
    down_bias = _bias(experts, "down_proj")
    if "down_proj" in adapters:
        y_MH = adapted_grouped_linear(
            h_MI, experts.down_proj, down_bias, tokens.offs, adapters["down_proj"], is_transposed=is_transposed)
    else:
        y_MH = grouped_linear(h_MI, experts.down_proj, down_bias, tokens.offs, is_transposed=is_transposed)
    if has_post_norm:
        y_MH = experts.post_expert_norm(y_MH)
    if scales_input:
        return y_MH
    return (y_MH * weights_M.unsqueeze(1)).to(y_MH.dtype)


def _bias(experts: Any, weight_name: str) -> Tensor | None:
    """Return the bias that goes with a stacked weight."""
    return getattr(experts, f"{weight_name}_bias") if experts.has_bias else None


def swiglu_form_of(experts: Any) -> SwiGLUForm | None:
    """Return the SwiGLU form of the kernels that equals the experts' activation, or None if no form does.

    Compares the results of `_apply_gate` on sample values, so the implementation of the class does not matter. The form
    of a module is computed once.
    """
    if experts not in _forms:
        _forms[experts] = _recognize_form(experts) if experts.has_gate else None
    return _forms[experts]


def _recognize_form(experts: Any) -> SwiGLUForm | None:
    """Compare `_apply_gate` with both forms of the kernels on sample values."""
    with torch.no_grad():
        # Small values, and values beyond the limit of any clamp, in an even number of columns.
        samples = [torch.linspace(-size, size, 8 * 32, dtype=torch.float64, device="cpu") for size in (20.0, 1e4)]
        gate_up = torch.cat([sample.view(32, 8).t() for sample in samples]).contiguous()
        activations = experts._apply_gate(gate_up)
        if torch.allclose(activations, swiglu(gate_up), rtol=1e-12, atol=1e-12):
            return swiglu_form(False, 0.0, 0.0)
        alpha = getattr(experts, "alpha", None)
        limit = getattr(experts, "limit", None)
        if alpha is None or limit is None:
            return None
        if torch.allclose(activations, clamped_swiglu(gate_up, None, alpha, limit), rtol=1e-12, atol=1e-12):
            return swiglu_form(True, alpha, limit)
    return None


def choose_experts(stages: Sequence[nn.Module], experts: str, ranks: RankSync) -> None:
    """Set the experts implementation of all stages, and log the choice. Collective over `ranks`.

    experts: name of the implementation; "auto": the fastest one that runs.

    Raises ValueError, on every rank, if the implementation fails on any rank.
    """
    modules: list[Any] = [module for stage in stages for module in stage.modules() if is_interface_experts(module)]
    if experts == AUTO:
        run = partial(_run_trial, modules[0], num_tokens=_TIMED_TOKENS) if modules else None
        device = modules[0].down_proj.device if modules else torch.device("cpu")
        choice = pick_fastest((NAME, *_ALTERNATIVES), run, device, ranks, default=NAME)
        experts = choice.name
        if choice.seconds:
            log.info("experts run by %r: %d tokens, forward and backward, take %s; only those of %r defer weight "
                     "gradients", experts, _TIMED_TOKENS, choice, NAME)
    else:
        ranks.agree(lambda: _check_implementation(modules, experts))
        if modules:
            log.info("experts run by %r", experts)
    for module in modules:
        module.config._experts_implementation = experts


def _check_implementation(modules: Sequence[Any], experts: str) -> None:
    """Raise ValueError if an implementation fails on a few tokens, for example because it is not installed."""
    if experts == NAME or not modules:
        return
    check_runs(lambda: _run_trial(modules[0], experts, _TRIAL_TOKENS), f"experts={experts!r}",
               "an implementation that is installed and supports this device and dtype: install its packages, or use "
               f"experts={NAME!r}")


def _run_trial(module: Any, experts: str, num_tokens: int) -> None:
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
        trained = [weight for weight in stacked_parameters(module).values() if weight.requires_grad]
        torch.autograd.grad(y.sum(), [x, *trained], allow_unused=True)
    finally:
        module.config._experts_implementation = old_implementation


ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
