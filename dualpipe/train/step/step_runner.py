"""A rank's part of a pipelined model, and the steps that run on it.

The trainer, the guard that runs a bad step again, the replay of a recorded step and parity run steps through this file
alone, so that all of them run the same step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dualpipe import Pipeline
from dualpipe.checkpoint.state import derive_random
from dualpipe.models import HubConfig
from dualpipe.nn.deferral import local
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.context import ContextParallel
from dualpipe.parallel.mesh import DENSE
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.config.resolve import Resolved
from dualpipe.train.data.token_stream import NO_TARGET, TokenBatch
from dualpipe.train.launch.distributed import Job
from dualpipe.train.optim.from_config import build_optimizer
from dualpipe.train.optim.qk_clip import QKClip
from dualpipe.train.step.dtype_plan import plan_run
from dualpipe.train.step.loss import MicroBatchLoss, token_weight, tokens_ahead
from dualpipe.train.step.pipeline_schedule import build_schedule
from dualpipe.train.step.routers import build_routers
from dualpipe.train.step.stages import StageOptions, build_model


class PipelinedModel:
    """The stages of this rank in their pipeline, with routers: forward, loss and backward of a batch. Collective.

    dtypes: see `build_model`. from_hf: a directory with a Hugging Face checkpoint to take the weights of.

    Raises ValueError, on all ranks, for a model, a schedule or routers that cannot be.
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
        self.weighs_targets = False  # True: batches have different numbers of targets, as those of conversations
        self.num_targets: Tensor | None = None  # of the last global batch, where they are counted, on the last stage
        self.model = build_model(
            resolved.model, self.schedule, job.place.rank("pp"), dtypes=dtypes, device=job.device,
            options=StageOptions.of(config, from_hf), mesh=job.mesh, context=context,
        )
        self.routers = build_routers(config, self.model.stages, group=job.group, device=job.device, context=context)
        self.pipeline = Pipeline(
            self.model.stages, process_group=job.place.group("pp"), schedule=self.schedule,
            overlap=config.parallel.overlap,
        )

    @property
    def reports(self) -> bool:
        """Return True on the one rank that knows the loss and writes the metrics: the last stage's, of pipeline 0."""
        return self.model.has_last and not self.job.place.replica

    def criterion(self, step: int, batch: TokenBatch | None = None) -> MicroBatchLoss:
        """Return the criterion of a step, counted from 1, or of as many of its micro-batches as are run.

        batch: of the whole step. Where `weighs_targets`, its targets are counted over all pipelines, which is
        collective, and the loss is the mean over them. None: a mean over each micro-batch, of all those of a step.
        """
        train = self.config.train
        if self.weighs_targets and batch is not None and self.model.has_last:
            self.num_targets = self._count_targets(batch)
            # Gradients are means over the replicas: so the sum over the global batch is divided by its targets.
            denominator = self.num_targets.clamp(min=1) / self.config.parallel.replicas
            return MicroBatchLoss(train.num_chunks, denominator=denominator)
        micro_batches = train.num_chunks / token_weight(self.split, train.sequence_length)
        return MicroBatchLoss(micro_batches, self.config.mtp.weight_of(step, train.steps))

    def _count_targets(self, batch: TokenBatch) -> Tensor:
        """Count the targets of the global batch, a float32 scalar. Collective over the ranks of the last stage."""
        count = (batch.targets != NO_TARGET).sum()
        self.all_reduce("targets", "the number of targets", count, self.job.place.group(*DENSE))
        return count.float()

    def forward_backward(
        self, batch: TokenBatch, criterion: MicroBatchLoss, num_microbatches: int | None = None
    ) -> Tensor | None:
        """Run the pipeline once, on the micro-batches of a step unless another number is given.

        criterion: used for this call alone. Returns the loss of each micro-batch (N,) on the ranks of the last stage,
        None elsewhere; see `mean_losses`.
        """
        model = self.model
        positions = batch.positions if self.config.data.separate_documents else None
        if positions is None and self.split.size > 1:  # whose stages tell by them which tokens of a row are theirs
            positions = torch.arange(batch.positions.shape[1], device=self.job.device).expand_as(batch.positions)
        losses, _ = self.pipeline.step(
            *((batch.tokens,) if model.has_first else ()),
            num_chunks=num_microbatches or self.config.train.num_chunks,
            criterion=criterion if model.has_last else None,
            labels=(batch.targets,) if model.has_last else (),
            side=self._side_inputs(positions, batch.targets) if model.has_first else None,
        )
        return losses

    def _side_inputs(self, positions: Tensor | None, targets: Tensor) -> dict[str, Tensor | None]:
        """Return what stages are given besides the tokens, by the names that their `forward` has for it."""
        if not isinstance(self.model.config, HubConfig):
            return {"position_ids": positions}
        return {"positions": positions, "ahead": tokens_ahead(targets)}

    def mean_losses(self, losses: Tensor | None, criterion: MicroBatchLoss) -> Tensor | None:
        """Return the mean losses of all pipelines, on the ranks of the last stage; None elsewhere. Collective.

        losses, criterion: of `forward_backward`. The result is (1,), or (1 + D,) for multi-token prediction of depth D.
        """
        if losses is None:
            return None
        loss = torch.stack(criterion.noted).sum(0).float() if criterion.noted else losses.sum().float().unsqueeze(0)
        self.all_reduce("loss", "the loss of all pipelines", loss, self.job.place.group(*DENSE))
        return loss / self.config.parallel.replicas

    def everywhere(self, loss: Tensor | None) -> Tensor:
        """Return a step's loss on every rank, from the one that reports it. Collective."""
        shared = torch.zeros(1, dtype=torch.float64, device=self.job.device)
        if self.reports and loss is not None:
            shared[0] = loss
        self.all_reduce("loss", "the loss", shared, self.job.group)
        return shared[0]

    def all_reduce(self, kind: str, what: str, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Add the other ranks' values to `tensor`, recorded as a wait for them."""
        if group is not None:
            with self.recorder.collective(kind, what, self.recorder.members(group)):
                dist.all_reduce(tensor, group=group)


class StepRunner(PipelinedModel):
    """A pipelined model with its optimizer, for training steps. Collective.

    recorded: the dtypes in the checkpoint that the run goes on from, by name; None for a new run.
    """

    def __init__(self, resolved: Resolved, job: Job, recorded: Mapping[str, torch.dtype] | None = None) -> None:
        config = resolved.config
        derive_random(config.train.seed, 0, job.rank)
        plan = plan_run(resolved, recorded, job.mesh)
        super().__init__(resolved, job, dtypes=plan, from_hf=config.init.from_hf if recorded is None else "")
        self.optimizer = build_optimizer(
            config.optimizer, resolved.model, self.model.stages, moments=resolved.dtypes.moments,
            masters=self.model.masters,
        )
        self.recorder.made("parameters", *self.optimizer.parameters)
        limit, dense = config.optimizer.qk_clip, job.place.group(*DENSE)
        self.qk_clip = QKClip(self.model.stages, limit, group=dense, device=job.device) if limit else None

    def run_step(self, batch: TokenBatch, step: int) -> Tensor | None:
        """Run forwards and backwards of a step, counted from 1, with the routers' losses and counts.

        Returns the `mean_losses`. A loss that is not finite leaves a gradient that is not: so every rank gets to know
        by the norm.
        """
        criterion = self.criterion(step, batch)
        with self.routers.step():
            losses = self.mean_losses(self.forward_backward(batch, criterion), criterion)
        if losses is not None:
            self._spoil_gradient(losses)
        return losses

    def _spoil_gradient(self, losses: Tensor) -> None:
        """Add NaN to a gradient if a loss is not finite, else 0; none of a copy, which the norm leaves out."""
        loss, copies = losses.sum(), set(self.pipeline.copied_parameters)
        grads = (local(p.grad) for p in self.optimizer.parameters if p.grad is not None and p not in copies)
        grad = next((grad for grad in grads if grad.numel()), None)
        if grad is not None:
            grad[(0,) * grad.dim()].add_((loss - loss).to(grad.dtype))

    def update(self, lr: float, norm: Tensor) -> None:
        """Update the parameters, unless the gradients' `norm` (a scalar tensor) is not finite; drop the gradients."""
        with self.recorder.doing("optimizer"):
            self.optimizer.step(lr, norm)
            if self.qk_clip is not None:
                self.qk_clip(self.optimizer, norm)
        self.optimizer.zero_grad()

    def drop_scores(self) -> None:
        """Forget the attention scores that QK-clip has noted, of a run of the pipeline that updates nothing."""
        if self.qk_clip is not None:
            self.qk_clip.forget()
