"""How large a model is and how much it computes, from its configuration alone: its layers are built on the meta device.

    parameter_counts(config).total                      as published for the model
    flops_per_token(config, sequence_length).forward    what MFU is a fraction of
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, cast

import torch

from dualpipe.models.decoder import Layer, SparseMLP
from dualpipe.models.hub import HubConfig
from dualpipe.nn import GroupedLinear, Linear


class ParameterCounts(NamedTuple):
    """Numbers of parameters; `active`: those that one token meets, with the embedding, of which it reads a row."""

    total: int
    active: int
    embedding: int  # of `active`, the input embedding alone


class Flops(NamedTuple):
    """Floating-point operations of matrix products for one token; a multiplication and an addition are two."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


def parameter_counts(config: HubConfig) -> ParameterCounts:
    """The parameters of the whole model; a tied embedding counts once. Of layers for multi-token prediction those that
    are trained."""
    embedding = config.vocab_size * config.hidden_size
    total = active = embedding + config.hidden_size + (0 if config.tie_word_embeddings else embedding)
    for index in config.all_layers:
        layer = meta_layer(config, index)
        inside = sum(param.numel() for param in layer.parameters())
        total += inside
        active += inside
        if isinstance(layer.mlp, SparseMLP):
            stacked, gate = sum(param.numel() for param in layer.mlp.experts.parameters()), layer.mlp.gate
            active += stacked * gate.top_k // gate.out_features - stacked
    return ParameterCounts(total, active, embedding)


def flops_per_token(config: HubConfig, sequence_length: int, *, causal: bool = False) -> Flops:
    """What the whole model computes for sequences of `sequence_length`; the backward takes twice the forward. causal:
    count the scores that attention needs, of the positions that a token sees. Without, as is usual for MFU (Chowdhery
    et al., arXiv:2204.02311) and as a counter of matrix products finds, those of all pairs of positions."""
    layers = range(config.num_hidden_layers)
    forward = sum(layer_flops(config, index, sequence_length, causal=causal) for index in layers)
    forward += last_flops(config, sequence_length, causal=causal)
    return Flops(forward, 2 * forward)


def last_flops(config: HubConfig, sequence_length: int, *, causal: bool = False) -> float:
    """Operations for a token, forward, of what the last stage always has: the head, layers for multi-token prediction
    that are trained, and the head once more for each of them."""
    predictions = sum(layer_flops(config, index, sequence_length, causal=causal) for index in config.mtp_layers)
    return (1 + config.mtp_depth) * head_flops(config) + predictions


def head_flops(config: HubConfig) -> float:
    """Operations of the head for a token, forward."""
    return 2.0 * config.hidden_size * config.vocab_size


def layer_flops(config: HubConfig, index: int, sequence_length: int, *, causal: bool = False) -> float:
    """Operations of a layer for a token, forward; see `flops_per_token`."""
    layer, products = meta_layer(config, index), 0.0
    top_k = layer.mlp.gate.top_k if isinstance(layer.mlp, SparseMLP) else 0
    for module in layer.modules():
        if isinstance(module, Linear | GroupedLinear):
            uses = top_k if isinstance(module, GroupedLinear) else 1
            products += 2.0 * uses * module.in_features * module.out_features
    return products + attention_flops(config, index, sequence_length, causal=causal)


def attention_flops(config: HubConfig, index: int, sequence_length: int, *, causal: bool = False) -> float:
    """Operations of a layer's scores and of what they weight, for a token, forward; see `flops_per_token`."""
    attention = meta_layer(config, index).self_attn
    seen = float(sequence_length)  # positions that a token sees, itself included, on average over a sequence
    if causal:
        window = min(attention.window or sequence_length, sequence_length)
        seen = (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length
    return 2.0 * attention.num_heads * (attention.qk_dim + attention.v_dim) * seen


@lru_cache(maxsize=1024)
def meta_layer(config: HubConfig, index: int) -> Layer:
    """The layer of this number without memory, one for all callers."""
    with torch.device("meta"):
        return cast(Layer, config.layer(index))
