"""One rank's part of a pipelined model, and its steps.

The trainer, the guard that reruns a bad step, the replay of a recorded step and parity all use this file, so they run
the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe import Pipeline
from dualpipe.checkpoint.state import derive_random
from dualpipe.models import HubConfig
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.deferral import local
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.mesh import DENSE
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.schema import Config
from dualpipe.train.data.token_stream import NO_TARGET, TokenBatch
from dualpipe.train.launch.distributed import Job
from dualpipe.train.optim.from_config import build_optimizer
from dualpipe.train.optim.groups import find_trainable_parameters
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.optim.qk_clip import QKClip
from dualpipe.train.step.dtype_plan import resolve_run_dtypes
from dualpipe.train.step.loss import MicroBatchLoss, token_weight, tokens_ahead
from dualpipe.train.step.model import build_model, build_schedule


def build_routers(
    config: Config, stages: Sequence[nn.Module], *, group: dist.ProcessGroup | None, device: torch.device,
    context: ContextParallel | None = None, whole: bool = False,
) -> RouterSet:
    """Configure the routers in `stages` as `config.router` says and return them as a set. Collective over `group`.

    Call it before the stages are put into a pipeline. Raises ValueError for options that the model's routers lack.

    Args:
        context: context parallelism of the stages; None without it.
        whole: `stages` are the unpipelined model, and this rank runs the micro-batches of all pipelines.
    """
    router = config.router
    train = config.train
    parallel = config.parallel
    return RouterSet(
        stages, num_microbatches=train.num_chunks * (parallel.batch_shards if whole else 1), balance=router.balance,
        level=router.balance_level, z=router.z_loss, bias_update_rate=router.bias_update_rate,
        weight=token_weight(SequenceSplit() if context is None else context.split, train.sequence_length),
        sequence_group=context.stream.group if context is not None and context.split.size > 1 else None,
        group=group, replicas=1 if whole else parallel.replicas, device=device,
    )


class StepRunner:
    """The stages of this rank in their pipeline, with routers: forward, loss and backward of a batch. Collective.

    Args:
        dtypes: see `build_model`.
        from_hf: directory with a Hugging Face checkpoint to load the weights from, or "".

    Raises ValueError, on all ranks, for an invalid model, schedule or router configuration.
    """

    def __init__(
        self, resolved: Resolved, job: Job, *, dtypes: DTypePlan | torch.dtype, from_hf: str = ""
    ) -> None:
        config = resolved.config
        self.resolved = resolved
        self.config = config
        self.job = job
        self.recorder = Recorder.current()
        self.schedule = build_schedule(config.parallel, config.train.num_chunks, job.ranks)
        context = ContextParallel(job.place.part("cp"), method=config.parallel.cp_method)
        self.split = context.split
        # True if batches have different numbers of targets: there is none across the end of a separate document, and
        # none at a token that a loss mask leaves out.
        self.counts_targets = config.data.separate_documents
        # Number of targets in the latest global batch. None unless they are counted, and on ranks without the last
        # stage.
        self.num_targets: Tensor | None = None
        self.model = build_model(
            resolved.model, self.schedule, job.place.rank("pp"), dtypes=dtypes, device=job.device,
            settings=config, from_hf=from_hf, mesh=job.mesh, context=context,
        )
        self.routers = build_routers(config, self.model.stages, group=job.group, device=job.device, context=context)
        self.pipeline = Pipeline(
            self.model.stages, process_group=job.place.group("pp"), schedule=self.schedule,
            overlap=config.parallel.overlap, merge_weight_grads=config.parallel.merge_weight_grads,
        )
        self.parameters = list(find_trainable_parameters(self.model.stages))  # a tied one appears once
        self.qk_clip: QKClip | None = None
        if config.optimizer.qk_clip:
            self.qk_clip = QKClip(
                self.model.stages, config.optimizer.qk_clip, group=job.place.group(*DENSE), device=job.device)

    @property
    def reports(self) -> bool:
        """True on the one rank that writes the metrics: the rank of pipeline 0 with the last stage, and so the loss."""
        return self.model.has_last and not self.job.place.replica

    def criterion(self, step: int, batch: TokenBatch | None = None) -> MicroBatchLoss:
        """Return the criterion of a step, counted from 1, for one call of `forward_backward`.

        That call may run fewer micro-batches than the step has; each is weighted as one of the whole step.

        Args:
            batch: of the whole step. With `counts_targets`, its targets are counted over all pipelines, which is
                collective, and the loss is the mean over them. None: the loss is divided by the number of all tokens.
        """
        train = self.config.train
        mtp_weight = self.config.mtp.weight_of(step, train.steps)
        if self.counts_targets and batch is not None and self.model.has_last:
            self.num_targets = self._count_targets(batch)
            # Gradients are averaged over the replicas: dividing by the number of targets per replica gives the gradient
            # of the mean over the global batch.
            denominator = self.num_targets.clamp(min=1) / self.config.parallel.replicas
            return MicroBatchLoss(train.num_chunks, mtp_weight, denominator=denominator)
        num_microbatches = train.num_chunks / token_weight(self.split, train.sequence_length)
        return MicroBatchLoss(num_microbatches, mtp_weight)

    def _count_targets(self, batch: TokenBatch) -> Tensor:
        """Count the targets of the global batch, a float32 scalar. Collective over the ranks of the last stage.

        Counts the next tokens, also with multi-token prediction.
        """
        targets = batch.targets if batch.targets.dim() == 2 else batch.targets[..., 0]
        count = (targets != NO_TARGET).sum()
        self.all_reduce("targets", "the number of targets", count, self.job.place.group(*DENSE))
        return count.float()

    def forward_backward(
        self, batch: TokenBatch, criterion: MicroBatchLoss, num_microbatches: int | None = None
    ) -> Tensor | None:
        """Run the pipeline once and return the loss of each micro-batch (N,); see `mean_losses`.

        The result is None on ranks without the last stage.

        Args:
            criterion: of the step, made for this call: it collects results.
            num_microbatches: of the batch; by default those of a step.
        """
        model = self.model
        inputs = (batch.tokens,) if model.has_first else ()
        labels = (batch.targets,) if model.has_last else ()
        losses, _ = self.pipeline.step(
            *inputs, num_chunks=num_microbatches or self.config.train.num_chunks,
            criterion=criterion if model.has_last else None, labels=labels,
            side=self._side_inputs(batch) if model.has_first else None,
        )
        return losses

    def _side_inputs(self, batch: TokenBatch) -> dict[str, Tensor | None]:
        """Return the inputs of the stages besides the tokens, by the keywords of their `forward`."""
        positions = batch.positions if self.config.data.separate_documents else None
        if positions is None and self.split.size > 1:  # context-parallel stages select their tokens by position
            positions = torch.arange(batch.positions.shape[1], device=self.job.device).expand_as(batch.positions)
        if not isinstance(self.model.config, HubConfig):
            return {"position_ids": positions}
        return {"positions": positions, "ahead": tokens_ahead(batch.targets)}

    def mean_losses(self, losses: Tensor | None, criterion: MicroBatchLoss) -> Tensor | None:
        """Return the mean loss over all pipelines: (1,), or (1 + D,) for multi-token prediction of depth D. Collective.

        The result is None on ranks without the last stage. losses: returned by `forward_backward` for `criterion`.
        """
        if losses is None:
            return None
        if criterion.depth_losses:
            loss = torch.stack(criterion.depth_losses).sum(0).float()
        else:
            loss = losses.sum().float().unsqueeze(0)
        self.all_reduce("loss", "the loss of all pipelines", loss, self.job.place.group(*DENSE))
        return loss / self.config.parallel.replicas

    def broadcast_loss(self, loss: Tensor | None) -> Tensor:
        """Return the loss of the rank that reports it, on every rank: a float64 scalar. Collective."""
        shared = torch.zeros(1, dtype=torch.float64, device=self.job.device)
        if self.reports and loss is not None:
            shared[0] = loss
        self.all_reduce("loss", "the loss", shared, self.job.group)
        return shared[0]

    def all_reduce(self, kind: str, title: str, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Sum `tensor` over the ranks of `group` in place; without a group do nothing.

        kind, title: names of the collective in the recorder.
        """
        if group is not None:
            with self.recorder.collective(kind, title, self.recorder.members(group)):
                dist.all_reduce(tensor, group=group)

    def run_step(self, batch: TokenBatch, step: int) -> Tensor | None:
        """Run forward and backward of a step, counted from 1, with the losses and counts of the routers.

        Returns the `mean_losses`. If the loss is not finite, a gradient becomes NaN, so that every rank learns of it
        from the gradient norm.
        """
        criterion = self.criterion(step, batch)
        with self.routers.step():
            losses = self.mean_losses(self.forward_backward(batch, criterion), criterion)
        if losses is not None:
            self._spoil_gradient(losses)
        return losses

    def _spoil_gradient(self, losses: Tensor) -> None:
        """Add NaN to one element of a gradient if a loss is not finite, else 0.

        The gradient is not one of a copied parameter, which the norm leaves out.
        """
        loss = losses.sum()
        copies = set(self.pipeline.copied_parameters)
        grads = (local(p.grad) for p in self.parameters if p.grad is not None and p not in copies)
        grad = next((grad for grad in grads if grad.numel()), None)
        if grad is not None:
            grad[(0,) * grad.dim()].add_((loss - loss).to(grad.dtype))

    def update(self, optimizer: Optimizer, lr: float, norm: Tensor) -> None:
        """Update the parameters unless the gradient norm, a scalar tensor, is not finite; then drop the gradients."""
        with self.recorder.doing("optimizer"):
            optimizer.step(lr, norm)
            if self.qk_clip is not None:
                self.qk_clip(optimizer, norm)
        optimizer.zero_grad()

    def drop_scores(self) -> None:
        """Drop the attention scores that QK-clip has recorded, after a step without an update."""
        if self.qk_clip is not None:
            self.qk_clip.reset()


def build_training(
    resolved: Resolved, job: Job, recorded: Mapping[str, torch.dtype] | None
) -> tuple[StepRunner, Optimizer]:
    """Return the runner of a run's steps and its optimizer. Collective.

    recorded: dtypes in the checkpoint that the run resumes from, by name; None for a new run.
    """
    config = resolved.config
    derive_random(config.train.seed, 0, job.rank)
    plan = resolve_run_dtypes(resolved, recorded, job.mesh)
    runner = StepRunner(resolved, job, dtypes=plan, from_hf=config.init.from_hf if recorded is None else "")
    optimizer = build_optimizer(
        config.optimizer, resolved.model, runner.model.stages, moments=resolved.dtypes.moments,
        masters=runner.model.masters,
    )
    runner.recorder.made("parameters", *optimizer.parameters)
    return runner, optimizer
