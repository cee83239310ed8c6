"""What the library gives to streams, events and memory of a device is in order, on a pretend one (tests/support).

Values are right whatever the order here, since a pretend device runs everything at once; they are for the other tests.
Here a missing wait, memory given back too early, and a wait of the host that is not listed are what fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import Communicate, Compute, Pipeline, cli
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, Router, defer_weight_grads
from dualpipe.parallel.expert import ExpertParallel
from dualpipe.parallel.mesh import build_mesh
from dualpipe.pipeline import PipelineError
from dualpipe.schedule import build
from dualpipe.train.model import build_model, micro_batch_loss
from dualpipe.train.optimizer import Optimizer
from pretend_cuda import PretendCuda, pretend_cuda
from pretend_nccl import pretend_nccl
from ranks import run_ranks
from threads import Rank, run_threads
from toys import stages_of_rank

MICRO_BATCHES, ROWS, WIDTH = 4, 2, 8
CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=(1,),
    intermediate_size=24, initializer_range=0.3,
)


@contextmanager
def watched_steps(strict: bool = True) -> Iterator[PretendCuda]:
    """A pretend device on which the waits of the host within steps of pipelines are counted."""
    step = Pipeline.step
    with pretend_cuda(strict) as device:

        def watched(*args, **kwargs):
            with device.watched():
                return step(*args, **kwargs)

        with mock.patch.object(Pipeline, "step", watched):
            yield device


# -- ranks as threads


class Exchange:
    """Part g of a rank's rows goes to rank g, whose part of the same number comes back; its own backward."""

    group = None

    def __init__(self, all_to_all) -> None:
        self.all_to_all = all_to_all

    def forward(self, inputs: tuple[Tensor] | None) -> Exchanged:
        rows = torch.zeros(ROWS, WIDTH, device=self.all_to_all.device) if inputs is None else inputs[0].contiguous()
        return Exchanged(self.all_to_all, rows)

    def backward(self, context: None, gradients: tuple[Tensor] | None) -> Exchanged:
        return self.forward(gradients)


class Exchanged:
    def __init__(self, all_to_all, rows: Tensor) -> None:
        self.rows, self.received = rows, torch.empty_like(rows)  # kept until it is through
        each = [len(rows) // all_to_all.size] * all_to_all.size
        self.work = all_to_all.start(self.received, rows, each, each)

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Tensor], None]:
        self.work.wait()
        return (self.received,), None


class Toy(nn.Module):
    """(T, width) -> (T, width): a linear, and one on rows of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recompute = lambda part, layer: False
        self.exchange = None

    def segments(self) -> list:
        again = self.recompute("layer", 0)
        return [
            Compute(self.up, "x", "rows", again),
            Communicate(self.exchange, "rows", "rows"),
            Compute(torch.tanh, "rows", "rows", again),
            Communicate(self.exchange, "rows", "rows"),
            Compute(lambda x, rows: x + self.down(rows), ("x", "rows"), "x"),
        ]


def toys(count: int) -> list[nn.Module]:
    return [defer_weight_grads(Toy()) for _ in range(count)]


def qwen(count: int) -> list[nn.Module]:
    stages = build_stages(CONFIG, count)
    for stage in stages:
        stage.init_weights(seed=0)
    return stages


def connect(stage: nn.Module, all_to_all) -> None:
    """Give a stage its communication; leave this rank its experts."""
    if isinstance(stage, Toy):
        stage.exchange = Exchange(all_to_all)
        return
    for layer in stage.modules():
        if isinstance(layer, GroupedLinear):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(all_to_all.size)[all_to_all.rank].clone())
    stage.use_expert_parallelism(ExpertParallel(CONFIG.num_experts, all_to_all))


def steps(rank: Rank, make, pp: int, ep: int, overlap: bool, recompute: Sequence[str] = ()) -> None:
    """Two steps, with an update of the parameters in between."""
    mine, replica = divmod(rank.number, ep)
    all_to_all = rank.all_to_all(f"ep of {mine}", [mine * ep + e for e in range(ep)])
    stages = [make(2 * pp)[number].to(rank.device) for number in stages_of_rank("dualpipev", pp, mine)]
    for stage in stages:
        stage.recompute = Recompute(recompute)
        connect(stage, all_to_all)
    group = rank.group(f"pp of {replica}", [p * ep + replica for p in range(pp)])
    pipe = Pipeline(stages, process_group=group, schedule="dualpipev", overlap=overlap)
    if make is qwen:
        x = torch.randint(CONFIG.vocab_size, (ROWS * MICRO_BATCHES, 9))
        x, y, criterion = x[:, :-1], x[:, 1:].contiguous(), micro_batch_loss(MICRO_BATCHES)
    else:
        (x, y), criterion = torch.randn(2, ROWS * MICRO_BATCHES, WIDTH), F.mse_loss
    x, y = x.to(rank.device), y.to(rank.device)
    for _ in range(2):  # the second one uses the first one's memory again
        pipe.step(x, num_chunks=MICRO_BATCHES, criterion=criterion, labels=(y,))
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
        pipe.zero_grad()


# The only wait of the host in a step: for how many rows come, in a forward, once for each layer with experts and
# micro-batch. Where they are dispatched again the numbers are known.
COUNTS = "Event.synchronize in dualpipe/parallel/all_to_all.py: Counts.read"
LAYERS = 3


@pytest.mark.parametrize("overlap", [True, False])
def test_toy_stages(overlap):
    with watched_steps() as device:
        run_threads(steps, 4, toys, 2, 2, overlap, device="cuda")
    assert device.report(waits={}) == []
    assert device.launches > 1000


@pytest.mark.parametrize("overlap, recompute", [
    (True, ()), (False, ()), (True, ("layer",)), (True, ("layer", "dispatch")),
])
def test_qwen3_moe(overlap, recompute):
    with watched_steps() as device:
        run_threads(steps, 4, qwen, 2, 2, overlap, recompute, device="cuda")
    assert device.report(waits={COUNTS: 2 * 2 * LAYERS * MICRO_BATCHES}) == []


# -- ranks as processes: the library's own groups, FSDP2


def trained(rank: int, shape: tuple[int, int, int], dtype: torch.dtype, fails: bool = False) -> list[str]:
    """Two steps of training with pp, dp and ep ranks; the faults. fails: rank 0 fails in its first step."""
    cuda = torch.device("cuda", 0)
    with watched_steps(strict=False) as device, pretend_nccl(device):
        mesh = build_mesh(*shape, cuda)
        plan = build("dualpipev", shape[0], MICRO_BATCHES)
        model = build_model(CONFIG, plan, mesh["pp"].get_local_rank(), seed=0, dtype=dtype, device=cuda, mesh=mesh)
        pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule="dualpipev")
        optimizer = Optimizer(model.stages, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        rows = torch.randint(CONFIG.vocab_size, (ROWS * MICRO_BATCHES, 9)).to(cuda)
        for number in range(2):
            batch = {"criterion": micro_batch_loss(MICRO_BATCHES), "labels": (rows[:, 1:].contiguous(),)}
            inputs = (rows[:, :-1],) if model.has_first else ()
            if fails and rank == number == 0:
                batch["criterion"] = failing_criterion()
            try:
                pipe.step(*inputs, num_chunks=MICRO_BATCHES, **batch if model.has_last else {})
            except PipelineError:
                assert fails and number == 0
            with device.watched():
                if not fails or number:
                    pipe.clip_grad_norm_(1.0)
                    optimizer.step(1e-3)
                optimizer.zero_grad()
    with_experts = sum(isinstance(module, Router) for stage in model.stages for module in stage.modules())
    counts = 2 * MICRO_BATCHES * with_experts if mesh["ep"].size() > 1 else 0
    assert device.launches > 1000
    return device.report(waits={COUNTS: counts})


def failing_criterion():
    loss, calls = micro_batch_loss(MICRO_BATCHES), iter(range(MICRO_BATCHES))

    def criterion(*args):
        if next(calls) == 2:
            raise KeyError("out of luck")
        return loss(*args)

    return criterion


@pytest.mark.parametrize("shape, dtype", [
    ((2, 1, 1), torch.float32), ((1, 1, 2), torch.float32), ((1, 2, 1), torch.float32), ((2, 2, 1), torch.float32),
    ((2, 1, 2), torch.bfloat16),
], ids=str)
def test_processes(shape, dtype):
    assert run_ranks(trained, math.prod(shape), shape, dtype, reuse=True) == [[]] * math.prod(shape)


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (1, 2, 1)], ids=str)
def test_a_step_that_fails_and_the_one_after_it(shape):
    assert run_ranks(trained, math.prod(shape), shape, torch.float32, True, reuse=True) == [[]] * math.prod(shape)


# -- training

RUN = """
[model]
config = "config.json"
[data]
path = "text"
validation_fraction = 0.2
[parallel]
device = "cuda"
[train]
sequence_length = 16
micro_batch_size = 2
num_chunks = 4
eval_interval = 0
eval_batches = 1
[checkpoint]
interval = 2
[output]
dir = "out"
"""


def dualpipe_train(rank: int, folder: str, *arguments: str) -> list[PretendCuda]:
    """`dualpipe train` here; waits of the host are counted from the first step of the pipeline on."""
    step = Pipeline.step
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with pretend_cuda() as device, mock.patch.dict(os.environ, one), contextlib.chdir(folder):

        def first_step(*args, **kwargs):
            device.of_thread.watched = True
            return step(*args, **kwargs)

        with mock.patch.object(Pipeline, "step", first_step):
            assert cli.main(["train", "run.toml", *arguments]) == 0
    assert device.launches > 1000
    return [device.faults, device.waits]


# In training the host waits for tokens and targets to be copied (those of the first step are not counted); for the loss, the norm and
# the routers' metrics, once a step; for the mean of an evaluation; and for the copy of what a checkpoint holds.
FORWARD = "copy in dualpipe/train/loop.py: Run._forward_backward"
READ = "tolist in dualpipe/train/loop.py: Run._read"
EVALUATE = "_local_scalar_dense in dualpipe/train/loop.py: Run._evaluate"
SAVE = "synchronize in dualpipe/checkpoint/native_staging.py: HostMemory.copy"


def test_training_with_checkpoints(tmp_path):
    (tmp_path / "text").write_text("the cat sat on the mat and the dog did not. " * 200)
    model = {"model_type": "qwen3_moe", **dataclasses.asdict(CONFIG), "vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "run.toml").write_text(RUN)
    [[faults, waits]] = run_ranks(dualpipe_train, 1, str(tmp_path), "--train.steps", "2")
    assert not faults
    assert waits == {FORWARD: 2 * 2, READ: 2, EVALUATE: 1, SAVE: 1}
    [[faults, waits]] = run_ranks(dualpipe_train, 1, str(tmp_path), "--train.steps", "3")  # from the checkpoint
    assert not faults
    assert waits == {FORWARD: 2 * 1, READ: 1, EVALUATE: 1, SAVE: 1}
