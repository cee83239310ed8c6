"""transformers' experts by our kernels: the results and gradients of its eager loop, and weight gradients that wait."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch

from dualpipe import DualPipeV
from dualpipe.hf import load_stages
from dualpipe.hf.experts import NAME, swiglu_form_of
from dualpipe.nn import pick_fastest
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.grouped_linear import GroupedLinear, grouped_linear
from dualpipe.parallel.experts.dispatcher import is_interface_experts, stacked_parameters
from hf_families import MOE, batch_of, config_of, error_of, loss_fn, tiny_model


def experts_of(model):
    return next(module for module in model.modules() if is_interface_experts(module))


@pytest.mark.parametrize("family", MOE)
def test_losses_and_gradients_are_those_of_transformers(family):
    eager = tiny_model(family)
    ours = copy.deepcopy(eager)
    ours.set_experts_implementation(NAME)
    tokens, labels = batch_of(0, rows=2)
    results = []
    for model in (eager, ours):
        loss = loss_fn(model(tokens, use_cache=False).logits, labels)
        loss.backward()
        results.append(loss.item())
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    errors = {name: error_of(p.grad, q.grad)
              for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True)}
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_few_tokens_and_experts_without_any(family, num_tokens):
    eager = experts_of(tiny_model(family))
    ours = copy.deepcopy(eager)
    ours.config = copy.deepcopy(eager.config)
    ours.config._experts_implementation = NAME
    x = torch.randn(num_tokens, 32, dtype=torch.float64)
    index = torch.tensor([[5, 2], [2, 7], [5, 5]])[:num_tokens]
    weights = torch.rand(num_tokens, 2, dtype=torch.float64)
    found, expected = ours(x, index, weights), eager(x, index, weights)
    found.sum().backward()
    if num_tokens:
        expected.sum().backward()
    assert found.shape == (num_tokens, 32) and torch.allclose(found, expected, rtol=1e-12)
    assert all(error_of(p.grad, q.grad) < 1e-12 for p, q in zip(ours.parameters(), eager.parameters()))
    assert ours.down_proj.grad[0].count_nonzero() == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_weight_gradients_wait_for_the_store(family):
    model = tiny_model(family)
    model.set_experts_implementation(NAME)
    at_once = copy.deepcopy(model)
    tokens, labels = batch_of(0, rows=2)
    loss_fn(at_once(tokens, use_cache=False).logits, labels).backward()
    loss = loss_fn(model(tokens, use_cache=False).logits, labels)
    store = WeightGradStore()
    with store.activate(), store.defer("key"):
        loss.backward()
    experts = experts_of(model)
    stacked = stacked_parameters(experts)
    assert stacked and all(parameter.grad is None for parameter in stacked.values())
    store.run("key")
    for name, parameter in stacked.items():
        assert torch.equal(parameter.grad, getattr(experts_of(at_once), name).grad)


def test_activations_are_recognised_by_what_they_compute():
    qwen = experts_of(tiny_model("qwen3_moe"))
    gpt_oss = experts_of(tiny_model("gpt_oss"))
    assert swiglu_form_of(qwen)[0] is False and swiglu_form_of(gpt_oss) == (True, gpt_oss.alpha, gpt_oss.limit)
    other = copy.deepcopy(qwen)
    other.act_fn = torch.nn.ReLU()
    assert swiglu_form_of(other) is None
    clamped = copy.deepcopy(qwen)  # by a number of a name that nobody knows
    clamped._apply_gate = lambda gate_up: qwen._apply_gate(gate_up.clamp(max=500.0))
    assert swiglu_form_of(clamped) is None


def test_experts_that_nobody_has_any_more_are_freed():
    experts = experts_of(tiny_model("qwen3_moe"))
    swiglu_form_of(experts)
    left = weakref.ref(experts)
    del experts
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("has_post_expert_norm", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
def test_experts_without_a_gate_or_with_a_norm(has_gate, has_post_expert_norm):
    """Forms that the registered families do not have together, against transformers' own batched implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = 4
            width = 12 if has_gate else 6
            name = "gate_up_proj" if has_gate else "up_proj"
            setattr(self, name, torch.nn.Parameter(torch.randn(4, width, 8, dtype=torch.float64)))
            self.down_proj = torch.nn.Parameter(torch.randn(4, 8, 6, dtype=torch.float64))
            self.act_fn = torch.nn.GELU()
            if has_post_expert_norm:
                self.post_expert_norm = torch.nn.RMSNorm(8, dtype=torch.float64)

        def forward(self, x, index, weights):
            raise NotImplementedError

    kind = use_experts_implementation(has_gate=has_gate, has_post_expert_norm=has_post_expert_norm)(Experts)
    experts = kind(SimpleNamespace(_experts_implementation=NAME))
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    results = []
    for name in ("batched_mm", NAME):
        y = ALL_EXPERTS_FUNCTIONS[name](experts, x, index, weights)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, weights, *experts.parameters()])])
    assert max(map(error_of, *results)) < 1e-12


def test_experts_that_transformers_has_sharded_are_refused():
    experts = experts_of(tiny_model("qwen3_moe"))
    experts.config._experts_implementation = NAME
    experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="sharded by transformers' own expert parallelism"):
        experts(torch.zeros(1, 32, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))


@pytest.mark.parametrize("dtype, grad_dtype", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_transposed_weights_have_the_gradients_of_the_others(dtype, grad_dtype):
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    layer = GroupedLinear(3, 4, 6, bias=True, dtype=dtype)
    transposed = torch.nn.Parameter(layer.weight.detach().transpose(1, 2).contiguous())
    bias = torch.nn.Parameter(layer.bias.detach().clone())
    for parameter in (layer.weight, transposed):
        parameter.grad_dtype = grad_dtype
    x = torch.randn(5, 4, dtype=dtype)
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):  # the second time into what is there
        layer(own, ends).square().sum().backward()
        grouped_linear(other, transposed, bias, ends, is_transposed=True).square().sum().backward()
    assert transposed.grad.dtype is grad_dtype and transposed.grad.shape == transposed.shape
    # A matrix that lies the other way is multiplied in another order of additions; bfloat16 rounds its results.
    tolerance = 1e-12 if dtype is torch.float64 else 0.02
    pairs = [(transposed.grad.transpose(1, 2), layer.weight.grad), (bias.grad, layer.bias.grad), (other.grad, own.grad)]
    assert max(error_of(found.double(), expected.double()) for found, expected in pairs) < tolerance


class Adapter(torch.nn.Module):
    """Parametrization of the frozen stacked weights by a trained scale of each expert."""

    def __init__(self, num_experts):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(num_experts, 1, 1, dtype=torch.float64))

    def forward(self, weight):
        return weight * self.scale


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapted_experts_train_their_adapters(family):
    eager = tiny_model(family)
    torch.manual_seed(0)
    for name, parameter in stacked_parameters(experts_of(eager)).items():
        if parameter.dim() == 3:
            parameter.requires_grad_(False)
            torch.nn.utils.parametrize.register_parametrization(experts_of(eager), name, Adapter(len(parameter)))
    ours = copy.deepcopy(eager)
    ours.set_experts_implementation(NAME)
    tokens, labels = batch_of(0, rows=2)
    loss_fn(eager(tokens, use_cache=False).logits, labels).backward()
    store = WeightGradStore()
    loss = loss_fn(ours(tokens, use_cache=False).logits, labels)
    with store.activate(), store.defer("key"):
        loss.backward()
    store.run("key")
    expected = {name: parameter.grad for name, parameter in eager.named_parameters() if "scale" in name}
    found = {name: parameter.grad for name, parameter in ours.named_parameters() if "scale" in name}
    assert len(expected) >= 2 and all(gradient.count_nonzero() for gradient in expected.values())
    assert max(error_of(found[name], gradient) for name, gradient in expected.items()) < 1e-10


def test_torch_func_and_forward_mode_are_refused_with_the_remedy():
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation(NAME)
    tokens, _ = batch_of(0, rows=2)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (tokens,), {"use_cache": False}).logits.sum()

    with pytest.raises(ValueError, match=r"torch.func does not go through Qwen3MoeExperts.*set_experts_implementation"):
        torch.func.grad(loss)(dict(model.named_parameters()))
    experts, x = experts_of(model), torch.randn(3, 32, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ValueError, match="forward_ad does not go through Qwen3MoeExperts"):
            experts(dual, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2, dtype=torch.float64))


# ------------------------------------------------------------------------------------ choice of the implementation


def implementations_of(stages):
    return {module.config._experts_implementation for stage in stages for module in stage.modules()
            if is_interface_experts(module)}


@pytest.mark.parametrize("experts", ["dualpipe", "grouped_mm", "eager"])
def test_the_choice_is_logged_and_trains(experts, caplog):
    with caplog.at_level(logging.INFO, "dualpipe.hf.experts"):
        stages = load_stages(config_of("qwen3_moe"), 2, (0, 1), experts=experts)
    assert f"experts run by '{experts}'" in caplog.text and implementations_of(stages) == {experts}
    pipe = DualPipeV(stages)
    tokens, labels = batch_of(0)
    pipe.step(tokens, num_chunks=4, criterion=loss_fn, labels=(labels,))
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    undeferred = {name for parameter in pipe.deferral_report().parameters if parameter.flops_share
                  for name in [parameter.name] if ".experts." in name}
    assert bool(undeferred) is (experts != "dualpipe"), "only dualpipe defers the weight gradients of experts"


@pytest.mark.parametrize("experts", ["deepgemm", "sonicmoe"])
def test_an_implementation_that_does_not_run_here_is_refused(experts):
    with pytest.raises(ValueError, match=experts):
        load_stages(config_of("qwen3_moe"), 1, (0,), experts=experts, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_an_unknown_implementation_is_refused(family):
    with pytest.raises(ValueError, match="grouped"):
        load_stages(config_of(family), 1, (0,), experts="grouped")


@pytest.mark.parametrize("faster, slower", [
    ("dualpipe", "grouped_mm"), ("grouped_mm", "dualpipe"), ("sonicmoe", "grouped_mm"),
])
def test_the_fastest_one_is_taken_and_logged_with_all_times(faster, slower, caplog, monkeypatch):
    def seconds(run, device, *, num_calls):
        (name,) = run.args[1:]
        if name == "deepgemm":
            raise ImportError("no deepgemm")
        return 0.001 if name == faster else 0.002

    monkeypatch.setattr(pick_fastest, "min_seconds", seconds)
    with caplog.at_level(logging.INFO, "dualpipe.hf.experts"):
        stages = load_stages(config_of("qwen3_moe"), 1, (0,), experts="auto")
    assert implementations_of(stages) == {faster}
    assert f"1 ms by '{faster}'" in caplog.text and f"2 ms by '{slower}'" in caplog.text
    assert "no deepgemm" in caplog.text
    caplog.clear()
    load_stages(config_of("llama"), 1, (0,), experts="auto")
    assert "ms by" not in caplog.text, "a model without experts needs no choice"


def test_implementations_are_measured_at_the_models_shapes():
    stages = load_stages(config_of("qwen3_moe"), 1, (0,), experts="auto")
    assert implementations_of(stages) <= {"dualpipe", "grouped_mm"}
