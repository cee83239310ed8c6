"""Routers and tokens for tests of routing."""

import torch

from dualpipe.nn.routing.router import ExpertGroups, Router, Scoring

H, E = 16, 12
V3 = dict(scoring=Scoring("sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5),
          groups=ExpertGroups(n_group=4, topk_group=2, group_best=2), correction_bias=True, wide_logits=True)
OPTIONS = {
    "softmax": {},
    "normalised": dict(scoring=Scoring(norm_topk_prob=True)),
    "deepseek-v2": dict(scoring=Scoring(routed_scaling_factor=16.0), groups=ExpertGroups(4, 2), wide_logits=True),
    "deepseek-v3": V3,
    "gpt-oss": dict(scoring=Scoring("softmax_topk"), bias=True),
}


def router(top_k=3, dtype=torch.float64, seed=0, experts=E, **options):
    torch.manual_seed(seed)
    made = Router(H, experts, top_k, **options)
    torch.nn.init.normal_(made.weight)
    if made.e_score_correction_bias is not None:
        made.e_score_correction_bias.normal_(std=0.2)
    return made.to(dtype)


def tokens(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, H, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def over_experts(weights_TK, experts_TK, experts=E):
    """(T, E), zero where not chosen, so that the order of a token's experts does not matter."""
    return weights_TK.new_zeros(len(weights_TK), experts).scatter(1, experts_TK, weights_TK)
