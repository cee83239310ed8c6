"""Errors on one rank raise on every rank and name their cause.

After a mistake in the arguments the pipeline can be used again. A failure ends the process groups of the step: another
pipeline over new groups works.
"""

import copy
import os
import pickle
import signal
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel

import dualpipe
from dualpipe import Compute, DualPipeV, Pipeline, PipelineError, WeightGradStore
from dualpipe.pipeline import engine
from dualpipe.schedule import Action, Schedule, build
from ranks import run_ranks
from toys import Stage, caught, gradient_error, make_stages, reference

WORLD, CHUNKS = 2, 5


def good_arguments(rank):
    torch.manual_seed(1)
    x, y = torch.randn(10, 8).double(), torch.randn(10, 8).double()
    if rank > 0:
        return (), dict(num_chunks=CHUNKS)
    return (x,), dict(num_chunks=CHUNKS, criterion=F.mse_loss, labels=(y,))


def build_pipe(rank, world, make=Stage, **options):
    """Return a pipeline over a new process group, which a failed step ends."""
    stages = make_stages(2 * world, make)
    if world > 1:
        options = {"process_group": dist.new_group(list(range(world)))} | options
    return DualPipeV((stages[rank], stages[2 * world - 1 - rank]), **options), stages


def assert_works(pipe, rank, world, make=Stage):
    """Check that a step has the correct gradients, and leaves nothing in the store."""
    for module in pipe.module:
        module.zero_grad()
    inputs, kwargs = good_arguments(rank)
    pipe.step(*inputs, **kwargs)
    expected = make_stages(2 * world, make)
    (x,), full = good_arguments(0)
    reference(expected, x, full["labels"][0], CHUNKS)
    for module, stage in zip(pipe.module, (rank, 2 * world - 1 - rank)):
        assert gradient_error(module, expected[stage]) < 1e-10
    assert pipe.weight_grad_store.pending() == {}


# -- arguments

X = torch.zeros(10, 8, dtype=torch.float64)
ARGUMENTS = {
    # mistake: (rank that makes it, inputs or None to keep, changed keywords, what every rank must be told)
    "zero chunks": (1, None, dict(num_chunks=0), "rank 1: num_microbatches"),
    "fractional chunks": (0, None, dict(num_chunks=2.5), "rank 0: num_microbatches"),
    "ranks disagree": (1, None, dict(num_chunks=4), "ranks disagree about num_chunks: by rank [5, 4]"),
    "no criterion": (0, None, dict(criterion=None), "rank 0: got no loss_fn"),
    "no inputs": (0, (), {}, "rank 0: got no inputs"),
    "none as input": (0, (None,), {}, "rank 0: got no inputs"),
    "not a tensor": (0, ([1.0, 2.0],), {}, "got list"),
    "label not a tensor": (0, None, dict(labels=(3.0,)), "rank 0: label 0"),
    "small batch": (0, (X[:3],), {}, "[3, 8]"),
    "few labels": (0, None, dict(labels=(X[:6],)), "labels 6"),
    "inputs differ": (0, (X, X[:7]), {}, "[[10, 8], [7, 8]]"),
    "scalar input": (0, (torch.tensor(1.0),), {}, "rank 0: input 0 of shape []"),
    "wrong device": (0, (X.to("meta"),), {}, "rank 0: input 0 is on meta"),
    "shapes disagree": (1, (X[:, :4],), {}, "ranks disagree about the shapes of the inputs"),
}


def argument_mistakes(rank, world):
    pipe, _ = build_pipe(rank, world)
    told = {}
    for name, (culprit, inputs, changes, _) in ARGUMENTS.items():
        args, kwargs = good_arguments(rank)
        if rank == culprit:
            args, kwargs = args if inputs is None else inputs, kwargs | changes
        told[name] = caught(lambda args=args, kwargs=kwargs: pipe.step(*args, **kwargs))[:2]
    assert_works(pipe, rank, world)
    return told


def test_argument_mistakes_raise_on_every_rank():
    for told in run_ranks(argument_mistakes, WORLD, WORLD):
        for name, (*_, expected) in ARGUMENTS.items():
            assert told[name][0] == "ValueError" and expected in told[name][1], (name, told[name])


class Planted(RuntimeError):
    pass


class Unable(Stage):
    """A stage whose `segments()` raises."""

    fails = False

    def segments(self):
        if self.fails:
            raise Planted("no segments")
        return [Compute(self.forward, "x", "x")]


    def segments_key(self):
        return self.fails


def other_errors(rank, world):
    """Return the error of a failure on rank 1, no ValueError, before a step, and check a step after it."""
    told = []
    with mock.patch.object(Unable, "fails", rank == 1):
        told.append(caught(lambda: build_pipe(rank, world, Unable)))
    pipe, _ = build_pipe(rank, world, Unable)
    args, kwargs = good_arguments(rank)
    for module in pipe.module if rank == 1 else ():
        module.fails = True
    told.append(caught(lambda: pipe.step(*args, **kwargs)))
    for module in pipe.module:
        module.fails = False
    with mock.patch.object(engine, "split_batch", side_effect=MemoryError if rank == 1 else engine.split_batch):
        told.append(caught(lambda: pipe.step(*args, **kwargs)))
    assert_works(pipe, rank, world)
    return told


def test_errors_of_other_types_before_a_step_raise_on_every_rank():
    for told in run_ranks(other_errors, WORLD, WORLD, group_timeout=40, fresh=True):
        texts = ["Planted: no segments", "Planted: no segments", "MemoryError"]
        for (kind, text, seconds), expected in zip(told, texts, strict=True):
            assert kind == "ValueError" and f"rank 1: {expected}" in text and seconds < 20


def failing_to_agree(rank, world):
    """Return the error, and its time, if rank 1 cannot read the records at the beginning of a step."""
    pipe, _ = build_pipe(rank, world)
    args, kwargs = good_arguments(rank)
    if rank == 1:
        pipe._ranks.compare = mock.Mock(side_effect=MemoryError)
    return caught(lambda: pipe.step(*args, **kwargs))


def test_no_rank_waits_for_one_that_cannot_read_the_records():
    for kind, text, seconds in run_ranks(failing_to_agree, WORLD, WORLD, group_timeout=40):
        assert (kind, text) == ("PipelineError", "rank 1: MemoryError: ") and seconds < 20


def test_a_mistake_of_all_ranks_is_reported_once():
    for kind, text, _ in run_ranks(left_out, 3, 3):
        assert kind == "ValueError" and text.startswith("ranks 0-2: num_microbatches")


def left_out(rank, world):
    pipe, _ = build_pipe(rank, world)
    return caught(lambda: pipe.step(X))


def test_a_pipeline_is_not_called():
    with pytest.raises(ValueError, match="call step"):
        Pipeline(make_stages(1))(X)


def test_the_missing_name_of_deepseek_names_its_replacement():
    with pytest.raises(ImportError, match="use DualPipeV"):
        from dualpipe import DualPipe  # noqa: F401
    with pytest.raises(AttributeError, match="use DualPipeV"):
        _ = dualpipe.DualPipe
    assert not hasattr(dualpipe, "DualPipe")


def mode_mistakes(rank, world):
    pipe, _ = build_pipe(rank, world)
    args, kwargs = good_arguments(rank)
    told = []
    pipe.module[1].train(rank == 0)
    told.append(caught(lambda: pipe.step(*args, **kwargs)))
    pipe.module[1].train()
    with torch.set_grad_enabled(rank == 0):
        told.append(caught(lambda: pipe.step(*args, **kwargs)))
    if rank == 1:
        pipe.module[0].to("meta")
    told.append(caught(lambda: pipe.step(*args, **kwargs)))
    return told


def test_ranks_that_disagree_about_modes_or_move_their_modules():
    for train, grad, device in run_ranks(mode_mistakes, WORLD, WORLD):
        assert train[:1] == ("ValueError",) and "train/eval mode" in train[1]
        assert grad[:1] == ("ValueError",) and "ranks disagree about grad mode: by rank [True, False]" in grad[1]
        assert device[:1] == ("ValueError",) and "rank 1: a stage is on meta" in device[1]


def construction_mistakes(rank, world):
    """Return what each mistake, of rank 1 or of all, raised, beside the words that it should have."""
    stages = make_stages(2)
    one = rank == 1
    fixed = DualPipeV(stages, schedule=build("dualpipev", 2, 3))
    args, kwargs = good_arguments(rank)
    attempts = [
        ("rank 1 has 1 modules", lambda: DualPipeV(stages[:1] if one else stages)),
        ("rank 1: modules must be", lambda: DualPipeV((stages[0], None) if one else stages)),
        ("rank 1: modules must be", lambda: DualPipeV(None if one else stages)),
        ("rank 1: one module comes twice", lambda: DualPipeV(stages[:1] * 2 if one else stages)),
        ("'meta'", lambda: DualPipeV((stages[0], nn.Linear(2, 2, device="meta")) if one else stages)),
        ("ranks disagree", lambda: DualPipeV(stages, schedule="zbv" if one else "dualpipev")),
        ("dualpipev", lambda: DualPipeV(stages, schedule="dualpipv")),
        ("placed in a V", lambda: DualPipeV(stages, schedule="interleaved_1f1b")),
        ("rank 1: rank_mapping", lambda: DualPipeV(stages, rank_mapping=[0, 0] if one else [0, 1])),
        ("rank 1: rank_mapping", lambda: DualPipeV(stages, rank_mapping=3 if one else None)),
        ("ranks disagree", lambda: DualPipeV(stages, rank_mapping=[1, 0] if one else [0, 1])),
        ("tie_word_embeddings", lambda: Pipeline(with_config(make_stages(1), True, rank=rank))),
        ("rank 0: tie_word_embeddings", lambda: DualPipeV(with_config(make_stages(2), True))),
        ("ranks disagree", lambda: DualPipeV(stages, batch_dim=rank)),
        ("for 3 ranks, got 2", lambda: DualPipeV(stages, schedule=build("dualpipev", 3, 6))),
        ("cut", lambda: Pipeline(stages[:1], schedule=without_last_step(build("1f1b", 2, 3)))),
        ("for 3 micro-batches, got 5", lambda: fixed.step(*args, **kwargs)),
    ]
    Pipeline(with_config(make_stages(1), True, 3, rank))  # no head, as transformers' before 5 say
    return [(words, *caught(attempt)[:2]) for words, attempt in attempts]


def with_config(stages, tied, vocab_size=16, rank=None):
    """Return the stages of one of two ranks: an embedding of 16 words, or a head of `vocab_size`."""
    for number, stage in enumerate(stages if rank is None else [None] * rank + stages):
        if stage is not None:
            stage.config = SimpleNamespace(tie_word_embeddings=tied)
            stage.ends = nn.Linear(4, vocab_size) if number else nn.Embedding(16, 4)
    return stages


def without_last_step(schedule):
    return Schedule(
        "cut", schedule.num_ranks, schedule.num_stages, schedule.num_microbatches,
        tuple(steps[:-1] if r == 0 else steps for r, steps in enumerate(schedule.ranks)),
    )


def test_construction_mistakes_raise_on_every_rank():
    for told in run_ranks(construction_mistakes, WORLD, WORLD):
        for words, kind, text in told:
            assert kind == "ValueError" and words in text, (words, kind, text)


# -- failures in the middle of a step


class Bomb(torch.autograd.Function):
    """Identity whose forward, backward or deferred weight gradient raises on request."""

    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.owner.tick("backward")
        WeightGradStore.current().put(lambda: ctx.owner.tick("weight"))
        return grad, None


class Fragile(nn.Module):
    """A `Stage` that fails at the n-th forward, backward or weight gradient after `armed` is set."""

    def __init__(self):
        super().__init__()
        self.stage, self.armed = Stage(), {}

    def tick(self, what):
        if what in self.armed:
            self.armed[what] -= 1
            if self.armed[what] < 0:
                raise ZeroDivisionError(f"boom in {what}")

    def forward(self, x):
        self.tick("forward")
        return Bomb.apply(self.stage(x), self)


FAILURES = [  # rank, stage of the rank, what fails, and the calls before that
    (0, 0, "forward", 0), (1, 1, "forward", 0), (2, 0, "forward", 3), (0, 1, "forward", 3),
    (0, 1, "backward", 0), (2, 0, "backward", 0), (1, 0, "backward", 3), (2, 1, "backward", 3),
    (0, 1, "weight", 0), (1, 1, "weight", 2), (2, 1, "weight", 2),
]


def failing_stage(rank, world):
    args, kwargs = good_arguments(rank)
    told = []
    for culprit, half, what, count in FAILURES:
        pipe, _ = build_pipe(rank, world, Fragile)
        if rank == culprit:
            pipe.module[half].armed = {what: count}
        told.append(caught(lambda pipe=pipe: pipe.step(*args, **kwargs)))
        assert pipe.weight_grad_store.pending() == {}
        kind, text, seconds = caught(lambda pipe=pipe: pipe.step(*args, **kwargs))
        assert kind == "PipelineError" and text.endswith(told[-1][1]) and seconds < 1, text
        pipe.module[half].armed = {}
        again = DualPipeV(tuple(pipe.module), process_group=dist.new_group(list(range(world))))
        assert_works(again, rank, world, Fragile)
    return told


def test_a_stage_that_raises_stops_every_rank_and_a_new_pipeline_of_the_same_stages_works():
    world = 3
    for told in run_ranks(failing_stage, world, world):
        for (culprit, half, what, _), (kind, text, seconds) in zip(FAILURES, told):
            stage = culprit if half == 0 else 2 * world - 1 - culprit
            assert kind == "PipelineError", (kind, text)
            assert text.startswith(f"rank {culprit}: {stage}") and f"ZeroDivisionError: boom in {what}" in text
            assert f"of stage {stage}, micro-batch" in text and seconds < 10


def failing_criterion(rank, world):
    args, kwargs = good_arguments(rank)
    criteria = {
        "takes more": lambda out, y, z: F.mse_loss(out, y),
        "not scalar": lambda out, y: (out - y) ** 2,
        "no gradient": lambda out, y: F.mse_loss(out.detach(), y),
        "nothing": lambda out, y: None,
    }
    told = {}
    for name, criterion in criteria.items():
        pipe, _ = build_pipe(rank, world)
        changed = kwargs | dict(criterion=criterion) if rank == 0 else kwargs
        told[name] = caught(lambda pipe=pipe, changed=changed: pipe.step(*args, **changed))[:2]
    return told


def test_a_bad_criterion_raises_on_every_rank():
    for told in run_ranks(failing_criterion, WORLD, WORLD):
        assert {kind for kind, _ in told.values()} == {"PipelineError"}
        assert "TypeError" in told["takes more"][1] and "missing 1 required positional" in told["takes more"][1]
        assert "criterion must return a scalar tensor, got [2, 8]" in told["not scalar"][1]
        assert "the loss requires no gradient" in told["no gradient"][1]
        assert "criterion must return a scalar tensor, got NoneType" in told["nothing"][1]


class Odd(Stage):
    """A stage with invalid outputs, or outputs whose shapes change."""

    mode = "good"

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        out = super().forward(x)
        return {
            "good": out,
            "none": None,
            "empty": (),
            "dict": {"x": out},
            "mixed": (out, 3),
            "sparse": (out, torch.eye(3).to_sparse()),
            "meta": (out, torch.empty(3, device="meta")),
            "many": (out,) * 400,
            "shape": out if self.calls < 3 else out[:, :4],
            "dtype": out if self.calls < 3 else out.float(),
            "detached": out if self.calls < 3 else out.detach(),
        }[self.mode]


OF_ANY_STAGE = {"none": "NoneType", "empty": "empty tuple", "dict": "dict", "mixed": "'int'",
                "shape": "float64[2, 4]", "dtype": "float32[2, 8]", "detached": "without grad"}
OF_SENT = {"sparse": "sparse_coo", "meta": "on meta", "many": "8192"}


def odd_outputs(rank, world, words):
    """Check that outputs of rank 0 are refused on every rank."""
    args, kwargs = good_arguments(rank)
    for mode, word in words.items():
        pipe, _ = build_pipe(rank, world, Odd)
        if rank == 0:
            pipe.module[0].mode = mode
        kind, text, _ = caught(lambda pipe=pipe: pipe.step(*args, **kwargs))
        assert kind == "PipelineError" and "rank 0: 0F" in text and word in text, (mode, text)


def test_outputs_that_cannot_cross_ranks():
    run_ranks(odd_outputs, WORLD, WORLD, OF_ANY_STAGE | OF_SENT)


def test_outputs_that_stay_on_their_rank_are_checked_like_sent_ones():
    odd_outputs(0, 1, OF_ANY_STAGE)


def test_a_lone_rank_works_again_after_invalid_outputs():
    pipe, _ = build_pipe(0, 1, Odd)
    args, kwargs = good_arguments(0)
    pipe.module[0].mode = "shape"
    with pytest.raises(PipelineError):
        pipe.step(*args, **kwargs)
    pipe.module[0].mode = "good"
    assert_works(pipe, 0, 1)


def test_stages_that_are_detached_in_every_micro_batch_are_not_refused():
    pipe, _ = build_pipe(0, 1, Odd)
    args, kwargs = good_arguments(0)
    pipe.module[0].mode, pipe.module[0].calls = "detached", 3
    pipe.step(*args, **kwargs)
    assert pipe.module[0].up.weight.grad is None and pipe.module[1].up.weight.grad is not None


class InPlace(Stage):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


def in_place(rank, world):
    pipe, _ = build_pipe(rank, world, InPlace)
    args, kwargs = good_arguments(rank)
    return caught(lambda: pipe.step(*args, **kwargs))[:2]


def test_the_error_of_an_in_place_operation_has_a_remedy():
    for kind, text in run_ranks(in_place, WORLD, WORLD):
        assert kind == "PipelineError" and "in-place" in text and "x = x + 1" in text


def test_ends_that_say_that_they_are_tied_and_are():
    DualPipeV(with_config(make_stages(2), True, 3))
    stages = with_config(make_stages(2), True)
    stages[1].ends.weight = stages[0].ends.weight
    DualPipeV(stages)
    DualPipeV(with_config(make_stages(2), False))
    Pipeline(with_config(make_stages(1), True))


class Speechless(Exception):
    """An error without a text."""

    def __str__(self):
        raise RuntimeError("no words")


class Interrupted(Stage):
    """A stage that raises an error."""

    error = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return super().forward(x)


def unusual_errors(rank, world):
    args, kwargs = good_arguments(rank)
    told = []
    for error in (RuntimeError("\U0001f600" * 2000), Speechless(), KeyboardInterrupt(), SystemExit(3)):
        pipe, _ = build_pipe(rank, world, Interrupted)
        pipe.module[0].error = error if rank == 1 else None
        try:
            pipe.step(*args, **kwargs)
        except BaseException as raised:
            told.append((type(raised).__name__, str(raised)[:200]))
    return told


def test_errors_that_are_long_wordless_or_interrupts():
    first, second = run_ranks(unusual_errors, WORLD, WORLD)
    assert [kind for kind, _ in first] == ["PipelineError"] * 4
    assert [kind for kind, _ in second] == ["PipelineError", "PipelineError", "KeyboardInterrupt", "SystemExit"]
    for (_, text), name in zip(first, ["RuntimeError: \U0001f600", "Speechless", "KeyboardInterrupt", "SystemExit"]):
        assert text.startswith("rank 1: 1F0") and name in text


class Unfreezing(Stage):
    """A stage that requires a gradient of an input that came without one, as some adapters do."""

    def forward(self, x):
        return super().forward(x.requires_grad_())


def unfreezing(rank, world):
    stages = make_stages(2 * world, Unfreezing)
    stages[0] = stages[0].requires_grad_(False)
    stages[0].forward = lambda x: Stage.forward(stages[0], x)
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]))
    args, kwargs = good_arguments(rank)
    return caught(lambda: pipe.step(*args, **kwargs))


def test_a_stage_that_asks_for_more_gradients_than_were_agreed():
    for kind, text, _ in run_ranks(unfreezing, WORLD, WORLD):
        assert (kind, text) == ("nothing", "")


class Forgetful(Stage):
    """A stage that defers a weight gradient under a key without a "W"."""

    def forward(self, x):
        store = WeightGradStore.current()
        with store.defer("mine"):
            store.put(lambda: None)
        return super().forward(x)


def forgotten_queue(rank, world):
    pipe, _ = build_pipe(rank, world, Forgetful if rank == 1 else Stage)
    args, kwargs = good_arguments(rank)
    told = caught(lambda: pipe.step(*args, **kwargs))
    return told, pipe.weight_grad_store.pending()


def test_a_forgotten_weight_gradient_is_an_error():
    for (kind, text, _), pending in run_ranks(forgotten_queue, WORLD, WORLD):
        assert kind == "PipelineError" and "rank 1" in text and "never computed" in text and "mine" in text
        assert pending == {}


def test_a_schedule_without_its_weight_gradients_is_refused():
    steps = tuple((action,) for m in range(2) for action in (Action("F", 0, m), Action("I", 0, m)))
    with pytest.raises(ValueError, match="W"):
        Pipeline(make_stages(1), schedule=Schedule("no W", 1, 1, 2, (steps,)))


# -- ranks that die or hang


class Dying(Stage):
    how = None

    def forward(self, x):
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "sleep":
            time.sleep(8)
        return super().forward(x)


def dying_rank(rank, world, culprit, how, half):
    pipe, _ = build_pipe(rank, world, Dying, process_group=dist.group.WORLD)
    args, kwargs = good_arguments(rank)
    pipe.step(*args, **kwargs)
    if rank == culprit:
        pipe.module[half].how = how
    return caught(lambda: pipe.step(*args, **kwargs))


@pytest.mark.parametrize("culprit, how", [
    (0, "kill"), (1, "exit"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "exit"), (1, "kill"), (2, "exit"), (2, "kill"))),
])
def test_a_rank_that_dies_raises_on_the_others(culprit, how):
    results = run_ranks(dying_rank, 3, 3, culprit, how, culprit % 2, check=False, group_timeout=10, fresh=True)
    assert isinstance(results[culprit], ChildProcessError)
    for rank, result in enumerate(results):
        if rank != culprit:
            kind, text, seconds = result
            assert kind == "PipelineError" and f"from rank {culprit}, which has left" in text and seconds < 10, result


def test_a_rank_that_hangs_is_noticed_within_the_timeout():
    results = run_ranks(dying_rank, 3, 3, 1, "sleep", 0, check=False, group_timeout=3, fresh=True)
    for kind, text, seconds in results:
        assert kind == "PipelineError" and seconds < 3 * 3 + 8, (kind, text, seconds)


def absent_rank(rank, world):
    """Let all ranks but one call `step`."""
    pipe, _ = build_pipe(rank, world, process_group=dist.group.WORLD)
    if rank == 1:
        _until_ended(dist.distributed_c10d._get_default_store(), "ended")
        return None
    args, kwargs = good_arguments(rank)
    told = caught(lambda: pipe.step(*args, **kwargs))
    dist.distributed_c10d._get_default_store().set("ended", "yes")
    return told


def _until_ended(store, key):
    while not store.check([key]):
        time.sleep(0.05)


def test_a_missing_rank_is_named():
    kind, text, seconds = run_ranks(absent_rank, 2, 2, group_timeout=2, fresh=True)[0]
    assert kind == "PipelineError" and "for an agreement message from rank 1" in text and seconds < 20


class CopyingItself(nn.Module):
    """Has an attribute with the name of a method that stages may have."""

    def __init__(self, segments):
        super().__init__()
        self.segments = segments


@pytest.mark.parametrize("segments", [3, nn.ModuleList(), [nn.Linear(2, 2)]], ids=str)
def test_an_attribute_with_the_name_of_a_stage_s_method_is_refused(segments):
    with pytest.raises(ValueError, match=r"CopyingItself\.segments is a"):
        Pipeline([CopyingItself(segments)])
    stage = nn.Linear(2, 2)
    stage.tied_parameters = segments
    with pytest.raises(ValueError, match=r"Linear\.tied_parameters is a"):
        Pipeline([stage])


def test_a_graph_that_several_micro_batches_use_and_one_inside_a_recomputation_get_a_remedy():
    scale = nn.Parameter(torch.ones(2)).exp()
    with pytest.raises(PipelineError, match="must be an input or a target of the step"):
        Pipeline([nn.Linear(2, 2)]).step(torch.ones(4, 2), num_chunks=2, criterion=lambda y: (y * scale).sum())
    stage = nn.Linear(2, 2)

    def add_gradient(x):
        return x + torch.autograd.grad(stage(x).sum(), stage.weight, create_graph=True)[0]

    stage.segments = lambda: [Compute(add_gradient, "x", "x", recompute=True)]
    with pytest.raises(PipelineError, match="enable_grad"):
        Pipeline([stage]).step(torch.ones(4, 2), num_chunks=2, criterion=lambda y: y.sum())


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, AveragedModel, pickle.dumps])
def test_a_pipeline_that_is_copied_names_what_can_be(copying):
    pipe = Pipeline(make_stages(1))
    with pytest.raises(ValueError, match=r"pipe\.module"):
        copying(pipe)
    copying(pipe.module)


def tensor_parallel(rank, world, plan, fsdp):
    """Return the errors of a pipeline of a stage over two tensor-parallel ranks, here or under FSDP2."""
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(stage, mesh["tp"], plan)
    if fsdp:
        fully_shard(stage, mesh=mesh["dp"])
    return caught(lambda: Pipeline([stage], process_group=mesh.get_group("pp")))[:2]


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("plan", [{"1": ColwiseParallel(), "2": RowwiseParallel()}, {"2": RowwiseParallel()},
                                  {"0": ColwiseParallel()}], ids=["pair", "row", "embedding"])
def test_a_tensor_parallel_stage_is_refused(plan, fsdp):
    for kind, text in run_ranks(tensor_parallel, 2, 2, plan, fsdp):
        assert kind == "ValueError" and "tensor parallel" in text


class Spread(Stage):
    mesh = None

    def forward(self, x):
        return DTensor.from_local(super().forward(x), self.mesh, [Replicate()], run_check=False)


def spread(rank, world):
    pipe, stages = build_pipe(rank, world, Spread)
    mesh = init_device_mesh("cpu", (world,))
    for stage in stages:
        stage.mesh = mesh
    args, kwargs = good_arguments(rank)
    return caught(lambda: pipe.step(*args, **kwargs))[:2]


@pytest.mark.parametrize("world", [1, 2])
def test_dtensors_between_stages_are_refused(world):
    for kind, text in run_ranks(spread, world, world):
        assert kind == "PipelineError" and "is a DTensor placed" in text
