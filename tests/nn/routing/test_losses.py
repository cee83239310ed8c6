"""Router losses against plain formulas, for any split of the batch; and the loads counted with them."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from dualpipe import Pipeline
from dualpipe.nn.routing.losses import (
    LOSSES,
    RouterStep,
    balance_loss,
    count_load,
    load_of,
    losses_of,
    make_totals,
    max_over_mean,
    z_loss,
)
from dualpipe.nn.routing.router import Scoring
from routers import OPTIONS, E, router, tokens
from routes import BalancedRoutes, Routes


def test_balance_loss_worked_example():
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    load = count_load(torch.tensor([[0, 0]]), 3)
    assert load.tolist() == [[2, 0, 0]]
    assert balance_loss(probs, load).item() == 3 * 0.5
    assert balance_loss(probs, torch.tensor([[4, 4, 4]])).item() == 1
    assert balance_loss(probs, torch.tensor([[1, 0, 0], [0, 0, 1]])).item() == 3 * (0.5 + 0) / 2
    assert balance_loss(probs, torch.zeros(1, 3)).item() == 0  # nothing is known yet


def test_balance_loss_is_that_of_transformers_over_k():
    logits = torch.randn(50, E)
    probs, experts = logits.softmax(-1), logits.topk(3).indices
    theirs = load_balancing_loss_func((logits,), E, 3)
    torch.testing.assert_close(3 * balance_loss(probs, count_load(experts.view(1, -1), E)), theirs)


@pytest.mark.parametrize("parts", [1, 4])
def test_gradients_of_the_losses(parts):
    logits = torch.randn(8, E, dtype=torch.float64, requires_grad=True)
    load = torch.randint(5, (parts, E))
    assert torch.autograd.gradcheck(lambda x: balance_loss(x.softmax(-1), load), logits)
    assert torch.autograd.gradcheck(lambda x: balance_loss(x.sigmoid(), load), logits)
    assert torch.autograd.gradcheck(z_loss, logits)


def balance_term(r, step, logits_BSE, probs_BSE, chosen_BSE):
    if step.level == "sequence":
        return E * (chosen_BSE.mean(1) * probs_BSE.mean(1)).sum(-1).mean() / r.top_k
    share_E = chosen_BSE.mean((0, 1)) / r.top_k if step.level == "microbatch" else step.load_E / step.load_E.sum()
    return E * (share_E * probs_BSE.mean((0, 1))).sum()


# Each loss by its formula, of one batch: (router, step, logits, probabilities, 1 where an expert is chosen).
FORMULAS = {
    "balance_loss": balance_term,
    "z_loss": lambda r, step, logits_BSE, probs_BSE, chosen_BSE: logits_BSE.logsumexp(-1).pow(2).mean(),
}


def terms(r, x_BSH, step):
    """Return the sum of the loss terms of one batch, by their formulas."""
    logits_BSE = F.linear(x_BSH, r.weight, r.bias)
    scores_BSE = logits_BSE.sigmoid() if r.score == "sigmoid" else logits_BSE.softmax(-1)
    probs_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
    with torch.no_grad():  # so that the router only routes
        chosen_BSE = F.one_hot(r(x_BSH)[1], E).sum(1).double().view_as(probs_BSE)
    values = {name: FORMULAS[name](r, step, logits_BSE, probs_BSE, chosen_BSE) for name in LOSSES}
    return sum(getattr(step, LOSSES[name].coefficient) * value for name, value in values.items())


def gradients(r, x_BSH, step, cuts=1, ranks=1):
    """Return the gradients of weight and x after a step of `ranks` ranks, each with its share in `cuts` pieces."""
    total, dx = torch.zeros_like(r.weight), []
    for batch in x_BSH.chunk(ranks):
        r.step = replace(step, num_microbatches=cuts)
        r.weight.grad = None
        for piece in batch.chunk(cuts):
            piece = piece.detach().requires_grad_()
            weights_TK, _ = r(piece)
            (weights_TK.sum() * 0).backward()  # what remains are the gradients of the loss terms
            dx.append(piece.grad / ranks)
        total += r.weight.grad / ranks  # FSDP2 averages
    return total, torch.cat(dx)


def step_of(r, x_BSH, level, *, kind=RouterStep, **changes):
    """Return a step with all losses, except those whose coefficients are set to 0."""
    with torch.no_grad():
        load_E = count_load(r(x_BSH)[1].view(1, -1), E)[0]
    coefficients = {loss.coefficient: 0.7 / (i + 1) for i, loss in enumerate(LOSSES.values())}
    return kind(**{"level": level, "load_E": load_E} | coefficients | changes)


LEVELS = ["microbatch", "sequence", "global"]
ALONE = {  # one loss, and no other
    name: {loss.coefficient: 0.0 for other, loss in LOSSES.items() if other != name} for name in LOSSES
}
TERMS = {"sequence": ALONE["balance_loss"], "global": {"level": "global"} | ALONE["balance_loss"]} | {
    name: alone for name, alone in ALONE.items() if name != "balance_loss"}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_injected_gradients_are_those_of_the_terms(level, options):
    r, x = router(**options), tokens(4, 9).requires_grad_()
    step = step_of(r, x, level)
    expected = torch.autograd.grad(terms(r, x, step), (r.weight, x))
    for a, b in zip(gradients(r, x, step), expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scale", [1024, torch.tensor(1024.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("level", LEVELS)
def test_loss_scale_scales_gradients_and_not_metrics(level, scale):
    r, x = router(), tokens(4, 9).requires_grad_()
    totals = make_totals(E)
    step = step_of(r, x, level, loss_scale=scale, totals=totals)
    expected = torch.autograd.grad(terms(r, x, step), (r.weight, x))
    for a, b in zip(gradients(r, x, step), expected):
        torch.testing.assert_close(a / 1024, b)
    scaled_losses = losses_of(totals).clone()
    totals.zero_()
    gradients(r, x, replace(step, loss_scale=None))
    assert torch.equal(losses_of(totals), scaled_losses)


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_in_float16_need_a_loss_scale(autocast):
    r, x = router(), tokens(4, 9)
    r, x = (r.float(), x.float()) if autocast else (r.half(), x.half())
    r.step = RouterStep(balance=0.5)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        with pytest.raises(ValueError, match="loss_scale"):
            r(x)
        with torch.no_grad():
            r(x)
        for step in (RouterStep(balance=0.5, loss_scale=1), RouterStep(totals=make_totals(E))):
            r.step = step
            r(x)


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, "8", torch.ones(1), torch.ones((), requires_grad=True)])
def test_invalid_loss_scales(scale):
    with pytest.raises(ValueError, match="loss_scale"):
        RouterStep(z=0.1, loss_scale=scale)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
def test_gradients_are_the_same_however_the_batch_is_cut(term, options):
    r, x = router(**options), tokens(8, 5)
    step = step_of(r, x, **{"level": "sequence"} | term)
    expected = gradients(r, x, step)
    assert expected[0].abs().max() > 1e-3
    for cuts, ranks in [(2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (2, 4)]:
        for a, b in zip(gradients(r, x, step, cuts, ranks), expected):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_level_microbatch_depends_on_the_cut():
    r, x = router(), tokens(8, 5)
    step = step_of(r, x, "microbatch", **ALONE["balance_loss"])
    assert (gradients(r, x, step)[0] - gradients(r, x, step, 4)[0]).abs().max() > 1e-3
    one = step_of(r, x, "sequence", **ALONE["balance_loss"])  # with a sequence in each micro-batch it is that level
    for a, b in zip(gradients(r, x, step, 8), gradients(r, x, one)):
        torch.testing.assert_close(a, b)


class Gated(nn.Module):
    """A stage whose routing weights scale its input."""

    def __init__(self, seed):
        super().__init__()
        self.router = router(seed=seed, scoring=Scoring(norm_topk_prob=True))

    def forward(self, x_BSH):
        weights_TK, experts_TK = self.router(x_BSH)
        return x_BSH * (weights_TK * (experts_TK + 1)).sum(-1).view(*x_BSH.shape[:2], 1)


@pytest.mark.parametrize("level", ["sequence", "global"])
@pytest.mark.parametrize("schedule", ["dualpipev", "zbv"])
def test_through_a_pipeline(schedule, level):
    results, x = [], tokens(8, 5) / 4
    for chunks in (1, 2, 8):
        stages = [Gated(0), Gated(1)]
        totals = [make_totals(E) for _ in stages]
        for stage, each in zip(stages, totals):
            stage.router.step = RouterStep(chunks, 0.5, level, torch.arange(E), z=0.5, totals=each)
        pipeline = Pipeline(stages, schedule=schedule)
        losses, _ = pipeline.step(x, num_chunks=chunks, criterion=lambda y, n=chunks: y.square().mean() / n)
        with torch.no_grad():
            pipeline.step(x, num_chunks=chunks, criterion=lambda y: y.square().mean())
        results.append([losses.sum(), *(s.router.weight.grad for s in stages), *totals])
    assert load_of(results[0][3]).sum() == 8 * 5 * 3
    for result in results[1:]:
        for a, b in zip(result, results[0]):
            torch.testing.assert_close(a, b)


def test_losses_leave_results_and_other_gradients_alone():
    r, x = router(dtype=torch.bfloat16), tokens(4, 9, dtype=torch.bfloat16).requires_grad_()
    weights, experts = r(x)
    dy = torch.randn_like(weights)
    (plain,) = torch.autograd.grad(weights, x, dy)
    for step in (RouterStep(balance=1.0, z=1.0), RouterStep(totals=make_totals(E))):
        r.step = step
        again, experts_again = r(x)
        assert torch.equal(again, weights) and torch.equal(experts_again, experts)
        (grad,) = torch.autograd.grad(again, x, dy)
        assert torch.equal(grad, plain) == (step.z == 0)


def test_loads_and_losses_are_counted_in_the_backward():
    r, x, totals = router(), tokens(4, 9), make_totals(E)
    step = r.step = step_of(r, x, "sequence", num_microbatches=2, totals=totals)
    with torch.no_grad():
        r(x)  # an evaluation
        r(x.flatten(0, 1))  # which needs no sequences
        load = count_load(r(x)[1].view(1, -1), E)[0]
    weights, _ = r(x)
    assert not totals.any()
    weights.sum().backward()
    assert torch.equal(load_of(totals), load.double())
    assert max_over_mean(load_of(totals)).item() == pytest.approx(load.max().item() / (4 * 9 * 3 / E))
    counted = sum(step.coefficients[name] * value for name, value in zip(LOSSES, losses_of(totals)))
    torch.testing.assert_close(counted, terms(r, x, step) / 2)
    r(x)[0].sum().backward()
    assert torch.equal(load_of(totals), 2 * load.double())
    assert max_over_mean(torch.zeros(E)) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_loads_and_losses_of_a_recomputed_forward_count_once(reentrant):
    r, x = router(), tokens(4, 9).requires_grad_()
    results = []
    for again in (False, True):
        totals = make_totals(E)
        r.step = step_of(r, x, "sequence", totals=totals)
        weights = checkpoint(lambda x: r(x)[0], x, use_reentrant=reentrant) if again else r(x)[0]
        weights.sum().backward()
        results.append((x.grad, r.weight.grad, totals))
        x.grad = r.weight.grad = None
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_on_cuda_as_on_cpu_without_waiting(options, any_cuda):
    r, x = router(**options), tokens(4, 9)
    expected = gradients(r, x, step_of(r, x, "global"))
    r, x = r.cuda(), x.cuda()
    step = step_of(r, x, "global", totals=make_totals(E, "cuda"))
    gradients(r, x, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = gradients(r, x, step)
        for level in LEVELS:
            gradients(r, x, replace(step, level=level))
        for r.choice in (BalancedRoutes(), Routes(1).record(0)):
            gradients(r, x, step)
        if r.e_score_correction_bias is not None:
            r.update_bias(load_of(step.totals).long(), 0.1)
        assert max_over_mean(load_of(step.totals)).dim() == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a.cpu(), b)


def test_refuses_steps():
    with pytest.raises(ValueError, match="num_microbatches"):
        RouterStep(num_microbatches=0)
    with pytest.raises(ValueError, match=r"level must be .*; got 'layer'"):
        RouterStep(level="layer")
    with pytest.raises(ValueError, match=r"torch.zeros"):
        RouterStep(balance=1.0, level="global")
    r = router()
    r.step = RouterStep(balance=1.0)
    with pytest.raises(ValueError, match=r"needs x as \(B, S, H\).* T = 7"):
        r(tokens(7))
    r.step = RouterStep(balance=1.0, level="global", load_E=torch.zeros(5))
    with pytest.raises(ValueError, match="load_E"):
        r(tokens(7))
