"""The routers of a model that several ranks hold: sums, averages, biases, and what is refused."""


import pytest
import torch
import torch.distributed as dist
from torch import nn

from dualpipe.nn import Linear, Router, Scoring
from dualpipe.nn.routing.losses import LOSSES, RouterLoss, count_load, load_of
from dualpipe.nn.routing.router_set import RouterSet
from ranks import run_ranks

H, E, K = 8, 6, 2


def stage(*layers, bias=True):
    """Routers named by their layer, with weights of their own."""
    made = nn.ModuleDict()
    for layer in layers:
        torch.manual_seed(layer)
        made[f"layer{layer}"] = Router(H, E, K, scoring=Scoring("sigmoid"), correction_bias=bias).double()
        made[f"layer{layer}"].e_score_correction_bias = torch.zeros(E) if bias else None
    return made


def tokens(count, seed):
    return torch.randn(count, 5, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(routers, stages, batches):
    """A step whose stages all get the same micro-batches; the experts that each router chose."""
    chosen = {}
    with routers.step():
        for x in batches:
            for made in stages:
                for name, router in made.items():
                    weights_TK, experts_TK = router(x)
                    weights_TK.sum().backward()
                    chosen.setdefault(name, []).append(experts_TK)
    return {name: count_load(torch.cat(experts).view(1, -1), E)[0] for name, experts in chosen.items()}


OPTIONS = dict(balance=0.5, z=0.1, bias_update_rate=0.01)


def two_steps_on_four_ranks(rank, level):
    replica, pipeline_rank = rank % 2, rank // 2
    stages = [stage(0), stage(3)] if pipeline_rank == 0 else [stage(1, 2)]
    routers = RouterSet(stages, num_microbatches=2, level=level, group=dist.group.WORLD, replicas=2, **OPTIONS)
    for step in range(2):
        run(routers, stages, tokens(8, step).tensor_split(2)[replica].tensor_split(2))
    metrics = {name: value.item() for name, value in routers.metrics().items()}
    return metrics, {name: r.e_score_correction_bias.tolist() for made in stages for name, r in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param("sequence", marks=pytest.mark.slow), "global"])
def test_four_ranks_as_one(level):
    stages = [stage(0, 1, 2, 3)]
    routers = RouterSet(stages, num_microbatches=4, level=level, **OPTIONS)
    for step in range(2):
        loads = run(routers, stages, tokens(8, step).tensor_split(4))
    metrics = routers.metrics()
    assert metrics["load_max_over_mean"] == max(load.max() / load.double().mean() for load in loads.values())
    assert metrics["dropped"] == 0
    assert 0.5 < metrics["balance_loss"] < 2 and metrics["z_loss"] > 0
    biases = {name: router.e_score_correction_bias for name, router in stages[0].items()}
    results = run_ranks(two_steps_on_four_ranks, 4, level)
    for found, of_rank in results:
        assert found == pytest.approx({name: value.item() for name, value in metrics.items()}, rel=1e-12)
        for name, bias in of_rank.items():
            assert bias == biases[name].tolist() and any(bias)
    assert {name for _, of_rank in results for name in of_rank} == biases.keys()


def sizes_on_two_ranks(rank):
    LOSSES.clear()
    LOSSES.update(dict.fromkeys(("first_loss", "second_loss", "third_loss"), RouterLoss("z", None)))
    stage = nn.ModuleDict({"a": Router(H, 3, 1), "b": Router(H, 2, 1)})
    routers = RouterSet([stage], num_microbatches=1, replicas=2, z=1.0, group=dist.group.WORLD)
    with routers.step():
        routers.totals["a"] += torch.tensor([1.0, 2.0, 3.0, 0.5, 4.0 * rank, 6.0])
        routers.totals["b"] += torch.tensor([rank, 10.0, 0.0, 1.0, 8.0 * rank])
    metrics = {name: value.item() for name, value in routers.metrics().items() if name.endswith("_loss")}
    return [totals.tolist() for totals in routers.state_tensors().values()], metrics


def test_loads_are_summed_and_losses_averaged_for_routers_of_different_sizes():
    for totals, metrics in run_ranks(sizes_on_two_ranks, 2, fresh=True):
        assert totals == [[2, 4, 6, 0.5, 2, 6], [1, 20, 0, 1, 4]]
        assert metrics == {"first_loss": 0.25, "second_loss": 1.5, "third_loss": 5}


def test_coefficients_of_zero_are_not_reported():
    stages = [stage(0)]
    routers = RouterSet(stages, num_microbatches=1, z=1.0)
    run(routers, stages, [tokens(2, 0)])
    assert routers.metrics().keys() == {"load_max_over_mean", "dropped", "z_loss"}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_argument_and_its_metric(name):
    stages, coefficient = [stage(0)], LOSSES[name].coefficient
    routers = RouterSet(stages, num_microbatches=1, **{coefficient: 0.5})
    with routers.step():
        assert stages[0]["layer0"].step.coefficients == {name: 0.5}
    run(routers, stages, [tokens(2, 0)])
    assert routers.metrics().keys() == {"load_max_over_mean", "dropped", name}


def test_outside_of_a_step_nothing_is_counted():
    stages = [stage(0)]
    routers = RouterSet(stages, num_microbatches=1, balance=1.0)
    run(routers, stages, [tokens(2, 0)])
    before = routers.totals["layer0"].clone()
    stages[0]["layer0"](tokens(3, 1))[0].sum().backward()
    assert torch.equal(routers.totals["layer0"], before)
    with pytest.raises(KeyError), routers.step():
        raise KeyError
    assert stages[0]["layer0"].step is None


def no_router_and_names(rank):
    routers = RouterSet([Linear(2, 2)], num_microbatches=1, group=dist.group.WORLD, replicas=2)
    reduced, dist.all_reduce = dist.all_reduce, None
    with routers.step():
        pass
    dist.all_reduce = reduced
    messages = []
    for stages, replicas in (([stage(rank)], 2), ([stage(0)], 1), ([stage(0, bias=False)], 2)):
        with pytest.raises(ValueError) as error:
            RouterSet(stages, num_microbatches=1, group=dist.group.WORLD, replicas=replicas, bias_update_rate=0.1)
        messages.append(str(error.value))
    return routers.metrics(), messages


def test_a_model_without_routers_and_what_is_refused():
    for metrics, (lonely, twice, no_bias) in run_ranks(no_router_and_names, 2, fresh=True):
        assert metrics == {}
        assert "all ranks together have 1 routers named 'layer0', but replicas is 2" in lonely
        assert "all ranks together have 2 routers named 'layer0', but replicas is 1" in twice
        assert no_bias.startswith("bias_update_rate is 0.1, but no router")


def test_the_load_is_that_of_the_experts_of_a_rank():
    stage = nn.ModuleDict({"a": Router(8, 4, top_k=2), "b": Router(8, 8, top_k=2)})
    routers = RouterSet([stage], num_microbatches=1)
    for totals in routers.totals.values():
        totals.fill_(0.5)
    load_of(routers.totals["a"])[:] = torch.tensor([1.0, 2, 4, 8])
    load_of(routers.totals["b"])[:] = torch.tensor([10.0] * 6 + [50, 60])
    assert routers.load(0, 2) == 3 + 40
    assert RouterSet([stage], num_microbatches=1).load(1, 2) == 0
    routers = RouterSet([stage], num_microbatches=1)
    load_of(routers.totals["b"])[:] = torch.arange(8.0)
    assert routers.load(3, 4) == 6 + 7
