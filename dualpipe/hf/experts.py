"""transformers' stacked experts by this library's grouped GEMMs, with deferred weight gradients.

transformers calls the experts of a model through an interface, by the name in `config._experts_implementation`. The
name "dualpipe" is registered with it here, so that a model uses these kernels inside and outside of a pipeline:

    import dualpipe.hf
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="dualpipe")

A class of experts says how it stores its weights by attributes that `use_experts_implementation` of transformers sets:
`has_gate`, `has_bias`, `is_transposed`, `is_concatenated` and `has_post_expert_norm`.

Dimension letters: T tokens, K experts per token, M routed rows, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dualpipe.kernels import SortedTokens
from dualpipe.kernels.swiglu import clamped_swiglu, swiglu, swiglu_form
from dualpipe.nn.grouped_linear import grouped_linear
from dualpipe.nn.segments import Communicate, Compute, Segment, run_segments
from dualpipe.parallel.experts.dispatcher import Dispatcher, ExpertParallel, run_experts

NAME = "dualpipe"  # of this implementation, in `config._experts_implementation`

SwiGLUForm = tuple[bool, float, float]
_forms: WeakKeyDictionary[Any, SwiGLUForm | None] = WeakKeyDictionary()  # of modules of experts, from their first use


def compute_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor | SortedTokens, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts, as transformers' experts interface defines it.

    hidden_states: (T, H); top_k_index, top_k_weights: (T, K). Where the experts have a dispatcher of several ranks,
    tokens travel to their experts and back: collective over these ranks, forward and backward.

    `run_experts` calls the module with rows sorted by expert instead: top_k_index says how, top_k_weights is (M,), and
    the result is that of the sorted rows (M, H), multiplied by their weights.

    Raises ValueError for experts that transformers has sharded itself.
    """
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
    return results["y"].view_as(hidden_states)


def dispatcher_of(experts: Any) -> Dispatcher:
    """Return the dispatcher of a layer's experts: by default that of a rank which has all of them."""
    dispatcher = getattr(experts, "dispatcher", None)
    if dispatcher is None:
        dispatcher = ExpertParallel(experts.num_experts).dispatcher()
    return dispatcher


def exchange_segments(experts: Any) -> list[Segment]:
    """Return the segments from "rows", "weights" and "plan" to "rows": to the experts, through them and back."""
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
    """Return the results of rows that are sorted by expert (M, H), multiplied by their weights."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    is_transposed = experts.is_transposed
    # Without what follows the last product, weighting before it is the same, and its result need not be kept.
    has_post_norm = getattr(experts, "has_post_expert_norm", False)  # newer than transformers 5.17
    weighs_first = not experts.has_bias and not has_post_norm
    form = swiglu_form_of(experts)
    scale_M = weights_M if weighs_first and form is not None else None
    h_MI = grouped_linear(
        x_TH, getattr(experts, first), _bias(experts, first), tokens, is_transposed=is_transposed, form=form,
        scale=scale_M,
    )
    if form is None:
        h_MI = experts._apply_gate(h_MI) if experts.has_gate else experts.act_fn(h_MI)
    if form is None and weighs_first:
        h_MI = (h_MI * weights_M.unsqueeze(1)).to(h_MI.dtype)
    y_MH = grouped_linear(
        h_MI, experts.down_proj, _bias(experts, "down_proj"), tokens.offs, is_transposed=is_transposed)
    if has_post_norm:
        y_MH = experts.post_expert_norm(y_MH)
    return y_MH if weighs_first else (y_MH * weights_M.unsqueeze(1)).to(y_MH.dtype)


def _bias(experts: Any, name: str) -> Tensor | None:
    return getattr(experts, f"{name}_bias") if experts.has_bias else None


def swiglu_form_of(experts: Any) -> SwiGLUForm | None:
    """Return the form in which the kernels compute an activation; None where they do not have it.

    Recognised by what `_apply_gate` computes of a few numbers, so that a class may write it as it likes.
    """
    if experts not in _forms:
        _forms[experts] = _recognised_form(experts) if experts.has_gate else None
    return _forms[experts]


def _recognised_form(experts: Any) -> SwiGLUForm | None:
    with torch.no_grad():
        # Small numbers, and some beyond the limit of any clamp, in an even number of columns.
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


ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
