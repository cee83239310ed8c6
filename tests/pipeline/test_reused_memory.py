"""Stages and criteria that fill their own memory again, or change what they are given: as in a plain loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualpipe import Compute, Pipeline, PipelineError
from dualpipe.nn import defer_weight_grads
from dualpipe.schedule import Action, Schedule
from ranks import run_ranks
from toys import gradient_error, relative_error

WIDTH = 4
LONG = 1 << 19  # elements that gloo is still sending when the next forward begins
TOLERANCE = 1e-12


class OneBuffer(torch.autograd.Function):
    """Copies its input into `buffer` in the forward, and the gradient into `gradient` in the backward."""

    @staticmethod
    def forward(ctx, x, buffer, gradient):
        ctx.gradient = gradient
        return buffer.copy_(x).data

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradient.copy_(dy).data, None, None


class Refilling(nn.Module):
    """Returns one tensor that needs a gradient and one that needs none, both in memory that every forward fills."""

    def __init__(self, rows, length):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.activation = torch.empty(rows, WIDTH).double()
        self.gradient = torch.empty(rows, WIDTH).double()
        self.register_buffer("features", torch.zeros(rows, length).double())

    def forward(self, x, features=None):
        self.features.copy_(x.detach().sum(1, keepdim=True).expand_as(self.features))
        inner = x if features is None else x + features.mean(1, keepdim=True)
        return OneBuffer.apply(self.linear(inner).tanh(), self.activation, self.gradient), self.features


def square(x, features):
    return (x * features.mean(1, keepdim=True)).square().sum()


def run_refilling(rank, world, schedule, length):
    """Return the error of the losses, outputs and gradients of this rank's stages, against a plain loop."""
    torch.manual_seed(0)
    num_chunks = 6
    per_rank = 1 if schedule == "1f1b" else 2
    stages = [Refilling(2, length) for _ in range(per_rank * world)]
    own = [rank] if per_rank == 1 else [rank, 2 * world - 1 - rank]
    is_last = len(stages) - 1 in own
    plain = copy.deepcopy(stages)
    x = torch.randn(2 * num_chunks, WIDTH).double()
    pipe = Pipeline([stages[i] for i in own], schedule=schedule)
    losses, outputs = pipe.step(*[x] * (0 in own), num_chunks=num_chunks, criterion=square if is_last else None,
                                return_outputs=True)
    expected = []
    for part in x.chunk(num_chunks):
        values = (part,)
        for stage in plain:
            values = stage(*values)
        loss = square(*values)
        loss.backward()
        expected.append((loss.detach().clone(), *(value.detach().clone() for value in values)))
    errors = [gradient_error(stages[i], plain[i]) for i in own]
    if is_last:
        plain_losses, *plain_outputs = zip(*expected)
        errors.append(relative_error(losses, torch.stack(plain_losses)))
        errors += [relative_error(found, torch.cat(parts)) for found, parts in zip(outputs, plain_outputs)]
    return max(errors)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("world", [1, 2])
def test_results_in_memory_that_is_filled_again(world, schedule):
    errors = run_ranks(run_refilling, world, world, schedule, LONG if world > 1 and schedule == "1f1b" else 3)
    assert max(errors) < TOLERANCE


class Scaling(nn.Linear):
    """Scales an input that needs no gradient in place, like images."""

    def forward(self, x):
        return super().forward(x if x.requires_grad else x.div_(255.0))


class Recomputed(nn.Linear):
    def segments(self):
        return [Compute(super().forward, "x", "x", recompute=True)]


def in_place_loss(x, y):
    y[y < 0] = 0.0
    return F.mse_loss(x.div_(2.0), y)


def running_loss():
    """Return a criterion whose result is always the same tensor's memory."""
    total = torch.zeros((), dtype=torch.float64)
    return lambda x, y: OneBuffer.apply(F.mse_loss(x, y), total, torch.zeros_like(total))


class Unchanged(nn.Identity):
    """Takes sizes, as a linear layer does."""


@pytest.mark.parametrize("kinds", [(Scaling, Scaling), (Recomputed, Recomputed), (Scaling, Unchanged)],
                         ids=["modules", "recomputed", "unchanged"])
@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b"])
@pytest.mark.parametrize("make_criterion", [lambda: F.mse_loss, lambda: in_place_loss, running_loss],
                         ids=["plain", "in_place", "running"])
def test_parts_that_are_changed_in_place(kinds, schedule, make_criterion):
    torch.manual_seed(0)
    stages = [defer_weight_grads(kind(WIDTH, WIDTH).double()) for kind in kinds]
    plain = copy.deepcopy(stages)
    x = 100 * torch.randn(8, WIDTH).double()
    y = torch.randn(8, WIDTH).double()
    given = x.clone()
    losses, _ = Pipeline(stages, schedule=schedule).step(
        given, num_chunks=4, criterion=make_criterion(), labels=(y.clone(),))
    assert torch.equal(given, x)
    criterion = make_criterion()
    expected = []
    for part, label in zip(x.clone().chunk(4), y.clone().chunk(4)):
        loss = criterion(plain[1](plain[0](part)), label)
        loss.backward()
        expected.append(loss.detach().clone())
    assert relative_error(losses, torch.stack(expected)) < TOLERANCE
    assert max(map(gradient_error, stages, plain)) < TOLERANCE


class ScalingAgain(Scaling):
    def segments(self):
        return [Compute(self.forward, "x", "x", recompute=True)]


def test_an_input_that_a_recomputed_segment_changes_is_refused():
    with pytest.raises(PipelineError, match="was changed in place after segment 0"):
        Pipeline([ScalingAgain(WIDTH, WIDTH)]).step(torch.ones(4, WIDTH), num_chunks=2, criterion=torch.sum)


class RefillsInput(nn.Module):
    """Has two linear layers; the input of the second, or the gradient of the first's output, is in one buffer."""

    def __init__(self, which):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).double()
        self.second = nn.Linear(WIDTH, WIDTH).double()
        self.memory = {name: torch.empty(2, WIDTH).double() for name in ("activation", "gradient")}
        self.which = which

    def forward(self, x):
        copies = {name: torch.empty_like(buffer) for name, buffer in self.memory.items()}
        copies[self.which] = self.memory[self.which]
        return self.second(KeepsVersion.apply(self.first(x), copies["activation"], copies["gradient"]))


class KeepsVersion(torch.autograd.Function):
    """Like `OneBuffer`, but autograd sees that the memory is filled."""

    @staticmethod
    def forward(ctx, x, buffer, gradient):
        ctx.gradient = gradient
        return buffer.copy_(x).detach()

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradient.copy_(dy).detach(), None, None


@pytest.mark.parametrize("which", ["activation", "gradient"])
def test_an_operand_of_a_deferred_gradient_that_is_filled_again_is_refused(which):
    """A plain loop computes the weight gradient before the next forward fills the buffer."""
    stages = [defer_weight_grads(RefillsInput(which)), nn.Linear(WIDTH, WIDTH).double()]
    order = "0F0 1F0 1I0 1W0 0I0 0F1 1F1 1I1 1W1 0I1 0W0 0W1"
    schedule = Schedule("late", 1, 2, 2, (tuple((Action.read(text),) for text in order.split()),))
    with pytest.raises(PipelineError, match="was changed in place before"):
        Pipeline(stages, schedule=schedule).step(torch.randn(4, WIDTH).double(), num_chunks=2, criterion=torch.sum)
