"""The description of a run before its first step: the model, the ranks, the data, and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from dualpipe.models import HubConfig
from dualpipe.nn.deferral import local
from dualpipe.train.config.resolve import Resolved
from dualpipe.train.config.schema import Config
from dualpipe.train.data.run_data import RunData
from dualpipe.train.data.splits import check_tokenizer
from dualpipe.train.step.stages import slow_products
from dualpipe.train.step.step_runner import StepRunner


def count_parameters(runner: StepRunner) -> int:
    """Return the number of the whole model's parameters, tied ones once. Collective."""
    job = runner.job
    own = set(runner.optimizer.parameters).difference(runner.pipeline.copied_parameters)
    count = torch.tensor(sum(local(parameter).numel() for parameter in own), device=job.device)
    runner.all_reduce("parameters", "the number of parameters", count, job.group)
    return int(count) if runner.reports else 0


def describe_run(runner: StepRunner, data: RunData, parameters: int, unigram: float | None) -> Iterator[str]:
    """Yield lines about a run. parameters: of the whole model. unigram: a unigram model's held-out loss, or None."""
    config, model = runner.config, runner.model.config
    train, text, held_out = config.train, *_sum_up(data)
    is_own = isinstance(model, HubConfig)
    family = model.model_type if is_own else f"{model.model_type} (transformers' implementation)"
    yield (
        f"{family}: {parameters:,} parameters in {runner.schedule.num_stages} stages on "
        f"{_ranks(runner)}, schedule {runner.schedule.name}, {train.dtype}\n"
        f"data: {text.num_tokens:,} tokens in {text.num_documents:,} documents to train on, "
        f"{held_out.num_tokens:,} in {held_out.num_documents:,} held out"
    )
    if is_own:
        yield ("load_max_over_mean in the metrics: 1 where all experts get as many tokens, "
               f"{model.num_experts / model.num_experts_per_tok:g} (experts / top_k) where one gets every token")
    elif model.num_experts:
        yield "the loss is the cross-entropy alone: the balance loss of transformers is not added"
    total, fraction = text.num_tokens + held_out.num_tokens, config.data.validation_fraction
    if data.loader.mixture is not None:
        yield _describe_sources(config, data)
    elif held_out.num_tokens == train.sequence_length + 1 > fraction * total and not config.data.validation_path:
        yield (
            f"{held_out.num_tokens} of {total} tokens are held out, so that there is a sequence to evaluate on: "
            f"data.validation_fraction = {fraction:g} would be {int(fraction * total)}"
        )
    if data.is_masked:
        yield _describe_conversations(data)
    elif data.validation_windows and held_out.num_tokens < data.batch_size * (train.sequence_length + 1):
        yield "evaluations read sequences that overlap: the held-out text has fewer tokens than a batch"
    if unigram is not None:
        yield f"a unigram model of the same text has a held-out loss of {unigram:.4f} nats per token"
    yield from _warnings(runner, data)


class _Amount(NamedTuple):
    """Sizes of a text."""

    num_tokens: int
    num_documents: int


def _sum_up(data: RunData) -> tuple[_Amount, _Amount]:
    """Return the sizes of the training and the validation text of all sources."""
    streams = list(zip(*data.sources))
    if data.sources[0].validation.packed is not data.sources[0].train.packed:
        streams[1] = streams[1][:1]  # one text for all sources
    train, validation = (_Amount(sum(each.num_tokens for each in part), sum(each.num_documents for each in part))
                         for part in streams)
    return train, validation


def _describe_sources(config: Config, data: RunData) -> str:
    """Describe the sources of a mixture."""
    mixture = data.loader.mixture
    assert mixture is not None, "there are several sources"
    lines = ["sources, by the tokens of all steps:"]
    for source, splits, places in zip(config.data.sources, data.sources, mixture.places.tolist()):
        lines.append(f"  {places / mixture.places.sum():7.2%}  {source.path}: {splits.train.num_tokens:,} tokens")
    return "\n".join(lines)


def _describe_conversations(data: RunData) -> str:
    """Describe the sequences of conversations."""
    loader = data.loader
    text = f"conversations in {loader.num_windows:,} sequences, which hold whole ones as far as they fit"
    if loader.num_silent:
        text += f"; {loader.num_silent:,} more are left out, as no token in them counts for the loss"
    return text


def _ranks(runner: StepRunner) -> str:
    """The ranks in words, such as "2 x 4 cpu ranks, experts over 2"."""
    config, ranks = runner.config, runner.schedule.num_ranks
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
    config = runner.config
    train, parallel = config.train, config.parallel
    tokens = train.micro_batch_size * train.sequence_length * parallel.ep // parallel.cp
    if data.is_masked and not config.data.separate_documents:
        yield "WARNING: conversations in one sequence see each other; set data.separate_documents = true"
    for slow in slow_products(runner.model, tokens, runner.job.device):
        yield f"WARNING: slower in FP8 than in bfloat16, see dtypes.products and rules: {slow}"
    positions = check_positions(runner.resolved)
    tokenizers = [check_tokenizer(splits.train.packed, config.init.from_hf) for splits in data.sources]
    for warning in filter(None, (positions, *tokenizers)):
        yield f"WARNING: {warning}"


def check_positions(resolved: Resolved) -> str:
    """Return what to say of sequences that are longer than the model's config.json provides for, "" where none are."""
    length, positions = resolved.config.train.sequence_length, resolved.positions
    if positions is None or length <= positions:
        return ""
    path = Path(resolved.config.model_path)
    return (f"train.sequence_length = {length} is beyond the {positions} positions that the model is made for "
            f"(max_position_embeddings); lower it, or stretch the rotary embedding by YaRN in {path}")
