"""The arguments of `step`: torch's names, DeepSeek's, side inputs as keywords; and the modes in which it is called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualpipe import DualPipeV
from ranks import run_ranks

X = torch.arange(32.0).view(8, 4) / 32
Y = torch.ones(8, 4)


class Shifted(nn.Module):
    """A linear layer whose input is shifted by a side input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x, shift=None):
        return self.linear(x if shift is None else x + shift)


def run(*inputs, **arguments):
    pipe = DualPipeV([Shifted(), Shifted()])
    loss, _ = pipe.step(*inputs, **arguments)
    return [loss, *[parameter.grad for parameter in pipe.parameters()]]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_names_of_torch_and_of_deepseek_are_the_same_arguments():
    deepseek = run(X, num_chunks=4, criterion=F.mse_loss, labels=(Y,))
    assert same(run(X, num_microbatches=4, loss_fn=F.mse_loss, target=Y), deepseek)
    assert same(run(X, num_microbatches=4, loss_fn=F.mse_loss, labels=[Y]), deepseek)


def test_side_inputs_are_keywords():
    shift = torch.full((8, 1), 0.5)
    arguments = dict(num_microbatches=4, loss_fn=F.mse_loss, target=Y)
    by_mapping = run(X, side={"shift": shift}, **arguments)
    assert same(run(X, shift=shift, **arguments), by_mapping)
    assert not same(run(X, **arguments), by_mapping) and same(run(X, shift=None, **arguments), run(X, **arguments))


def test_a_step_under_inference_mode_trains_only_where_gradients_are_enabled():
    usual = run(X, num_chunks=4, criterion=F.mse_loss, labels=Y)
    pipe = DualPipeV([Shifted(), Shifted()])
    with torch.inference_mode():
        evaluated, _ = pipe.step(X, num_chunks=4, criterion=F.mse_loss, labels=Y)
    assert torch.equal(evaluated, usual[0]) and all(parameter.grad is None for parameter in pipe.parameters())
    with torch.inference_mode(), torch.enable_grad():
        loss, _ = pipe.step(X, num_chunks=4, criterion=F.mse_loss, labels=Y)
    assert same([loss, *[parameter.grad for parameter in pipe.parameters()]], usual)


def test_a_step_leaves_the_grad_mode_as_it_was():
    def loss_fn(y, target):
        loss = F.mse_loss(y, target)
        torch.set_grad_enabled(False)
        return loss

    run(X, num_chunks=1, criterion=loss_fn, labels=Y)
    assert torch.is_grad_enabled()


def test_micro_batches_keep_the_memory_format_of_the_batch():
    strides = []

    class Seen(nn.Linear):
        def forward(self, x):
            strides.append(x.stride())
            return super().forward(x)

    x = torch.randn(4, 8).t()
    DualPipeV([Seen(4, 4), nn.Linear(4, 4)]).step(x, num_chunks=4, criterion=F.mse_loss, labels=Y)
    assert strides == [(1, 2)] * 4


@pytest.mark.parametrize("arguments, message", [
    (dict(num_chunks=4), "num_microbatches and num_chunks"),
    (dict(criterion=F.mse_loss), "loss_fn and criterion"),
    (dict(labels=Y), "target and labels"),
    (dict(shift=Y, side={"shift": Y}), "shift"),
    (dict(num_chunk=4), "'num_chunk'"),
    (dict(shifted=Y), "shifted"),
])
def test_what_is_passed_twice_or_unknown_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(X, num_microbatches=4, loss_fn=F.mse_loss, target=Y, **arguments)


def one_passes_both_names(rank):
    pipe = DualPipeV([Shifted(), Shifted()])
    first = rank == 0
    arguments = dict(num_microbatches=4, loss_fn=F.mse_loss, target=Y) if first else dict(num_microbatches=4)
    with pytest.raises(ValueError) as raised:
        pipe.step(*(X,) * first, **arguments, **(dict(num_chunks=4) if rank else {}))
    pipe.step(*(X,) * first, **arguments)  # the pipeline can be used again
    return str(raised.value)


def test_all_ranks_hear_of_a_mistake_on_one():
    for text in run_ranks(one_passes_both_names, 2):
        assert "rank 1: got num_microbatches and num_chunks" in text


