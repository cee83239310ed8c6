"""A directory of transformers as a model to compare: the uncut model as transformers runs it, and its stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from dualpipe.hf import load_stages
from dualpipe.train.model_parity.models.cut_model import NamedStage, Tensors, policy_of, storage_dtype

SEQUENCE_LENGTH = 32
EAGER = "eager"  # transformers' own implementation of experts, a loop over them


class HubModel:
    """A causal language model of transformers, on random tokens; the loss is the mean cross-entropy.

    Raises ValueError for a directory without config.json or safetensors, or with a quantized checkpoint.
    """

    num_chunks = 4
    schedule = "dualpipev"

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model {str(folder)!r} has no config.json; give a directory that transformers loads a "
                             "causal language model from, or module:function")
        if not list(folder.glob("*.safetensors")):
            raise ValueError(f"--model {str(folder)!r} has no *.safetensors; give a directory with weights")
        disable_progress_bar()  # each stage and each rank would show its own
        self._folder = folder
        self._config = AutoConfig.from_pretrained(folder)
        if getattr(self._config, "quantization_config", None) is not None:
            raise ValueError(f"--model {str(folder)!r} is quantized; parity compares with transformers' own model, "
                             "whose gradients need weights that are not: save it dequantized")

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return transformers' own model, whose forward returns the logits."""
        causal_lm = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype, experts_implementation=EAGER)
        return _Logits(causal_lm).to(device).train()

    def build_stages(
        self, num_stages: int, mine: Sequence[int], dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
    ) -> list[NamedStage]:
        """Load the stages `mine` as training does."""
        modules = load_stages(
            self._folder, num_stages, mine, mesh=mesh, dtype=storage_dtype(dtype, mesh),
            policy=None if mesh is None else policy_of(dtype),
        )
        stages = []
        for number, module in zip(mine, modules):
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            stages.append(NamedStage(number, module.to(device), {name: name for name in names}))
        return stages

    def make_batch(self, seed: int) -> tuple[Tensors, Tensors]:
        """Return random tokens, and those that follow them."""
        generator = torch.Generator().manual_seed(seed)
        vocab_size = self._config.get_text_config().vocab_size
        rows = torch.randint(vocab_size, (self.num_chunks, SEQUENCE_LENGTH + 1), generator=generator, device="cpu")
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def compute_loss(self, *outputs_and_labels: Tensor) -> Tensor:
        """Return a micro-batch's share of the mean cross-entropy over the batch."""
        logits, labels = outputs_and_labels
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / self.num_chunks


class _Logits(nn.Module):
    """A causal language model whose forward returns nothing but logits, under the names of its own parameters."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        for name, child in causal_lm.named_children():
            self.add_module(name, child)
        self._causal_lm = [causal_lm]  # in a list: its parameters are known by their own names

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, S) -> logits (B, S, V)."""
        logits: Tensor = self._causal_lm[0](tokens, use_cache=False).logits
        return logits
