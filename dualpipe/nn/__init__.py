"""Modules whose weight gradient can be deferred, and what the models share."""

from dualpipe.nn.grouped_linear import GroupedLinear, GroupedSwiGLU
from dualpipe.nn.layers import Embedding, Linear, RMSNorm, cross_entropy_loss, defer_weight_grads
from dualpipe.nn.router import Router
from dualpipe.nn.router_set import RouterSet

__all__ = [
    "Embedding", "GroupedLinear", "GroupedSwiGLU", "Linear", "RMSNorm", "Router", "RouterSet", "cross_entropy_loss",
    "defer_weight_grads",
]
