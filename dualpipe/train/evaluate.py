"""Evaluation on held-out batches: the loss and, with multi-token prediction, how good the drafts are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualpipe.parallel.mesh import DENSE
from dualpipe.train.data.run_data import RunData
from dualpipe.train.step.loss import MicroBatchLoss, accepted
from dualpipe.train.step.step_runner import PipelinedModel


@torch.no_grad()
def evaluate(model: PipelinedModel, data: RunData, step: int) -> dict[str, Any]:
    """Return means over the held-out batches, by the names of `StepMetrics`; none on ranks without the last stage.

    step: how many are done. Collective.
    """
    losses, weights, drafts = [], [], []
    for stage in model.model.stages:
        stage.eval()
    with data.validation_batches() as batches:
        for batch in batches:
            criterion = model.criterion(step, batch)
            loss = model.mean_losses(model.forward_backward(batch, criterion), criterion)
            if loss is not None:
                losses.append(loss)
                if model.num_targets is not None:
                    weights.append(model.num_targets)
            if criterion.greedy:
                drafts.append(_accepted(model, criterion))
    for stage in model.model.stages:
        stage.train()
    if not losses:
        return {}
    if model.weighs_targets:
        shares = torch.stack(weights) / torch.stack(weights).sum()
        mean = (torch.stack(losses) * shares.unsqueeze(-1)).sum(0)
    else:
        mean = torch.stack(losses).mean(0)
    metrics: dict[str, Any] = {"eval_loss": mean[0].item()}
    if drafts:
        both = torch.stack(drafts).sum(0)
        model.all_reduce("drafts", "accepted drafts", both, model.job.place.group(*DENSE))
        metrics["eval_mtp_loss"] = mean[1:].tolist()
        metrics["acceptance_length"] = 1 + (both[0] / both[1]).item()
    return metrics


def _accepted(model: PipelinedModel, criterion: MicroBatchLoss) -> Tensor:
    """See `accepted`; what the model says of tokens of other context-parallel ranks is fetched from them."""
    greedy, targets = map(torch.cat, zip(*criterion.greedy))
    length = model.config.train.sequence_length
    columns = torch.cat([torch.arange(*chunk, device=greedy.device) for chunk in model.split.chunks(length)])
    main = greedy.new_zeros(len(greedy), length)
    main[:, columns] = greedy[..., 0]
    model.all_reduce("drafts", "the likeliest tokens", main, model.job.place.group("cp"))
    return accepted(greedy, targets, main, columns)
