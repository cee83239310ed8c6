"""Steps of pipelines and of training on a pretend device: ranks as threads, ranks as processes, and `dualpipe train`.

Each takes a `plant`, a context manager around the whole run: a fault to plant, or nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threads
from device_book import the_device
from device_waits import Meet
from dualpipe import Communicate, Compute, Pipeline, cli
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, Router, defer_weight_grads
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.mesh import build_mesh
from dualpipe.pipeline import PipelineError
from dualpipe.quantized import QuantizedTensor, quantize_weights
from dualpipe.schedule import build
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import build_model, resolve_model_dtypes
from pretend_cuda import PretendCuda, pretend_cuda
from pretend_nccl import pretend_nccl
from run_files import write_files
from threads import Rank, Side, ThreadAllToAll, Transfer, Works, World, run_threads
from toys import num_stages, stages_of_rank

MICRO_BATCHES, ROWS, WIDTH, STEPS = 4, 2, 8, 2
CUDA = torch.device("cuda", 0)
CONFIG = Qwen3MoeConfig(
    vocab_size=257, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=(1,),
    intermediate_size=24, initializer_range=0.3,
)
LAYERS_WITH_EXPERTS = 3

Plant = Callable[[], AbstractContextManager]


@contextmanager
def watched_steps(strict: bool = True) -> Iterator[PretendCuda]:
    """Pretend a device on which the host's waits within steps of pipelines are counted."""
    step = Pipeline.step
    with pretend_cuda(strict) as device:

        def watched(*args, **kwargs):
            trace = device.of_thread.trace
            with device.watched():
                result = step(*args, **kwargs)
            trace.ends.append(len(trace.steps))
            return result

        with mock.patch.object(Pipeline, "step", watched):
            yield device


# -- ranks as threads


@contextmanager
def booked_transfers() -> Iterator[None]:
    """Record the exchanges between ranks that are threads in the traces, as NCCL's, and on the host as gloo's."""
    post, start, wait, spoil = World.post, ThreadAllToAll.start, Transfer.wait, threads._spoil

    def booked_post(world: World, kind: str, key: tuple, side: Side, role: str) -> Transfer:
        device, name = the_device(), "send" if role == "send" else "recv"
        trace, on_device = device.of_thread.trace, device.kind(side.tensor) == "device"
        booked = (trace.communicate(name, key, 2, current=device.current_stream().number) if on_device
                  else trace.meet(key, name))
        with trace.paused():
            transfer = post(world, kind, key, side, role)
        vars(transfer).setdefault("booked", {})[trace] = booked
        return transfer

    def booked_start(all_to_all: ThreadAllToAll, *tensors_and_rows: Any) -> Works:
        device = the_device()
        trace, current = device.of_thread.trace, device.current_stream().number
        name = " < ".join(frame.f_code.co_qualname for frame, _ in islice(walk_stack(sys._getframe(1)), 5))
        booked = trace.communicate(name, all_to_all._name, all_to_all.size, current=current)
        with trace.paused():
            works = start(all_to_all, *tensors_and_rows)
        works._transfers[0].booked[trace] = booked
        return works

    def booked_wait(transfer: Transfer) -> bool:
        device = the_device()
        trace = device.of_thread.trace
        with trace.paused():
            wait(transfer)
        booked = transfer.booked[trace]
        if isinstance(booked, Meet):
            trace.wait_for(booked)
        else:
            trace.after(device.current_stream().number, booked)
        return True

    def unbooked_spoil(tensor: Tensor) -> None:
        with the_device().of_thread.trace.paused():
            spoil(tensor)

    with (mock.patch.object(World, "post", booked_post), mock.patch.object(ThreadAllToAll, "start", booked_start),
          mock.patch.object(Transfer, "wait", booked_wait), mock.patch.object(threads, "_spoil", unbooked_spoil)):
        yield


class Exchange:
    """Sends part g of a rank's rows to rank g, and receives that rank's part of the same number; its own backward."""

    group = None

    def __init__(self, all_to_all) -> None:
        self.all_to_all = all_to_all

    def forward(self, inputs: tuple[Tensor]) -> Exchanged:
        return Exchanged(self.all_to_all, inputs[0].contiguous())

    def backward(self, context: None, gradients: tuple[Tensor]) -> Exchanged:
        return self.forward(gradients)


class Exchanged:
    """An exchange in flight."""

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
    """(rows, WIDTH) -> (rows, WIDTH): a linear, one on rows from other ranks, and an action that a test adds."""

    exchange: Exchange | None = None
    besides: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def segments(self) -> list:
        return [
            Compute(lambda x: self.up(self.besides(x)), "x", "rows"),
            Communicate(self.exchange, "rows", "rows"),
            Compute(torch.tanh, "rows", "rows"),
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


def quantized_qwen(count: int) -> list[nn.Module]:
    """Build Qwen stages with FP8 weights, in bfloat16, so that GEMMs are in FP8."""
    stages = [stage.bfloat16() for stage in qwen(count)]
    for stage in stages:
        quantize_weights(stage, "fp8_block")
    return stages


def by_threads(
    make: Callable[[int], list[nn.Module]], pp: int, ep: int, overlap: bool = True, recompute: Sequence[str] = (), *,
    schedule: str = "dualpipev", plant: Plant = nullcontext, per_node: int | None = None,
) -> PretendCuda:
    """Run two steps of pp x ep ranks with the stages that `make(count)` returns, and an update of the parameters.

    per_node: expert-parallel ranks of a pretended node; rows take two hops between nodes.
    """
    with watched_steps() as device, booked_transfers(), plant():
        run_threads(_thread, pp * ep, make, pp, ep, overlap, recompute, schedule, per_node, device="cuda")
    device.traces = [trace for trace in device.traces if trace.ends]  # without the trace of this thread
    return device


def _thread(
    rank: Rank, make, pp: int, ep: int, overlap: bool, recompute: Sequence[str], schedule: str, per_node: int | None
) -> None:
    mine, replica = divmod(rank.number, ep)
    the_device().of_thread.trace.name = f"rank {rank.number}"
    all_to_all = rank.all_to_all(f"ep of {mine}", [mine * ep + e for e in range(ep)])
    stages = make(num_stages(schedule, pp))
    stages = [stages[number].to(rank.device) for number in stages_of_rank(schedule, pp, mine)]
    for stage in stages:
        _connect(stage, all_to_all, recompute, per_node)
    group = rank.group(f"pp of {replica}", [p * ep + replica for p in range(pp)])
    pipe = Pipeline(stages, process_group=group, schedule=schedule, overlap=overlap)
    if make is not toys:
        rows, criterion = torch.randint(CONFIG.vocab_size, (ROWS * MICRO_BATCHES, 9)), MicroBatchLoss(MICRO_BATCHES)
        x, y = rows[:, :-1].to(rank.device), rows[:, 1:].contiguous().to(rank.device)
    else:
        (x, y), criterion = torch.randn(2, ROWS * MICRO_BATCHES, WIDTH).to(rank.device), F.mse_loss
    for _ in range(STEPS):  # the second one reuses the first one's memory
        pipe.step(x, num_chunks=MICRO_BATCHES, criterion=criterion, labels=(y,))
        with torch.no_grad():
            for parameter in pipe.parameters():
                if isinstance(parameter, QuantizedTensor):
                    parameter.quantize_(parameter.master.sub_(parameter.grad, alpha=1e-3))
                else:
                    parameter.sub_(parameter.grad, alpha=1e-3)
        pipe.zero_grad()


def _connect(stage: nn.Module, all_to_all, recompute: Sequence[str], per_node: int | None) -> None:
    """Connect a stage to its communication, in FP8 if its weights are quantized; leave this rank its experts."""
    if isinstance(stage, Toy):
        stage.exchange = Exchange(all_to_all)
        return
    for layer in stage.modules():
        if isinstance(layer, GroupedLinear):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(all_to_all.size)[all_to_all.rank].clone())
    fp8_rows = 128 if any(isinstance(parameter, QuantizedTensor) for parameter in stage.parameters()) else None
    experts = ExpertParallel(CONFIG.num_experts, all_to_all, fp8_rows=fp8_rows, ranks_per_node=per_node)
    stage.use_expert_parallelism(experts)
    stage.recompute = Recompute(recompute)


# -- ranks as processes: the library's own groups, FSDP2


def as_process(rank: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, fails: bool = False, *,
               narrow: bool = False, strict: bool = False, plant: Plant = nullcontext, tied: bool = False,
               name: str = "dualpipev", offload: bool = False) -> tuple[PretendCuda, int]:
    """Run two training steps with (pp, dp, ep) ranks; return the device, and this rank's number of layers with experts.

    fails: rank 0 fails in the last step, all ranks with it. narrow: parameters are stored in `dtype`. tied: the
    embedding is the head; name: of the schedule; offload: moments are in host memory.
    """
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    with watched_steps(strict) as device, pretend_nccl(device), plant():
        device.of_thread.trace.name = f"rank {rank}"
        mesh = build_mesh(*shape, CUDA)
        schedule = build(name, shape[0], MICRO_BATCHES)
        dtypes = resolve_model_dtypes(config, dtype, replicas=1) if narrow else dtype
        model = build_model(config, schedule, mesh["pp"].get_local_rank(), dtypes=dtypes, device=CUDA, mesh=mesh)
        pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule=name)
        optimizer = Optimizer(model.stages, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                              offload=offload)
        rows = torch.randint(CONFIG.vocab_size, (ROWS * MICRO_BATCHES, 9)).to(CUDA)
        inputs = (rows[:, :-1],) if model.has_first else ()
        for step in range(STEPS):
            failing = fails and step == STEPS - 1
            criterion = _failing if failing and rank == 0 else MicroBatchLoss(MICRO_BATCHES)
            ends = {"criterion": criterion, "labels": (rows[:, 1:].contiguous(),)} if model.has_last else {}
            with contextlib.suppress(*[PipelineError] * failing):
                pipe.step(*inputs, num_chunks=MICRO_BATCHES, **ends)
                assert not failing, "the step that fails has not raised"
            with device.watched():
                if not failing:
                    optimizer.step(1e-3, pipe.clip_grad_norm_(1.0))
                optimizer.zero_grad()
    layers = sum(isinstance(module, Router) for stage in model.stages for module in stage.modules())
    return device, layers if shape[2] > 1 else 0


def _failing(output: Tensor, target: Tensor) -> Tensor:
    raise KeyError("out of luck")


# -- training

TRAINING = (
    "--parallel.pp", "1", "--parallel.device", "cuda", "--train.eval_interval", "0", "--train.eval_batches", "1",
    "--checkpoint.interval", "2",
)


def write_run(folder: Path) -> None:
    """Write the files that `as_training` needs."""
    write_files(folder, CONFIG.to_dict())


def as_training(
    rank: int, folder: str, *arguments: str, status: int = 0, plant: Plant = nullcontext
) -> PretendCuda:
    """Run `dualpipe train` with one rank in this process; count the host's waits from the pipeline's first step on."""
    step, one = Pipeline.step, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with pretend_cuda() as device, plant(), mock.patch.dict(os.environ, one), contextlib.chdir(folder):

        def first_step(*args, **kwargs):
            device.of_thread.watched = True
            return step(*args, **kwargs)

        with mock.patch.object(Pipeline, "step", first_step):
            assert cli.main(["train", "run.toml", *TRAINING, *arguments]) == status
    return device
