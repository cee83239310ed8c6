"""Evaluation on validation batches: the loss and, with multi-token prediction, the quality of the drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualpipe.parallel.mesh import DENSE
from dualpipe.train.data.run_data import RunData
from dualpipe.train.loss import MicroBatchLoss, count_accepted
from dualpipe.train.step import StepRunner


@torch.no_grad()
def evaluate(runner: StepRunner, data: RunData, step: int) -> dict[str, Any]:
    """Return means over the validation batches, by field of `StepMetrics`. Collective.

    The result is empty on ranks without the last stage. step: number of completed steps.
    """
    losses = []
    weights = []
    drafts = []
    for stage in runner.model.stages:
        stage.eval()
    with data.validation_batches() as batches:
        for batch in batches:
            criterion = runner.criterion(step, batch)
            loss = runner.mean_losses(runner.forward_backward(batch, criterion), criterion)
            if loss is not None:
                losses.append(loss)
                if runner.num_targets is not None:
                    weights.append(runner.num_targets)
            if criterion.greedy:
                drafts.append(_count_accepted(runner, criterion))
    for stage in runner.model.stages:
        stage.train()
    if not losses:
        return {}
    if runner.counts_targets:
        shares = torch.stack(weights) / torch.stack(weights).sum()
        mean = (torch.stack(losses) * shares.unsqueeze(-1)).sum(0)
    else:
        mean = torch.stack(losses).mean(0)
    metrics: dict[str, Any] = {"eval_loss": mean[0].item()}
    if drafts:
        counts = torch.stack(drafts).sum(0)
        runner.all_reduce("drafts", "accepted drafts", counts, runner.job.place.group(*DENSE))
        num_accepted, num_positions = counts
        metrics["eval_mtp_loss"] = mean[1:].tolist()
        metrics["acceptance_length"] = 1 + (num_accepted / num_positions).item()
    return metrics


def _count_accepted(runner: StepRunner, criterion: MicroBatchLoss) -> Tensor:
    """Return `count_accepted` of a batch.

    Drafts are verified with greedy tokens of the whole sequence, so these are first collected from all context-parallel
    ranks.
    """
    greedy = torch.cat([tokens for tokens, _ in criterion.greedy])
    targets = torch.cat([targets for _, targets in criterion.greedy])
    length = runner.config.train.sequence_length
    columns = torch.cat([torch.arange(*chunk, device=greedy.device) for chunk in runner.split.chunks(length)])
    main_tokens = greedy.new_zeros(len(greedy), length)
    main_tokens[:, columns] = greedy[..., 0]
    runner.all_reduce("drafts", "the likeliest tokens", main_tokens, runner.job.place.group("cp"))
    return count_accepted(greedy, targets, main_tokens, columns)
