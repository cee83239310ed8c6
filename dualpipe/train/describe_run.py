"""The description of a run before its first step: model, ranks, data, kernels and warnings.

`run.json` in the output directory has the settings of the run, at every start:

    {"starts": [{"step": 0, "time": ..., "versions": {"torch": ...}, "settings": {"run": {...}, "model": {...}}}, ...]}
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dualpipe
from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.kernels.grouped_gemm_quantized import slower_in_fp8
from dualpipe.models import HubConfig
from dualpipe.nn import GroupedLinear, Linear
from dualpipe.nn.accumulators import local
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.printing import warn
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.model_config import stages_on_meta
from dualpipe.train.config.schema import Config
from dualpipe.train.data.run_data import RunData, compare_with_checkpoint
from dualpipe.train.data.token_stream import TokenStream
from dualpipe.train.kernel_choice import KernelChoice
from dualpipe.train.step import Model, StepRunner

RUN_FILE = "run.json"


def record_start(folder: Path, step: int, settings: Mapping[str, Any]) -> None:
    """Add a start to `run.json` in `folder`. A failure is a warning.

    Args:
        step: number of completed steps. The first start of a run, at 0, replaces the file.
        settings: description of the run, see `dualpipe.train.saver.describe`.
    """
    path = folder / RUN_FILE
    versions = {
        "dualpipe": dualpipe.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    time = datetime.now(UTC).isoformat(timespec="seconds")  # ISO 8601
    start = {"step": step, "time": time, "versions": versions, "settings": settings}
    try:
        is_first = step == 0 or not path.exists()
        earlier = [] if is_first else json.loads(path.read_text(encoding="utf-8"))["starts"]
        replace_file(path, json.dumps({"starts": [*earlier, start]}, indent=1, default=str) + "\n")
    except (OSError, ValueError, LookupError, TypeError) as error:  # the last three: it is not the file of a run
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        warn(f"{path} cannot be written: {reason}; training goes on, and this start is not in it")


def count_parameters(runner: StepRunner) -> int:
    """Return the number of parameters of the whole model, tied ones counted once. Collective.

    The result is 0 on ranks that report nothing.
    """
    job = runner.job
    originals = set(runner.parameters).difference(runner.pipeline.copied_parameters)
    count = torch.tensor(sum(local(parameter).numel() for parameter in originals), device=job.device)
    runner.all_reduce("parameters", "the number of parameters", count, job.group)
    return int(count) if runner.reports else 0


def unigram_loss(runner: StepRunner, data: RunData) -> float | None:
    """Return the validation loss of a unigram model of the run's text, in nats per token.

    None for a mixture, without validation text, and on ranks that report nothing.
    """
    if not runner.reports or not data.num_validation_tokens or len(data.sources) != 1:
        return None
    return data.sources[0].unigram_loss(runner.model.config.vocab_size)


def describe_run(
    runner: StepRunner, data: RunData, kernels: KernelChoice, parameters: int, unigram: float | None
) -> Iterator[str]:
    """Yield lines that describe a run.

    Args:
        parameters: number of parameters of the whole model.
        unigram: validation loss of a unigram model, or None.
    """
    model = runner.model.config
    is_library_model = isinstance(model, HubConfig)
    family = model.model_type if is_library_model else f"{model.model_type} (transformers' implementation)"
    text, validation = _text_sizes(data)
    counted = f"{parameters:,} parameters"
    if runner.config.lora.is_enabled:
        (base,) = stages_on_meta(model)
        num_frozen = sum(param.numel() for param in base.parameters())
        counted = f"{parameters:,} parameters of adapters beside {num_frozen:,} frozen ones"
    yield (
        f"{family}: {counted} in {runner.schedule.num_stages} stages on "
        f"{_ranks(runner)}, schedule {runner.schedule.name}, {runner.config.train.dtype}\n"
        f"data: {text.num_tokens:,} tokens in {text.num_documents:,} documents for training, "
        f"{validation.num_tokens:,} in {validation.num_documents:,} for validation"
    )
    if is_library_model:
        yield ("load_max_over_mean in the metrics: 1 if all experts get the same number of tokens, "
               f"{model.num_experts / model.num_experts_per_tok:g} (experts / top_k) if one gets every token")
    elif model.num_experts:
        yield "the loss is the cross-entropy alone: the balance loss of transformers is not added"
    if data.loader.mixture is not None:
        yield _describe_sources(runner.config, data)
    if data.has_loss_mask:
        yield _describe_conversations(data)
    ends = sorted({repr(splits.train.packed.end_token) for splits in data.sources if splits.train.packed.end_token})
    if ends:
        yield f"documents end with {' or '.join(ends)}"
    yield from _validation_notes(runner, data)
    if unigram is not None:
        yield f"a unigram model of the same text has a validation loss of {unigram:.4f} nats per token"
    yield from _warnings(runner, data)
    if kernels.expert_gemm.text:
        yield kernels.expert_gemm.text
    if runner.job.device.type == "cuda":
        yield str(kernels.attention)


class _TextSize(NamedTuple):
    """Size of a text."""

    num_tokens: int
    num_documents: int


def _text_sizes(data: RunData) -> tuple[_TextSize, _TextSize]:
    """Return the sizes of the training and the validation text of all sources."""
    train = [splits.train for splits in data.sources]
    validation = [splits.validation for splits in data.evaluated]
    return _total_size(train), _total_size(validation)


def _total_size(streams: Sequence[TokenStream]) -> _TextSize:
    """Return the size of several texts together."""
    return _TextSize(
        sum(stream.num_tokens for stream in streams), sum(stream.num_documents for stream in streams))


def _describe_sources(config: Config, data: RunData) -> str:
    """Return the share and the size of every source of a mixture as text."""
    mixture = data.loader.mixture
    assert mixture is not None, "a run with one source has no mixture"
    shares = (mixture.places / mixture.places.sum()).tolist()
    lines = ["sources, by their share of the tokens:"]
    for source, splits, share in zip(config.data.sources, data.sources, shares):
        lines.append(f"  {share:7.2%}  {source.path}: {splits.train.num_tokens:,} tokens")
    return "\n".join(lines)


def _describe_conversations(data: RunData) -> str:
    """Return the number of sequences of conversations as text."""
    loader = data.loader
    text = (f"conversations: packed whole into {loader.num_conversation_windows:,} sequences, except those that are "
            "longer than one")
    if loader.num_left_out:
        text += f"; {loader.num_left_out:,} more sequences are left out because no token in them counts for the loss"
    return text


def _validation_notes(runner: StepRunner, data: RunData) -> Iterator[str]:
    """Yield notes on validation text that is shorter than a batch or was extended to a sequence."""
    config = runner.config
    length = config.train.sequence_length
    fraction = config.data.validation_fraction
    text, validation = _text_sizes(data)
    total = text.num_tokens + validation.num_tokens
    is_split = not config.data.validation_path and data.loader.mixture is None
    is_one_sequence = validation.num_tokens == length + 1
    if is_split and is_one_sequence and validation.num_tokens > fraction * total:
        yield (
            f"{validation.num_tokens} of {total} tokens are for validation, enough for one sequence: "
            f"data.validation_fraction = {fraction:g} would be {int(fraction * total)}"
        )
    if data.has_loss_mask:  # batches of conversations do not overlap: one is left incomplete instead
        return
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
    if data.has_loss_mask and not config.data.separate_documents:
        yield "WARNING: conversations in one sequence see each other; set data.separate_documents = true"
    for slow in slow_fp8_weights(runner.model, tokens, runner.job.device):
        yield f"WARNING: slower in FP8 than in bfloat16, see dtypes.gemm_precision and rules: {slow}"
    positions = check_positions(runner.resolved)
    tokenizers = [compare_with_checkpoint(splits.train.packed, config.init.from_hf) for splits in data.sources]
    for warning in (positions, *tokenizers):
        if warning:
            yield f"WARNING: {warning}"


def slow_fp8_weights(model: Model, tokens: int, device: torch.device) -> list[str]:
    """Return the quantized weights whose GEMMs are slower in FP8 than in bfloat16, with the reason; empty on CPU.

    tokens: number of tokens of a micro-batch on all expert-parallel ranks.
    """
    slow: list[str] = []
    if not any(dtypes.format for dtypes in model.plan.tensors.values()):
        return slow
    top_k = model.config.num_experts_per_tok
    for stage in model.stages:
        for name, module in stage.named_modules():
            if not isinstance(module, Linear | GroupedLinear) or module.gemm_precision == "weight-only":
                continue
            dtypes = model.plan.of(f"{name}.weight")
            if not (dtypes.format and dtypes.format.computes and dtypes.compute in HALF):
                continue
            num_experts = 1
            rows: float = tokens
            if isinstance(module, GroupedLinear):
                num_experts = module.num_groups
                rows = tokens * top_k / num_experts
            shape = (num_experts, module.out_features, module.in_features)
            reason = slower_in_fp8(dtypes.format, shape, rows, device)
            if reason:
                slow.append(f"{name.rpartition('.')[2]}: {reason}")
    return list(dict.fromkeys(slow))  # once for all layers


def check_positions(resolved: Resolved) -> str:
    """Return a warning if sequences are longer than the model's config.json allows, else ""."""
    length = resolved.config.train.sequence_length
    positions = resolved.positions
    if positions is None or length <= positions:
        return ""
    path = Path(resolved.config.model_path)
    return (f"train.sequence_length = {length} exceeds the model's {positions} positions (max_position_embeddings); "
            f"lower it, or extend the rotary embedding with YaRN in {path}")
