"""The kernels that a run chooses at its start: GEMMs of the experts, and attention. A replay uses the same."""

from __future__ import annotations

from typing import NamedTuple

from dualpipe.nn.attention import AttentionChoice, choose_attention_kernel, head_size
from dualpipe.train.step.expert_gemm_choice import ExpertWork, GemmChoice, choose_expert_gemm
from dualpipe.train.step.step_runner import PipelinedModel


class KernelChoice(NamedTuple):
    """The kernels of a run."""

    expert_gemm: GemmChoice
    attention: AttentionChoice


def choose_kernels(model: PipelinedModel) -> KernelChoice:
    """Choose the kernels that [model] asks for, and set those of the experts. Collective.

    `use_attention_kernel` applies the choice of attention. Raises ValueError, on all ranks, if one does not run.
    """
    stages = model.model.stages
    ranks = model.job.ranks
    gemm = choose_expert_gemm(stages, model.config.model.expert_gemm, _expert_work(model), ranks)
    return KernelChoice(gemm, ranks.agree(lambda: _choose_attention(model)))


def _expert_work(model: PipelinedModel) -> ExpertWork:
    """Return the work of a rank's expert layers in one micro-batch, with the same number of tokens for all experts."""
    config = model.config
    tokens = config.train.micro_batch_size * config.train.sequence_length // config.parallel.cp
    rows = tokens * getattr(model.resolved.model, "num_experts_per_tok", 0)
    return ExpertWork(rows, config.parallel.ep, model.resolved.dtypes.compute, model.job.device)


def _choose_attention(model: PipelinedModel) -> AttentionChoice:
    """Choose the kernel of causal attention for the heads of this rank's stages; ValueError if it does not run."""
    sizes = [
        size for stage in model.model.stages for module in stage.modules() if (size := head_size(module)) is not None
    ]
    return choose_attention_kernel(
        model.config.model.attention, model.job.device, sizes, dtype=model.resolved.dtypes.compute)
