"""The pipelined and the unpipelined model of `dualpipe parity`, and the step that both run.

Letters in names: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe.nn.attention import packed_positions
from dualpipe.nn.attention.sequence_split import WHOLE, SequenceSplit
from dualpipe.nn.deferral import local
from dualpipe.nn.routing.router import Router
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel import DTypePlan
from dualpipe.pipeline.compiled_stage import as_tuple
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.schema import Config
from dualpipe.train.data.token_stream import TokenBatch, shift_targets
from dualpipe.train.launch.distributed import Job
from dualpipe.train.step.loss import MicroBatchLoss, token_weight, tokens_ahead
from dualpipe.train.step.step_runner import StepRunner, build_routers


class ParityModels:
    """This rank's part of a pipelined model, built as for training, and a global batch of random tokens.

    It runs the pipelined model, and the unpipelined model if a rank passes it one, on the same batch.
    """

    def __init__(
        self, resolved: Resolved, job: Job, dtypes: DTypePlan | torch.dtype, *, fixed_routes: bool = False
    ) -> None:
        """Build the pipelined model and the batch.

        dtypes: see `build_model`. fixed_routes: route by `EvenRoutes` in both models.
        """
        # Context parallelism and MTP depend on positions, so they are tested with several documents per sequence.
        with_documents = resolved.config.parallel.cp > 1 or resolved.model.mtp_depth > 0
        self.config = _plain_config(resolved.config, with_documents)
        self.job = job
        self.pipelined = StepRunner(resolved.with_config(self.config), job, dtypes=dtypes)
        self.model = self.pipelined.model
        self.routers = self.pipelined.routers
        self.pipeline = self.pipelined.pipeline
        self.fixed_routes = fixed_routes
        split = self.pipelined.split
        length = self.config.train.sequence_length
        if fixed_routes:
            EvenRoutes(split, length).set_in(self.model.stages)
        # B sequences of T tokens, D depths of MTP: tokens (B, T), targets (B, T) or (B, T, 1 + D), positions (B, T)
        self.batch = [tensor.to(job.device) for tensor in self._make_batch(resolved, with_documents)]
        self.rank_batch = self._rank_part()
        self.weight = token_weight(split, length)
        # Balance of level "global" uses the loads of the step before, which the first step does not have.
        self.steps = 2 if self.config.router.balance and self.config.router.balance_level == "global" else 1

    def _make_batch(self, resolved: Resolved, with_documents: bool) -> list[Tensor]:
        """Return random tokens, their targets and, with documents, the positions, on CPU."""
        train = self.config.train
        length = train.sequence_length
        num_rows = train.micro_batch_size * train.num_chunks * self.config.parallel.batch_shards
        num_tokens = num_rows * (length + 1)
        generator = torch.Generator().manual_seed(train.seed)
        rows = torch.randint(resolved.model.vocab_size, (num_rows, length + 1), generator=generator, device="cpu")
        tokens = rows[:, :-1].contiguous()
        depth = resolved.model.mtp_depth
        if not with_documents:
            return [tokens, torch.from_numpy(shift_targets(rows.numpy(), depth, None)).contiguous()]
        starts = torch.randint(num_tokens, (num_rows,), generator=generator, device="cpu").sort().values
        bounds = torch.cat((torch.zeros_like(starts[:1]), starts, torch.full_like(starts[:1], num_tokens)))
        positions = packed_positions(bounds, num_rows, length + 1)
        targets = torch.from_numpy(shift_targets(rows.numpy(), depth, positions.numpy()))
        return [tokens, targets.contiguous(), positions[:, :-1].contiguous()]

    def _rank_part(self) -> list[Tensor]:
        """Return this rank's part of the batch: the rows of its pipeline, and its columns of tokens and targets."""
        parallel = self.config.parallel
        part = [tensor.tensor_split(parallel.batch_shards)[self.job.place.batch_shard] for tensor in self.batch]
        if parallel.cp == 1:
            return part
        tokens, targets, positions = part
        columns = self.pipelined.split.token_indices(self.config.train.sequence_length).to(self.job.device)
        return [tokens[:, columns], targets[:, columns], positions]

    def step(
        self, num_microbatches: int, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor | None:
        """Run a step of the pipeline and return the losses of the N micro-batches (N,), each over whole sequences.

        The result is None on ranks without the last stage. Collective.
        """
        criterion = self._criterion(self.config.train.num_chunks / self.weight)
        batch = TokenBatch(tokens, targets, tokens if positions is None else positions)  # unused without documents
        losses = self.pipelined.forward_backward(batch, criterion, num_microbatches)
        context_group = self.job.place.group("cp")
        if losses is not None and context_group is not None:
            dist.all_reduce(losses, group=context_group)
            losses /= context_group.size()
        return losses

    def _criterion(self, num_microbatches: float) -> MicroBatchLoss:
        return MicroBatchLoss(num_microbatches, self.config.mtp.weight)

    def run(self) -> dict[str, Tensor]:
        """Run a step and return the tensors that this rank compares, by name. Collective.

        These are the gradients of its stages, the losses of the routers, and the losses of the micro-batches as "loss".
        """
        for _ in range(self.steps):
            self.pipeline.zero_grad()
            with self.routers.step():
                losses = self.step(self.config.train.num_chunks, *self.rank_batch)
        values = gradients(self.model.stages)
        if self.job.place.replica:  # pipeline 0 has the same gradients and compares them
            values.clear()
        if self.job.rank == 0:  # the losses of the routers are the same on all ranks
            values |= _router_losses(self.routers)
        if losses is not None:
            values["loss"] = losses
        return values

    def run_whole(self, whole: nn.Module) -> dict[str, Tensor]:
        """Run the same step of the unpipelined model, one micro-batch after the other; return the same values."""
        shards = self.config.parallel.batch_shards
        num_microbatches = self.config.train.num_chunks * shards
        criterion = self._criterion(num_microbatches)
        routers = build_routers(self.config, [whole], group=None, device=self.job.device, whole=True)
        if self.fixed_routes:
            EvenRoutes(WHOLE, self.config.train.sequence_length).set_in([whole])
        for _ in range(self.steps):
            whole.zero_grad()
            losses = []
            with routers.step():
                for tokens, targets, *positions in zip(*(part.tensor_split(num_microbatches) for part in self.batch)):
                    outputs = whole(tokens, *positions, ahead=tokens_ahead(targets))
                    loss = criterion(*as_tuple(outputs), targets)
                    loss.backward()
                    losses.append(loss.detach())
        rank_losses = torch.stack(losses).tensor_split(shards)[self.job.place.batch_shard] * shards
        return gradients([whole], by_all_names=True) | _router_losses(routers) | {"loss": rank_losses}


def _plain_config(config: Config, with_documents: bool) -> Config:
    """Return the configuration without what the unpipelined model does not have: torch.compile, FP8 GEMMs, QK-clip."""
    return replace(
        config,
        train=replace(config.train, compile=False),
        dtypes=replace(config.dtypes, gemm_precision="auto", fp8_weight_grad=False, fp8_dispatch=False),
        data=replace(config.data, separate_documents=with_documents),
        optimizer=replace(config.optimizer, qk_clip=0.0),
    )


def _router_losses(routers: RouterSet) -> dict[str, Tensor]:
    return {name: value for name, value in routers.metrics().items() if name.endswith("_loss")}


def gradients(
    modules: Iterable[nn.Module], *, of_rank: bool = False, by_all_names: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of all parameters by name; zeros for a parameter without one.

    Args:
        of_rank: return this rank's shards; by default the unsharded gradients, which is collective.
        by_all_names: return a parameter that is tied within a module under all its names; by default under the first.
    """
    grads = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=not by_all_names):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grads[name] = grad.full_tensor() if isinstance(grad, DTensor) and not of_rank else local(grad)
    return grads


class EvenRoutes:
    """A `Router.choice` that does not depend on rounding: the T * K choices cycle through the experts.

    The experts of a token are about E / K apart, so that it is sent to many ranks. Example with K = 2 and E = 4: tokens
    go to (0, 3), (2, 1), (0, 3), ... The choices do not depend on the number of context-parallel ranks.

    Args:
        split: of sequences over context-parallel ranks.
        length: tokens of a whole sequence.
    """

    def __init__(self, split: SequenceSplit, length: int) -> None:
        self._split = split
        self._length = length

    def __call__(self, experts_TK: Tensor, num_experts: int) -> Tensor:
        """Return the experts of each token (T, K); `experts_TK`, the router's own choice, gives shape and device."""
        device = experts_TK.device
        top_k = experts_TK.shape[1]
        stride = next(n for n in itertools.count(num_experts // top_k + 1) if math.gcd(n, num_experts) == 1)
        columns = self._split.token_indices(self._length).to(device)
        row_starts = torch.arange(len(experts_TK) // len(columns), device=device) * self._length
        tokens_T1 = (row_starts.unsqueeze(1) + columns).view(-1, 1)  # numbered as in whole sequences
        return (tokens_T1 * top_k + torch.arange(top_k, device=device)) * stride % num_experts

    def set_in(self, modules: Iterable[nn.Module]) -> None:
        """Make the routers in `modules` use these choices."""
        for router in chain.from_iterable(module.modules() for module in modules):
            if isinstance(router, Router):
                router.choice = self
