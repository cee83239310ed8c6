"""A transformers directory as a model to compare: transformers' own model, and this library's stages of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
EAGER = "eager"  # transformers' plain implementation of experts, a loop over them


class HubModel:
    """A causal language model of transformers on random tokens, with the mean cross-entropy as its loss.

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
        disable_progress_bar()  # every stage on every rank would show one
        self._folder = folder
        self._config = AutoConfig.from_pretrained(folder)
        if getattr(self._config, "quantization_config", None) is not None:
            raise ValueError(f"--model {str(folder)!r} is quantized, but transformers' own model has gradients for "
                             "unquantized weights only; save it dequantized")

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return transformers' own model, with a forward that returns the logits."""
        causal_lm = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype, experts_implementation=EAGER)
        return _Logits(causal_lm).to(device).train()

    def build_stages(
        self, num_stages: int, numbers: Sequence[int], dtype: torch.dtype, device: torch.device,
        mesh: DeviceMesh | None,
    ) -> list[NamedStage]:
        """Load the stages with these numbers as training does."""
        modules = load_stages(
            self._folder, num_stages, numbers, mesh=mesh, dtype=storage_dtype(dtype, mesh),
            policy=None if mesh is None else policy_of(dtype),
        )
        stages = []
        for number, module in zip(numbers, modules):
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            stages.append(NamedStage(number, module.to(device), {name: name for name in names}))
        return stages

    def make_batch(self, seed: int) -> tuple[Tensors, Tensors, Mapping[str, Tensor]]:
        """Return random tokens and the next token of each, both (B, S), and no side inputs."""
        generator = torch.Generator().manual_seed(seed)
        vocab_size = self._config.get_text_config().vocab_size
        rows = torch.randint(vocab_size, (self.num_chunks, SEQUENCE_LENGTH + 1), generator=generator, device="cpu")
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), {}

    def compute_loss(self, *outputs_and_labels: Tensor) -> Tensor:
        """Return the contribution of a micro-batch to the mean cross-entropy over the batch."""
        logits, labels = outputs_and_labels
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / self.num_chunks


class _Logits(nn.Module):
    """A causal language model with a forward that returns the logits alone. Parameters keep their names."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        for name, child in causal_lm.named_children():
            self.add_module(name, child)
        self._causal_lm = [causal_lm]  # in a list, so that it is no submodule and adds no second names

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) for tokens (B, S)."""
        logits: Tensor = self._causal_lm[0](tokens, use_cache=False).logits
        return logits
