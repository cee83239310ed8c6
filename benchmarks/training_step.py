"""A whole training step of one rank, run by dualpipe's pipeline, by torch's pipelines or by FSDP2 alone.

A step is forward and backward of all micro-batches, clipping, AdamW, and the loss, read at the end. Torch's pipelines
and FSDP2 run the plain forward of the same stages. All compute the same step: weights and tokens do not depend on the
layout, and routing is balanced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from expert_shapes import BalancedRoutes
from gpu_bench import Spans
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleDualPipeV
from torch.utils.checkpoint import checkpoint

from dualpipe import Pipeline
from dualpipe.models import read_config
from dualpipe.nn.routing.router import Router
from dualpipe.parallel.clipping import clip_grad_norm_
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.schedule import build
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.schema import Config
from dualpipe.train.launch.join import Job
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import Model, build_model, resolve_run_dtypes

TORCHS = {"dualpipev": ScheduleDualPipeV, "1f1b": Schedule1F1B}

Run = Callable[[Tensor, Tensor], Tensor | None]  # (tokens, labels) -> losses by micro-batch, on the last stage's rank


def by_dualpipe(config: Config, job: Job, model: Model, spans: Spans) -> Run:
    p, num_chunks = config.parallel, config.train.num_chunks
    pipe = Pipeline(model.stages, process_group=job.place.group("pp"), schedule=p.schedule, overlap=p.overlap)
    criterion = MicroBatchLoss(num_chunks) if model.has_last else None
    return lambda inputs, labels: pipe.step(
        *([inputs] if model.has_first else []), num_chunks=num_chunks, criterion=criterion,
        labels=(labels,) if model.has_last else (),
    )[0]


def by_torch(config: Config, job: Job, model: Model, spans: Spans) -> Run:
    p, train = config.parallel, config.train
    schedule, described = build(p.schedule, p.pp, train.num_chunks), model.config
    shape = (train.micro_batch_size, train.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64, device=job.device)
    hidden, logits = (
        torch.empty(*shape, size, dtype=dtype_of(train.dtype), device="meta").requires_grad_()
        for size in (described.hidden_size, described.vocab_size)
    )
    stages = []
    for number, module in zip(schedule.rank_stages(job.place.rank("pp")), model.stages):
        ends = tokens.to("meta") if module.first else hidden, logits if module.last else hidden
        stage = PipelineStage(module, number, schedule.num_stages, job.device, *ends, group=job.place.group("pp"))
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, spans.around("action", getattr(stage, name)))
        stages.append(stage)
    pipe = TORCHS[p.schedule](
        stages if p.schedule == "dualpipev" else stages[0], train.num_chunks,
        loss_fn=MicroBatchLoss(train.num_chunks), scale_grads=False,
    )

    def run(inputs: Tensor, labels: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        last = {"target": labels, "losses": losses} if model.has_last else {}
        pipe.step(*([inputs] if model.has_first else []), **last, return_outputs=False)
        return torch.stack(losses) if losses else None

    return run


def by_fsdp(config: Config, job: Job, model: Model, spans: Spans) -> Run:
    num_chunks, (whole,) = config.train.num_chunks, model.stages
    criterion = MicroBatchLoss(num_chunks)

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for number, (x, y) in enumerate(zip(inputs.chunk(num_chunks), labels.chunk(num_chunks))):
            if isinstance(whole, FSDPModule):
                whole.set_requires_gradient_sync(number == num_chunks - 1)
            loss = criterion(whole(x), y)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    return run


RUNS = {"dualpipe": by_dualpipe, "torch": by_torch, "FSDP2": by_fsdp}


def training_step(
    config: Config, run_by: str, job: Job, spans: Spans, stride: int, *, checkpointed: bool = False
) -> Callable[[], tuple[float | None, float]]:
    """Return a step of this rank, which ends when the device has finished.

    The step returns this pipeline's loss, None on ranks that do not have it, and the gradient norm before clipping. It
    records the span "all" of forward and backward, and in it each "action".

    run_by: a key of `RUNS`. stride: of `BalancedRoutes`. checkpointed: recompute the layers of a plain forward by
    torch's checkpoint.
    """
    place, schedule = job.place, build(config.parallel.schedule, config.parallel.pp, config.train.num_chunks)
    described = read_config(config.model.config)
    model = build_model(
        described, schedule, place.rank("pp"), device=job.device, mesh=job.mesh,
        dtypes=resolve_run_dtypes(Resolved.of(config, described), None, job.mesh),
        settings=Config(memory=config.memory),
    )
    for stage in model.stages:
        for router in (module for module in stage.modules() if isinstance(module, Router)):
            router.choice = BalancedRoutes(stride)
        for _, layer in stage.numbered() if checkpointed else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    run = RUNS[run_by](config, job, model, spans)
    optimizer = Optimizer(model.stages, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    inputs, labels = batch(config, job, described.vocab_size)

    def step() -> tuple[float | None, float]:
        with spans.span("all"):
            losses = run(inputs, labels)
        norm = clip_grad_norm_(optimizer.parameters, 1.0, group=place.group("pp"), device=job.device)
        optimizer.step(1e-4)
        optimizer.zero_grad()
        numbers = torch.stack([norm.double()] + ([] if losses is None else [losses.detach().sum().double()])).tolist()
        return (None if losses is None else numbers[1]), numbers[0]

    return step


def batch(config: Config, job: Job, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return this pipeline's part (tokens, next tokens) of the global batch, which does not depend on the layout."""
    train, place = config.train, job.place
    own = train.num_chunks * train.micro_batch_size
    shape = (own * place.replicas, train.sequence_length + 1)
    tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
    tokens = tokens[own * place.replica :][:own].to(job.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
