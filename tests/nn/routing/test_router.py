"""The router against transformers' and against plain formulas: choices and weights, its own and from outside."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.routing.losses import RouterStep, load_of, make_totals, max_over_mean
from dualpipe.nn.routing.router import ExpertGroups, Router, Scoring
from dualpipe.parallel import DTypePolicy, resolve_dtypes
from routers import OPTIONS, V3, E, H, over_experts, router, tokens
from routes import Routes

# -- transformers


def hf_config(**changes):
    sizes = dict(num_experts=E, num_local_experts=E, hidden_size=H, num_experts_per_tok=3, norm_topk_prob=False,
                 routed_scaling_factor=1.0, n_group=1, topk_group=1, topk_method="greedy")
    return SimpleNamespace(**sizes | changes)


FAMILIES = {
    "qwen3": (Qwen3MoeTopKRouter, {}, {}),
    "qwen3, normalised": (Qwen3MoeTopKRouter, dict(norm_topk_prob=True),
                          dict(scoring=Scoring(norm_topk_prob=True))),
    "deepseek-v2, greedy": (DeepseekV2TopkRouter, dict(routed_scaling_factor=16.0),
                            dict(scoring=Scoring(routed_scaling_factor=16.0), wide_logits=True)),
    "deepseek-v2, groups": (DeepseekV2TopkRouter, dict(topk_method="group_limited_greedy", n_group=4, topk_group=2),
                            dict(groups=ExpertGroups(4, 2), wide_logits=True)),
    "deepseek-v3": (DeepseekV3TopkRouter,
                    dict(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5), V3),
    "deepseek-v3, one group": (DeepseekV3TopkRouter, {},
                               dict(scoring=Scoring("sigmoid"), correction_bias=True, wide_logits=True)),
    "gpt-oss": (GptOssTopKRouter, {}, dict(scoring=Scoring("softmax_topk"), bias=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family, dtype):
    theirs, config, options = FAMILIES[family]
    ours, theirs = router(dtype=dtype, **options), theirs(hf_config(**config))
    if ours.e_score_correction_bias is not None:
        ours.e_score_correction_bias = ours.e_score_correction_bias.float()
    if ours.bias is not None:
        torch.nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict(), assign=True)  # the same names
    x, x_hf = (tokens(400, dtype=dtype).requires_grad_() for _ in range(2))
    weights, experts = ours(x)
    _, weights_hf, experts_hf = theirs(x_hf)
    assert torch.equal(experts.sort().values, experts_hf.sort().values)
    assert weights.dtype is weights_hf.dtype
    tolerance = 1e-6 if weights.dtype is torch.float32 else 8e-3  # a sum in another order; one rounding to bfloat16
    actual, expected = over_experts(weights, experts), over_experts(weights_hf, experts_hf)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0)
    dy = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, (x, ours.weight), dy), torch.autograd.grad(expected, (x_hf, theirs.weight), dy)
    rtol = 1e-4 if dtype is torch.float32 else 5e-2
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())


# -- routing


def test_groups_worked_example():
    r = Router(4, 4, 2, groups=ExpertGroups(2, 1))
    torch.nn.init.eye_(r.weight)  # logits are x
    x = torch.tensor([[3.0, 0.0, 2.0, 2.0]])
    assert r(x)[1].tolist() == [[0, 1]]  # the best expert's group
    r.group_best = 2
    x = torch.tensor([[3.0, -9.0, 2.9, 2.9]])
    assert set(r(x)[1][0].tolist()) == {2, 3}  # the group with the best two


def test_bias_changes_the_choice_and_not_the_weights():
    r = router(1, torch.float32, scoring=Scoring("sigmoid"), correction_bias=True)
    r.e_score_correction_bias.zero_()
    r.e_score_correction_bias[5] = 9.0
    x = tokens(7, dtype=torch.float32)
    weights, experts = r(x)
    assert (experts == 5).all()
    torch.testing.assert_close(weights, F.linear(x, r.weight)[:, 5:6].sigmoid())


def test_bias_follows_the_loads():
    r = Router(2, 4, 1, scoring=Scoring("sigmoid"), correction_bias=True)
    r.update_bias(torch.tensor([3, 1, 2, 2]), 0.5)
    r.update_bias(torch.tensor([4.0, 0.0, 0.0, 0.0], dtype=torch.float64), 0.25)
    assert r.e_score_correction_bias.tolist() == [-0.75, 0.75, 0.25, 0.25]
    assert "e_score_correction_bias" in r.state_dict()
    assert not r.e_score_correction_bias.requires_grad


def test_bias_stays_float32_in_a_bfloat16_model():
    r = Router(H, E, 3, correction_bias=True).bfloat16()
    plan = resolve_dtypes(r, DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16), sharded=False)
    assert plan.of("e_score_correction_bias").storage is torch.float32
    assert plan.of("weight").compute is torch.bfloat16
    with pytest.raises(ValueError, match="bfloat16"):
        r.update_bias(torch.zeros(E), 0.001)


@pytest.mark.parametrize("deferred", [False, True])
def test_wide_logits_have_gradients_of_float32(deferred):
    r = router(dtype=torch.bfloat16, wide_logits=True, bias=True)
    x = tokens(40, dtype=torch.bfloat16).requires_grad_()
    wide, x_wide = copy.deepcopy(r).float(), x.detach().float().requires_grad_()
    wide.wide_logits = False
    for p in r.parameters():
        p.grad_dtype = torch.float32
    weights, experts = r(x)
    expected, experts_wide = wide(x_wide)
    assert weights.dtype is torch.float32 and torch.equal(weights, expected) and torch.equal(experts, experts_wide)
    dy, store = torch.randn_like(weights), WeightGradStore()
    expected.backward(dy)
    if deferred:
        with store.activate(), store.defer("I"):
            weights.backward(dy)
        assert r.weight.grad is None
        store.run("I")
    else:
        weights.backward(dy)
    assert torch.equal(x.grad, x_wide.grad.bfloat16())
    assert torch.equal(r.weight.grad, wide.weight.grad) and torch.equal(r.bias.grad, wide.bias.grad)


def test_wide_logits_ignore_autocast_and_keep_x_as_it_is():
    r, x = router(dtype=torch.float32, wide_logits=True), tokens(9, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(r(x)[0], r(x)[0].float()) and r(x)[0].dtype is torch.float32
        inside = r(x)[0]
    assert torch.equal(inside, r(x)[0])
    kept, r = [], r.bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        r(x.bfloat16())
    assert not [t for t in kept if t.shape == x.shape and t.dtype is torch.float32]


def test_wide_logits_of_a_pruned_weight():
    r, store = router(dtype=torch.float32, wide_logits=True), WeightGradStore()
    prune.l1_unstructured(r, "weight", 0.5)
    with store.activate(), store.defer("I"):
        r(tokens(9, dtype=torch.float32))[0].square().sum().backward()
    assert torch.equal(r.weight_orig.grad != 0, r.weight_mask != 0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_torch_func_and_forward_mode_go_through(options):
    r, x = router(2, **options), tokens(3, 6)
    weights, experts = r(x.flatten(0, 1))
    weights.square().sum().backward()

    def loss(weight):
        return torch.func.functional_call(r, {"weight": weight}, (x.flatten(0, 1),))[0].square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(r.weight.detach()), r.weight.grad)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.flatten(0, 1), torch.ones_like(x.flatten(0, 1)))
        tangent = torch.autograd.forward_ad.unpack_dual(r(dual)[0]).tangent
    _, expected = torch.func.jvp(lambda x: r(x)[0], (x.flatten(0, 1),), (torch.ones_like(x.flatten(0, 1)),))
    torch.testing.assert_close(tangent, expected)
    mapped = torch.func.vmap(r)(x)
    torch.testing.assert_close(mapped[0].flatten(0, 1), weights)
    assert torch.equal(mapped[1].flatten(0, 1), experts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(2, 6), (1,), (0,), (0, 6), (2, 0)], ids=str)
@pytest.mark.parametrize("top_k", [1, E])
def test_odd_and_empty_sizes(top_k, shape, options):
    if top_k == E:
        groups = options.get("groups", ExpertGroups())
        options = {**options, "groups": replace(groups, topk_group=groups.n_group)}
    r, count = router(top_k, **options), torch.Size(shape).numel()
    level = "sequence" if len(shape) == 2 else "microbatch"
    totals = make_totals(E)
    r.step = RouterStep(balance=0.5, level=level, z=0.5, totals=totals)
    x = tokens(*shape).requires_grad_()
    weights, experts = r(x)
    assert weights.shape == experts.shape == (count, top_k)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    weights.sum().backward()
    assert x.grad.isfinite().all() and r.weight.grad.isfinite().all()
    assert load_of(totals).sum() == count * top_k
    assert totals.isfinite().all() and max_over_mean(load_of(totals)).isfinite()


# -- choices from outside


def test_replay_takes_recorded_experts_and_current_scores():
    r = router(scoring=Scoring(norm_topk_prob=True))
    routes, batch = Routes(2), [tokens(5, seed=s) for s in (1, 2)]
    r.choice = routes.record("layer")
    recorded = [r(x)[1] for x in batch]
    assert list(routes.experts) == [("layer", 0), ("layer", 1)]
    later = router(scoring=Scoring(norm_topk_prob=True), seed=9)
    own = [later(x)[1] for x in batch]
    later.choice = routes.replay("layer")
    for x, experts, others in zip(batch, recorded, own):
        weights, used = later(x)
        assert torch.equal(used, experts) and not torch.equal(used, others)
        scores = F.linear(x, later.weight).softmax(-1).gather(1, experts)
        torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    later.choice = routes.replay("layer")  # of a step in which micro-batches come in another order
    for number in (1, 0):
        with routes.at(number):
            assert torch.equal(later(batch[number])[1], recorded[number])


def test_recomputed_forwards_are_recorded_once_and_replayed_alike():
    r, routes, store = router(), Routes(2), WeightGradStore()
    batch = [tokens(5, seed=s) for s in (1, 2)]

    def pipeline():
        with store.activate(), torch.no_grad():
            first = [r(x)[1] for x in batch]
            with store.recompute():
                return first, [r(x)[1] for x in batch]

    r.choice = routes.record(0)
    recorded, _ = pipeline()
    assert len(routes.experts) == 2
    r = router(seed=9)
    r.choice = routes.replay(0)
    for used in pipeline():
        assert all(map(torch.equal, used, recorded))


# -- errors


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((8, 9), {}, "top_k .* got 9"),
        ((8, 0), {}, "top_k .* got 0"),
        ((8, 5), dict(groups=ExpertGroups(4, 2)), "top_k .* got 5"),
        ((8, 2), dict(groups=ExpertGroups(3)), "n_group .* got 3"),
        ((8, 2), dict(groups=ExpertGroups(4, 5)), "topk_group .* got 5"),
        ((8, 2), dict(groups=ExpertGroups(8, 4, 2)), "group_best"),
        ((8, 2), dict(scoring=Scoring("relu")), "relu"),
    ],
)
def test_refuses_sizes(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        Router(4, *sizes, **options)


def test_refuses_bias_updates():
    with pytest.raises(ValueError, match="build it with correction_bias=True"):
        router().update_bias(torch.zeros(E), 0.1)
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(12,\)"):
        router(correction_bias=True).update_bias(torch.zeros(3), 0.1)


def test_refuses_choices():
    r = router()
    with pytest.raises(ValueError, match="num_microbatches"):
        Routes(0)
    routes = Routes(1)
    r.choice = routes.replay(4)
    with pytest.raises(ValueError, match=r"\(4, 0\)"):
        r(tokens(7))
    r.choice = routes.record(4)
    r(tokens(7))
    with pytest.raises(ValueError, match="layer 4"):
        r(tokens(7))
    r.choice = routes.replay(4)
    with pytest.raises(ValueError, match=r"\(7, 3\), expected \(8, 3\)"):
        r(tokens(8))
    with pytest.raises(ValueError, match="microbatch must be 0 to 0; got 1"), routes.at(1):
        pass
