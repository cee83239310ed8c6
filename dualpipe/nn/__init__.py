"""Layers with deferrable weight gradients, routers, attention, the loss, and the segments that stages are made of."""

from dualpipe.nn.conversion import defer_weight_grads, undo_defer_weight_grads
from dualpipe.nn.embedding import Embedding
from dualpipe.nn.grouped_linear import GroupedLinear, GroupedSwiGLU
from dualpipe.nn.linear import Linear
from dualpipe.nn.loss import cross_entropy_loss
from dualpipe.nn.norm import RMSNorm
from dualpipe.nn.routing.router import ExpertGroups, Router, Scoring
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.nn.segments import Communicate, Communication, Compute, Pending, run_segments

__all__ = [
    "Communicate", "Communication", "Compute", "Embedding", "ExpertGroups", "GroupedLinear", "GroupedSwiGLU", "Linear",
    "Pending", "RMSNorm", "Router", "RouterSet", "Scoring", "cross_entropy_loss", "defer_weight_grads",
    "run_segments", "undo_defer_weight_grads",
]
