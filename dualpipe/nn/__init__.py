"""Modules whose weight gradient can be deferred, and what the models share."""

from dualpipe.nn.grouped_linear import GroupedLinear, GroupedSwiGLU
from dualpipe.nn.layers import Embedding, Linear, RMSNorm, cross_entropy_loss, defer_weight_grads
from dualpipe.nn.router import Router
from dualpipe.nn.router_set import RouterSet
from dualpipe.nn.segments import Communicate, Communication, Compute, Pending, run_segments

__all__ = [
    "Communicate", "Communication", "Compute", "Embedding", "GroupedLinear", "GroupedSwiGLU", "Linear", "Pending",
    "RMSNorm", "Router", "RouterSet", "cross_entropy_loss", "defer_weight_grads", "run_segments",
]
