"""Description of a run before its first step: the model, the ranks, the data, and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from dualpipe.models import HubConfig
from dualpipe.nn.deferral import local
from dualpipe.train.config.resolve import Resolved
from dualpipe.train.data.run_data import RunData
from dualpipe.train.data.splits import check_tokenizer
from dualpipe.train.step.stages import slow_fp8_weights
from dualpipe.train.step.step_runner import StepRunner


def count_parameters(runner: StepRunner) -> int:
    """Return the number of parameters of the whole model, tied ones counted once. Collective.

    The result is 0 on ranks that report nothing.
    """
    job = runner.job
    originals = set(runner.optimizer.parameters).difference(runner.pipeline.copied_parameters)
    count = torch.tensor(sum(local(parameter).numel() for parameter in originals), device=job.device)
    runner.all_reduce("parameters", "the number of parameters", count, job.group)
    return int(count) if runner.reports else 0


def describe_run(runner: StepRunner, data: RunData, parameters: int, unigram: float | None) -> Iterator[str]:
    """Yield lines that describe a run.

    Args:
        parameters: number of parameters of the whole model.
        unigram: validation loss of a unigram model, or None.
    """
    model = runner.model.config
    is_library_model = isinstance(model, HubConfig)
    family = model.model_type if is_library_model else f"{model.model_type} (transformers' implementation)"
    text, validation = data.splits
    yield (
        f"{family}: {parameters:,} parameters in {runner.schedule.num_stages} stages on "
        f"{_ranks(runner)}, schedule {runner.schedule.name}, {runner.config.train.dtype}\n"
        f"data: {text.num_tokens:,} tokens in {text.num_documents:,} documents for training, "
        f"{validation.num_tokens:,} in {validation.num_documents:,} for validation"
    )
    if is_library_model:
        yield ("load_max_over_mean in the metrics: 1 if all experts get the same number of tokens, "
               f"{model.num_experts / model.num_experts_per_tok:g} (experts / top_k) if one gets every token")
    elif model.num_experts:
        yield "the loss is the cross-entropy alone: the balance loss of transformers is not added"
    yield from _validation_notes(runner, data)
    if unigram is not None:
        yield f"a unigram model of the same text has a validation loss of {unigram:.4f} nats per token"
    yield from _warnings(runner, data)


def _validation_notes(runner: StepRunner, data: RunData) -> Iterator[str]:
    """Yield notes on validation text that is shorter than a batch or was extended to a sequence."""
    config = runner.config
    length = config.train.sequence_length
    fraction = config.data.validation_fraction
    text, validation = data.splits
    total = text.num_tokens + validation.num_tokens
    if validation.num_tokens == length + 1 > fraction * total and not config.data.validation_path:
        yield (
            f"{validation.num_tokens} of {total} tokens are for validation, enough for one sequence: "
            f"data.validation_fraction = {fraction:g} would be {int(fraction * total)}"
        )
    if data.validation_windows and validation.num_tokens < data.batch_size * (length + 1):
        yield "evaluations read sequences that overlap: the validation text has fewer tokens than a batch"


def _ranks(runner: StepRunner) -> str:
    """Return the ranks as text, such as "2 x 4 cpu ranks, experts over 2"."""
    config = runner.config
    ranks = runner.schedule.num_ranks
    text = f"{ranks} {runner.job.device.type} rank{'s' if ranks > 1 else ''}"
    if config.parallel.replicas > 1:
        text = f"{config.parallel.replicas} x {text}"
    if config.parallel.ep > 1:
        text += f", experts over {config.parallel.ep}"
    if config.parallel.cp > 1:
        counts = dict.fromkeys(runner.split.counts(config.train.sequence_length))
        text += f", sequences over {config.parallel.cp} ({' or '.join(map(str, counts))} tokens each)"
    return text


def _warnings(runner: StepRunner, data: RunData) -> Iterator[str]:
    """Yield warnings about FP8 GEMMs, sequence length and tokenizer."""
    config = runner.config
    train = config.train
    tokens = train.micro_batch_size * train.sequence_length * config.parallel.ep // config.parallel.cp
    for slow in slow_fp8_weights(runner.model, tokens, runner.job.device):
        yield f"WARNING: slower in FP8 than in bfloat16, see dtypes.products and rules: {slow}"
    positions = check_positions(runner.resolved)
    tokenizer = check_tokenizer(data.splits.train.packed, config.init.from_hf)
    for warning in (positions, tokenizer):
        if warning:
            yield f"WARNING: {warning}"


def check_positions(resolved: Resolved) -> str:
    """Return a warning if sequences are longer than the model's config.json allows, else ""."""
    length = resolved.config.train.sequence_length
    positions = resolved.positions
    if positions is None or length <= positions:
        return ""
    path = Path(resolved.config.model_path)
    return (f"train.sequence_length = {length} exceeds the model's {positions} positions (max_position_embeddings); "
            f"lower it, or extend the rotary embedding with YaRN in {path}")
