"""The mean cross-entropy over the labels that count."""

import pytest
import torch
import torch.nn.functional as F

from dualpipe.nn import cross_entropy_loss


def test_cross_entropy_ignores_and_promotes():
    logits, labels = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(7, (2, 5))
    labels[0, :3] = -100
    expected = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    actual = cross_entropy_loss(logits, labels)
    assert actual.dtype is torch.float32
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert cross_entropy_loss(logits.double(), labels).dtype is torch.float64


def test_cross_entropy_without_any_label_is_zero():
    logits = torch.randn(3, 7, requires_grad=True)
    loss = cross_entropy_loss(logits, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


def test_cross_entropy_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"labels have the shape .*, expected \(3,\)"):
        cross_entropy_loss(torch.randn(3, 7), torch.zeros(4, dtype=torch.long))
