"""Balance losses on sequences that ranks share are those of whole sequences, in gradients and in metrics."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dualpipe import Pipeline
from dualpipe.models.decoder import Experts, SparseMLP
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.routing.router import Router, Scoring
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.parallel.experts.dispatcher import ExpertParallel, shard_experts
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.pipeline import PipelineError
from dualpipe.train.loss import token_weight
from ranks import run_ranks
from toys import Handed

HIDDEN, EXPERTS, TOP_K, BATCH, LENGTH, CHUNKS = 8, 4, 2, 2, 11, 3
LOSS_SCALE = 1024.0
TERMS = {"num_microbatches": CHUNKS, "balance": 0.7, "z": 0.2}


class TokenWise(nn.Module):
    """A stage whose tokens do not see each other: what ranks share is the balance loss alone."""

    def __init__(self, recompute: str, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        torch.manual_seed(0)
        routers = (Router(HIDDEN, EXPERTS, TOP_K, scoring=Scoring(score)) for score in ("softmax", "sigmoid"))
        self.mlps = nn.ModuleList(SparseMLP(router, Experts(EXPERTS, HIDDEN, 8)) for router in routers)
        self.recompute = recompute
        for param in self.double().parameters():
            nn.init.normal_(param)

    def segments(self):
        nothing = Handed()
        nothing.group = self.group  # the pipeline knows it, as that of attention over ranks
        found = [Compute(lambda x: x * 1, "x", "x"), Communicate(nothing, "x", "x")]
        for mlp in self.mlps:
            found += [Compute(lambda x: x * 1, "x", "normed"), *mlp.segments(lambda part: part == self.recompute),
                      Compute(torch.add, ("x", "y"), "x")]
        return found

    def forward(self, x):
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def whole_step(level: str, steps: int) -> tuple[dict, dict]:
    stage = TokenWise("")
    routers = RouterSet([stage], level=level, **TERMS)
    for _ in range(steps):
        stage.zero_grad()
        with routers.step():
            for x in data().split(BATCH):
                (stage(x).square().mean() / CHUNKS).backward()
    return {name: p.grad for name, p in stage.named_parameters()}, routers.metrics()


def data() -> torch.Tensor:
    return torch.randn(BATCH * CHUNKS, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sharing_step(rank: int, cp: int, ep: int, level: str, recompute: str, fails: str) -> float | str:
    """The worst error of gradients and metrics; the error's text where one rank `fails`."""
    mesh = build_mesh(1, 1, ep, torch.device("cpu"), cp=cp)
    place, stage = Mesh.of(mesh), TokenWise(recompute, mesh["cp"].get_group())
    split = SequenceSplit(place.rank("cp"), cp)
    weight = token_weight(split, LENGTH)
    for mlp in stage.mlps if ep > 1 else ():
        mlp.dispatcher = ExpertParallel(EXPERTS, mesh["ep"]).dispatcher()
        shard_experts(mlp, mesh["ep"])
    routers = RouterSet([stage], level=level, sequence_group=mesh["cp"].get_group(), group=dist.group.WORLD,
                        replicas=cp * ep, weight=weight, **TERMS)
    pipe = Pipeline([stage], process_group=place.group("pp"), schedule="1f1b")
    if fails and rank == 1:
        hook = partial(fail_in_backward if fails == "backward" else fail, [])
        stage.mlps[1].gate.register_forward_hook(hook)
    own, steps = data()[:, split.token_indices(LENGTH)], 2 if level == "global" else 1
    try:
        for _ in range(steps):
            pipe.zero_grad()
            with routers.step(loss_scale=LOSS_SCALE):
                pipe.step(own, num_chunks=CHUNKS, labels=(own,),
                          criterion=lambda y, _: LOSS_SCALE * y.square().mean() * weight / CHUNKS)
    except PipelineError as error:
        return str(error)
    expected, metrics = whole_step(level, steps)
    errors = [abs(float(value - metrics[name])) for name, value in routers.metrics().items()]
    for name, param in stage.named_parameters():
        grad, whole = param.grad / LOSS_SCALE, expected[name]
        if ep > 1 and "experts" in name:  # each rank of cp has the same part; all of ep send it what they have
            grad = grad.to_local()
            whole = whole.chunk(ep)[place.rank("ep")]
            dist.all_reduce(grad, group=place.group("cp"))
        else:
            dist.all_reduce(grad)
        errors.append(float((grad / (cp * ep) - whole).norm() / whole.norm()))
    return max(errors)


def fail(calls, module, args, output):
    calls.append(1)
    if len(calls) == 2:
        raise ValueError("out of luck")


def fail_in_backward(calls, module, args, output):
    calls.append(1)
    if len(calls) == 2:
        output[0].register_hook(lambda grad: 1 / 0)


@pytest.mark.parametrize("level", ["microbatch", "sequence", "global"])
def test_losses_of_every_level_are_those_of_whole_sequences(level):
    assert max(run_ranks(sharing_step, 2, 2, 1, level, "", "")) < 1e-12


@pytest.mark.parametrize("recompute", ["layer", "dispatch"])
def test_loads_are_added_up_once_where_routing_is_computed_again(recompute):
    assert max(run_ranks(sharing_step, 2, 2, 1, "sequence", recompute, "")) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["", "layer", "dispatch"])
@pytest.mark.parametrize("level", ["microbatch", "sequence", "global"])
def test_beside_experts_on_other_ranks(level, recompute):
    assert max(run_ranks(sharing_step, 4, 2, 2, level, recompute, "")) < 1e-12
    assert max(run_ranks(sharing_step, 3, 3, 1, level, recompute, "")) < 1e-12


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_leaves_nobody_waiting(where):
    began = time.monotonic()
    found = run_ranks(sharing_step, 2, 2, 1, "sequence", "", where)
    assert all("rank 1" in text or "out of luck" in text or "division" in text for text in found), found
    assert time.monotonic() - began < 20, "not by the group's timeout of 30 s"


def test_tokens_of_whole_sequences_weigh_alike():
    splits = [SequenceSplit(rank, 2) for rank in range(2)]
    assert [split.counts(LENGTH)[split.rank] * token_weight(split, LENGTH) ** -1 for split in splits] == [5.5, 5.5]
