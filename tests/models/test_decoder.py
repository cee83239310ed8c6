"""Attention, experts and layers that the families share."""

import pytest
import torch

from dualpipe.kernels import dispatch_tokens, sort_tokens
from dualpipe.models import build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import cross_entropy_loss
from dualpipe.parallel.experts import dispatcher
from dualpipe.pipeline import Pipeline
from models import batch, train, whole
from tiny_qwen3 import tiny


def test_experts_take_tokens_or_rows_that_are_sorted_already(monkeypatch):
    """Both ways have the same bits, and tokens are not copied to their rows on the way."""
    experts, copied = whole(tiny()).layers["0"].mlp.experts, []
    generator = torch.Generator().manual_seed(0)
    x_TH, choices = torch.randn(7, 32, generator=generator), torch.randint(6, (7, 2), generator=generator)
    tokens, weight_M = sort_tokens(choices, 6), torch.rand(14, generator=generator)
    rows_MH = dispatch_tokens(x_TH, tokens, 2)
    assert torch.equal(experts(x_TH, tokens, weight_M), experts(rows_MH, tokens.offs, weight_M))
    real = dispatcher.dispatch_tokens
    monkeypatch.setattr(dispatcher, "dispatch_tokens", lambda x, *rest: copied.append(x.shape[1]) or real(x, *rest))
    train(whole(tiny()), tiny())
    assert set(copied) == {1}  # the routing weights


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


@pytest.mark.parametrize("rules", [(), ("attention",), ("experts:1-2", "norms"), ("layer",)], ids=str)
def test_segments_have_the_bits_of_the_forward(rules):
    config = tiny(mlp_only_layers=[1])
    (plain,), (cut,) = build_stages(config, 1), build_stages(config, 1)
    for model in (plain, cut):
        model.init_weights(0)
    cut.recompute = Recompute(rules)
    tokens = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = cross_entropy_loss(plain(tokens), tokens)
    loss.backward()
    pipe = Pipeline([cut], schedule="1f1b")
    losses, _ = pipe.step(tokens, num_chunks=1, criterion=cross_entropy_loss, labels=(tokens,))
    assert torch.equal(losses[0], loss)
    for (name, p), q in zip(cut.named_parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad), name
