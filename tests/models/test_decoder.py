"""Attention, experts and layers that the families share."""

import pytest
import torch

from dualpipe.kernels import dispatch_tokens, sort_tokens
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.deferral import WeightGradStore
from models import batch, grads, train, whole
from tiny_models import tiny


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_take_tokens_or_rows_that_are_sorted_already(family):
    experts = whole(tiny(family)).layers["0"].mlp.experts
    generator = torch.Generator().manual_seed(0)
    x_TH, choices = torch.randn(7, 32, generator=generator), torch.randint(6, (7, 2), generator=generator)
    tokens, weight_M = sort_tokens(choices, 6), torch.rand(14, generator=generator)
    rows_MH = dispatch_tokens(x_TH, tokens, 2)
    assert torch.equal(experts(x_TH, tokens, weight_M), experts(rows_MH, tokens.offs, weight_M))


def test_experts_without_tokens_get_zero_gradients():
    config = tiny()
    model = whole(config)
    with torch.no_grad():
        for layer in model.layers.values():
            layer.mlp.gate.weight.zero_()  # equal scores: every token takes the same two experts
    train(model, config)
    for layer in model.layers.values():
        grad = layer.mlp.experts.gate_up_proj.weight.grad
        assert (grad.flatten(1).norm(dim=1) > 0).sum() == 2
        assert grad.isfinite().all()


def test_attention_is_causal():
    config = tiny()
    model = whole(config)
    tokens, _ = batch(config)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % config.vocab_size
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])


@pytest.mark.parametrize("changes", [
    {}, {"attention_bias": True}, {"mlp_only_layers": [0]}, {"tie_word_embeddings": True}], ids=str)
def test_deferred_gradients_are_bitwise_those_of_a_plain_backward(changes):
    config = tiny(**changes)
    plain, deferred, store = whole(config), whole(config), WeightGradStore()
    for micro_batch in range(2):
        train(plain, config)
        with store.activate(), store.defer(micro_batch):
            train(deferred, config)
        assert deferred.get_parameter("layers.1.self_attn.q_proj.weight").grad is None or micro_batch
        store.run(micro_batch)
    assert not store.pending()
    if config.tie_word_embeddings:  # embedding and head: added in another order
        grad = plain.embed_tokens.weight.grad
        torch.testing.assert_close(deferred.embed_tokens.weight.grad, grad)
        plain.embed_tokens.weight.grad = deferred.embed_tokens.weight.grad
    for name, grad in grads(plain).items():
        assert torch.equal(grads(deferred)[name], grad), name


def test_float64_stays_float64_everywhere():
    config = tiny()
    model, seen = whole(config, dtype=torch.float64), set()

    def record(module, inputs, outputs):
        for tensor in (*inputs, *(outputs if isinstance(outputs, tuple) else (outputs,))):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                seen.add((type(module).__name__, tensor.dtype))

    for module in model.modules():
        module.register_forward_hook(record)
    train(model, config)
    assert {dtype for _, dtype in seen} == {torch.float64}
    modules = {"RMSNorm", "Router", "Experts", "GroupedSwiGLU", "GroupedLinear", "GroupedQueryAttention"}
    assert modules <= {name for name, _ in seen}
    # A cast to float32 and back inside a module would escape the hooks, but not the difference quotient of the loss.
    few = {"layers.0.mlp.gate.weight", "layers.2.self_attn.k_norm.weight", "norm.weight"}
    tokens, labels = batch(config)
    for name in few:
        param = model.get_parameter(name)
        direction = torch.randn_like(param)
        slope = (param.grad * direction).sum().item()
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                param.add_(direction, alpha=step)
                losses.append(cross_entropy_loss(model(tokens), labels).item())
                param.sub_(direction, alpha=step)
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-9)
