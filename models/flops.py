"""Parameter counts and FLOPs of a model from its configuration alone: layers are built on the meta device.

    parameter_counts(config).total                      as published for the model
    flops_per_token(config, sequence_length).forward    the numerator of model FLOPs utilization (MFU)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import nn

from dualpipe.models.decoder import Layer, SparseMLP
from dualpipe.models.hub import HubConfig
from dualpipe.nn import GroupedLinear, Linear


class ParameterCounts(NamedTuple):
    """Numbers of parameters of a model."""

    total: int
    active: int  # used by one token; counts the whole embedding, of which a token reads one row
    embedding: int  # the input embedding alone, part of `active`


class Flops(NamedTuple):
    """Floating-point operations of GEMMs for one token; a multiplication and an addition count as two."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Operations of the forward and the backward together."""
        return self.forward + self.backward


def parameter_counts(config: HubConfig) -> ParameterCounts:
    """Count the parameters of a whole model, on the meta device.

    A tied embedding counts once. Layers for multi-token prediction count if they are trained.
    """
    embedding = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else embedding
    final_norm = config.hidden_size
    total = embedding + final_norm + head
    inactive = 0
    for index in config.all_layers:
        layer = meta_layer(config, index)
        total += sum(param.numel() for param in layer.parameters())
        if isinstance(layer.mlp, SparseMLP):
            gate = layer.mlp.gate
            stacked = sum(param.numel() for param in layer.mlp.experts.parameters())
            inactive += stacked - stacked * gate.top_k // gate.out_features
    return ParameterCounts(total, total - inactive, embedding)


def flops_per_token(config: HubConfig, sequence_length: int, *, causal: bool = False) -> Flops:
    """Count the FLOPs of a whole model for each token of sequences of `sequence_length` tokens.

    The backward takes twice the FLOPs of the forward. causal: count only the scores of positions that a token attends
    to. The default counts the scores of all pairs of positions, as is usual for MFU (Chowdhery et al.,
    arXiv:2204.02311) and as a counter of GEMM operations finds them.
    """
    layers = range(config.num_hidden_layers)
    forward = sum(layer_flops(config, index, sequence_length, causal=causal) for index in layers)
    forward += last_flops(config, sequence_length, causal=causal)
    return Flops(forward, 2 * forward)


class PartFlops(NamedTuple):
    """Forward FLOPs per token of a layer or of the head.

    matrices: those of its matrices, adapters included. trained: those of its trained matrices alone. scores: those of
    attention.
    """

    matrices: float
    trained: float
    scores: float = 0.0


def trained_flops(parts: Iterable[PartFlops]) -> Flops:
    """Sum the FLOPs of a model with frozen weights, which have no weight gradient.

    The backward begins at the first part with a trained matrix. parts: in the order of the forward.
    """
    forward = 0.0
    backward = 0.0
    for part in parts:
        forward += part.matrices + part.scores
        if part.trained or backward:
            backward += part.matrices + part.trained + 2 * part.scores  # input gradients, weight gradients, attention
    return Flops(forward, backward)


def adapted_flops_per_token(config: HubConfig, whole: nn.Module, sequence_length: int) -> Flops:
    """Count the FLOPs of a model with adapters, `whole` on the meta device; see `flops_per_token`."""
    parts = []
    for name, layer in cast(nn.Module, whole.layers).named_children():
        scores = attention_flops(config, int(name), sequence_length)
        parts.append(PartFlops(_matrix_flops(layer), _matrix_flops(layer, trained=True), scores))
    head = cast(nn.Module, whole.lm_head)
    parts.append(PartFlops(_matrix_flops(head), _matrix_flops(head, trained=True)))
    return trained_flops(parts)


def last_flops(config: HubConfig, sequence_length: int, *, causal: bool = False) -> float:
    """Count the forward FLOPs per token that the last stage always has.

    These are the head, the trained layers for multi-token prediction, and the head once more for each of them.
    """
    predictions = sum(layer_flops(config, index, sequence_length, causal=causal) for index in config.mtp_layers)
    return (1 + config.mtp_depth) * head_flops(config) + predictions


def head_flops(config: HubConfig) -> float:
    """Count the forward FLOPs per token of the head."""
    return 2.0 * config.hidden_size * config.vocab_size


def layer_flops(config: HubConfig, index: int, sequence_length: int, *, causal: bool = False) -> float:
    """Count the forward FLOPs per token of a layer; see `flops_per_token`."""
    matrix_flops = _matrix_flops(meta_layer(config, index))
    return matrix_flops + attention_flops(config, index, sequence_length, causal=causal)


def _matrix_flops(part: nn.Module, *, trained: bool = False) -> float:
    """Count the forward FLOPs per token of the matrices of a layer or of the head; `trained`: of the trained ones."""
    top_k = part.mlp.gate.top_k if isinstance(part, Layer) and isinstance(part.mlp, SparseMLP) else 0
    flops = 0.0
    for module in part.modules():
        if isinstance(module, Linear | GroupedLinear) and (module.weight.requires_grad or not trained):
            uses = top_k if isinstance(module, GroupedLinear) else 1
            flops += 2.0 * uses * module.in_features * module.out_features
    return flops


def attention_flops(config: HubConfig, index: int, sequence_length: int, *, causal: bool = False) -> float:
    """Count the forward FLOPs per token of a layer's scores and weighted values; see `flops_per_token`."""
    attention = meta_layer(config, index).self_attn
    attended = float(sequence_length)  # positions that a token attends to, the mean over a sequence
    if causal:
        window = min(attention.window or sequence_length, sequence_length)
        attended = (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length
    return 2.0 * attention.num_heads * (attention.qk_dim + attention.v_dim) * attended


@lru_cache(maxsize=1024)
def meta_layer(config: HubConfig, index: int) -> Layer:
    """Return the layer with this global index on the meta device, the same object for all callers."""
    with torch.device("meta"):
        return cast(Layer, config.layer(index))
