"""Messages between stages: tensors of any dtypes and shapes, and no memory that is held."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dualpipe import DualPipeV, Pipeline, WeightGradStore
from dualpipe.pipeline import engine
from dualpipe.runtime.ranks.process_groups import new_gloo_group
from ranks import run_ranks
from toys import Stage, gradient_error, make_stages, reference, relative_error, use_own_groups


def run_v(rank, world, make, x, y, num_chunks, steps=1, criterion=F.mse_loss):
    """Train `steps` steps; return the largest gradient error against the reference."""
    stages, expected = make_stages(2 * world, make), make_stages(2 * world, make)
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]))
    for _ in range(steps):
        loss, _ = pipe.step(
            *(x if rank == 0 else ()), num_chunks=num_chunks, criterion=criterion, labels=(y,) if rank == 0 else ()
        )
        losses = []
        for *xs, ys in zip(*(t.tensor_split(num_chunks) for t in (*x, y))):
            for stage in expected:
                xs = stage(*xs)
                xs = xs if isinstance(xs, tuple | list) else (xs,)
            losses.append(criterion(*xs, ys))
            losses[-1].backward()
    if rank == 0:
        assert relative_error(loss, torch.stack(losses).detach()) < 1e-10
    return max(gradient_error(stages[s], expected[s]) for s in (rank, 2 * world - 1 - rank))


class Many(nn.Module):
    """A stage that returns tensors of many dtypes and shapes, with and without gradients."""

    def __init__(self):
        super().__init__()
        self.stage, self.scale = Stage(), nn.Parameter(torch.ones((), dtype=torch.float32))

    def forward(self, x, *rest):
        if not rest:
            mask, ids, empty = x[:, 0] > 0, torch.arange(len(x)), x.new_zeros(0, 4)
            rest = (mask, ids, empty, x.detach().to(torch.bfloat16), x.sum().float(), x.detach().to(torch.float8_e5m2))
        mask, ids, empty, half, scalar, eight = rest
        assert not (mask.requires_grad or ids.requires_grad or half.requires_grad)
        assert mask.dtype == torch.bool and ids.dtype == torch.int64 and eight.dtype == torch.float8_e5m2
        out = self.stage(x) * (1 + mask[:, None]) + half.double() * ids[:, None] + eight.double()
        return out, mask, ids, empty, half, scalar * self.scale, eight


def many_tensors(rank, world, way):
    if way == "own groups":
        use_own_groups()
    if way == "by host":
        engine.P2PMessages = partial(always_by_host, engine.P2PMessages)
    x, y = torch.randn(6, 8).double(), torch.randn(6, 8).double()
    loss = lambda out, mask, ids, empty, half, scalar, eight, y: F.mse_loss(out, y) + scalar.double() ** 2  # noqa: E731
    return run_v(rank, world, Many, (x,), y, 3, steps=2, criterion=loss)


def always_by_host(messages, *args, by_host, **kwargs):
    """Send through host memory, as in the first step on a device."""
    return messages(*args, by_host=True, **kwargs)


@pytest.mark.parametrize("way", ["tags", "own groups", "by host"])
def test_tuples_of_any_dtypes_with_tensors_that_need_no_gradient(way):
    # 1e-6: a float32 scalar is among what flows backward.
    assert max(run_ranks(many_tensors, 2, 2, way, fresh=True)) < 1e-6


class Aliases(nn.Module):
    """A stage that returns its input, a view of it, and one tensor twice."""

    def __init__(self):
        super().__init__()
        self.stage = Stage()

    def forward(self, x, view=None, a=None, b=None):
        out = self.stage(x if view is None else x + view.reshape(x.shape) + a - 0.5 * b)
        return x, x.view(-1), out, out


def aliases(rank, world):
    x, y = torch.randn(6, 8).double(), torch.randn(6, 8).double()
    loss = lambda x, view, a, b, y: F.mse_loss(a + b * x + view.view(x.shape), y)  # noqa: E731
    return run_v(rank, world, Aliases, (x,), y, 3, criterion=loss)


def test_views_of_the_input_and_the_same_tensor_twice():
    for world in (1, 2):
        assert max(run_ranks(aliases, world, world)) < 1e-10


class Partial(nn.Module):
    """A stage that ignores one of its inputs, and is frozen on request."""

    def __init__(self):
        super().__init__()
        self.used, self.ignored = Stage(), Stage()

    def forward(self, x, ignored=None):
        return self.used(x), self.ignored(x)


def ignored_inputs(rank, world):
    x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    stages, expected = make_stages(2 * world, Partial), make_stages(2 * world, Partial)
    for model in (stages, expected):
        model[0].requires_grad_(False)  # then nothing flows back to the first stage
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]))
    pipe.step(x if rank == 0 else None, num_chunks=2, criterion=lambda a, b, y: F.mse_loss(a, y), labels=(y,))
    for xs, ys in zip(x.chunk(2), y.chunk(2)):
        for stage in expected:
            xs, _ = stage(xs)
        F.mse_loss(xs, ys).backward()
    worst = 0.0
    for stage in (rank, 2 * world - 1 - rank):
        for a, b in zip(stages[stage].parameters(), expected[stage].parameters()):
            if b.grad is None:  # an ignored output: no gradient, or zeros where they had to cross a rank
                assert a.grad is None or not a.grad.any()
            else:
                worst = max(worst, relative_error(a.grad, b.grad))
    return worst


def test_ignored_outputs_and_a_frozen_first_stage():
    assert max(run_ranks(ignored_inputs, 2, 2)) < 1e-10


class Uneven(Stage):
    """A last stage whose outputs differ in number from one micro-batch to the next."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        out = super().forward(x)
        return out if self.calls % 2 else (out, out)


def timeouts(rank):
    """Return the timeouts of all groups that a pipeline creates: for links, and for host records."""
    use_own_groups()
    stages = make_stages(4)
    pipe = DualPipeV((stages[rank], stages[3 - rank]))
    groups = [link.group for link in pipe._p2p._links.values()]
    assert len({id(group) for group in (*groups, dist.group.WORLD)}) == 5, "two links in each direction"
    groups += [new_gloo_group(dist.group.WORLD)]
    dist.barrier()  # a rank that ended now would end the connections of one that is still making them
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_the_groups_of_a_pipeline_have_the_timeout_of_the_callers():
    """torch's default of half an hour would hide a rank that hangs."""
    for found in run_ranks(timeouts, 2, group_timeout=17, fresh=True):
        assert found == [17.0] * 5


def uneven_outputs(rank, world):
    stages = make_stages(2 * world, Stage)
    stages[-1] = make_stages(1, Uneven)[0]
    pipe = DualPipeV([stages[rank], stages[2 * world - 1 - rank]])
    x = torch.randn(4, 8).double()
    try:
        with torch.no_grad():
            pipe.step(x if rank == 0 else None, num_chunks=4, return_outputs=True)
    except Exception as error:
        return type(error).__name__


def test_outputs_that_cannot_be_joined_raise_on_every_rank():
    assert run_ranks(uneven_outputs, 2, 2) == ["PipelineError", "PipelineError"]


def autocast_around_a_step(rank):
    """Run backwards outside of the caller's autocast, as with an unpipelined model."""
    stages, expected = [make_stages(2, lambda: Stage(dtype=torch.float32), defer=False) for _ in range(2)]
    x = torch.randn(4, 8)
    pipe = DualPipeV(stages)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=x)
    for part in x.chunk(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(expected[1](expected[0](part)), part)
        loss.backward()
    return max(gradient_error(a, b) for a, b in zip(stages, expected))


def test_backwards_are_outside_of_autocast():
    # One micro-batch's gradients are equal; two are added in another order.
    assert run_ranks(autocast_around_a_step, 1)[0] < 1e-6


# -- memory

ROWS, WIDTH = 7, 12  # no other tensor has this shape


class Probe(Stage):
    """A stage that counts the live storages of boundary shape when it runs."""

    def __init__(self):
        super().__init__(WIDTH)
        self.most = 0

    def forward(self, x):
        alive = {
            t.untyped_storage().data_ptr() for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and t.shape == (ROWS, WIDTH) and t.untyped_storage().nbytes() == x.nbytes
        }
        self.most = max(self.most, len(alive))
        return x + self.down(torch.tanh(self.up(x)))  # keeps nothing of this shape but its input


def live_boundaries(rank, world, num_chunks):
    gc.freeze()  # all that exists by now is not looked at again
    stages = make_stages(2 * world, Probe)
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]))
    x = torch.randn(ROWS * num_chunks, WIDTH).double()
    args = (x if rank == 0 else None,)
    kwargs = dict(num_chunks=num_chunks, criterion=F.mse_loss, labels=(x,) if rank == 0 else ())
    pipe.step(*args, **kwargs)
    return max(module.most for module in pipe.module)


def test_boundary_memory_does_not_grow_with_the_number_of_microbatches():
    world = 3
    few = run_ranks(live_boundaries, world, world, 8)[1]
    many = run_ranks(live_boundaries, world, world, 24)[1]
    # 2P+1 stages may be live, each keeps its input. Of the four links in each direction, one receive is posted ahead
    # and two sends may be in flight; the rest is what the running action holds.
    assert 0 < many <= (2 * world + 1) + 4 * (1 + 2) + 2, many
    assert many == few


def leftovers(rank, world, failing):
    """Return the tensors other than gradients that live after a step and not before it."""
    stages = make_stages(2 * world, Stage)
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]))
    x = torch.randn(12, 8).double()
    args = (x if rank == 0 else None,)
    kwargs = dict(num_chunks=6, criterion=F.mse_loss, labels=(x,) if rank == 0 else ())

    def fail(*_):
        raise RuntimeError("boom")

    def tensors():
        return {id(t): t for t in gc.get_objects() if isinstance(t, torch.Tensor)}

    def step():
        try:
            pipe.step(*args, **kwargs)
        except RuntimeError:
            assert failing

    pipe.step(*args, **kwargs)
    gc.collect()
    gc.freeze()
    gc.disable()  # nothing may wait for the collector of cycles
    before = tensors()
    if failing and rank == world - 1:
        pipe.module[1].register_forward_pre_hook(fail)
    step()
    gradients = {id(p.grad) for p in pipe.parameters()}  # whoever asks for one first makes an object of it
    return [tuple(t.shape) for i, t in tensors().items() if i not in before and i not in gradients]


def test_nothing_is_held_between_steps():
    for failing in (False, True):
        assert run_ranks(leftovers, 2, 2, failing, fresh=failing) == [[], []]


class Accumulating(torch.autograd.Function):
    """A linear that adds its deferred gradient like DeepSeek's example, which records a graph in grad mode."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad

        def add():
            weight.grad += dy.T @ x

        WeightGradStore.current().put(add)
        return dy @ weight, None


class OwnLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x):
        return Accumulating.apply(x, self.weight)


def own_deferral(rank):
    torch.manual_seed(0)
    pipe = DualPipeV([OwnLinear(), OwnLinear()], schedule="zbv")
    x = torch.randn(6, 8).double()
    counts = []
    for _ in range(4):
        pipe.step(x, num_chunks=3, criterion=F.mse_loss, labels=x)
        gc.collect()
        counts.append(sum(isinstance(t, torch.Tensor) for t in gc.get_objects()))
    return counts, any(p.grad.requires_grad for p in pipe.parameters())


def test_deferred_closures_run_without_recording_a_graph():
    ((counts, recorded),) = run_ranks(own_deferral, 1)
    assert len(set(counts)) == 1 and not recorded, counts


def released_storage(rank, world):
    """Check that the storage of the first stage's output is freed after its send, while the graph stays."""
    import weakref

    class Keeper(Stage):
        def __init__(self):
            super().__init__()
            self.alive = []

        def forward(self, x):
            out = super().forward(x)
            self.alive.append(weakref.ref(out))
            self.peak = max(getattr(self, "peak", 0), sum(r() is not None for r in self.alive))
            return out

    stages = make_stages(2 * world, Keeper)
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]))
    x = torch.randn(24, 8).double()
    pipe.step(x if rank == 0 else None, num_chunks=24, criterion=F.mse_loss, labels=(x,) if rank == 0 else ())
    return max(module.peak for module in pipe.module)


def test_sent_activations_are_released():
    # Sent tensors are detached: only the one that is being made is alive as an output.
    assert max(run_ranks(released_storage, 2, 2)) <= 3


def without_process_group(rank):
    import torch.distributed as dist

    dist.destroy_process_group()
    stages, expected = make_stages(2), make_stages(2)
    x = torch.randn(6, 8).double()
    loss, _ = DualPipeV(stages).step(x, num_chunks=3, criterion=F.mse_loss, labels=(x,))
    one = make_stages(1)
    Pipeline(one).step(x, num_chunks=3, criterion=F.mse_loss, labels=(x,))
    losses, _ = reference(expected, x, x, 3)
    return torch.equal(loss, losses)


def test_one_rank_needs_no_process_group():
    assert run_ranks(without_process_group, 1, fresh=True) == [True]
