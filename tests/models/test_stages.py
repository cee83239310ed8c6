"""Stages: how layers are cut, what is computed again, and what they start from."""

import re
from math import inf

import pytest
import torch

from dualpipe.models import Stage, build_stages
from dualpipe.models.stages import Recompute, split_layers
from models import train, whole
from tiny_models import tiny


def test_one_rank_of_a_v_builds_its_own_stages_and_ties_them():
    config = tiny(tie_word_embeddings=True)
    last, first = build_stages(config, 4, only=[3, 0])
    assert first.first and last.last
    assert last.lm_head.weight is first.embed_tokens.weight
    (alone,) = build_stages(config, 4, only=[3])  # as on another rank than the first: a copy, under its name
    assert alone.lm_head.weight is alone.embed_tokens.weight
    assert alone.state_dict().keys() - last.state_dict().keys() == {"embed_tokens.weight"}
    with pytest.raises(ValueError, match=r"only must name stages from 0 to 3; got \[4\]"):
        build_stages(config, 4, only=[4])


def test_initial_values_depend_on_seed_and_name_alone():
    config = tiny(attention_bias=True)
    model, other = whole(config, seed=3), whole(config, seed=4)
    for stage in build_stages(config, 3):
        stage.init_weights(3)
        for name, param in stage.named_parameters():
            assert torch.equal(param, model.get_parameter(name)), name
    names = [name for name, param in model.named_parameters() if param.dim() > 1]
    assert not any(torch.equal(model.get_parameter(name), other.get_parameter(name)) for name in names)
    twins = ("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", "layers.1.self_attn.k_proj")
    assert len({tuple(model.get_parameter(f"{twin}.weight")[0].tolist()) for twin in twins}) == 3
    weight = model.get_parameter("layers.0.mlp.experts.gate_up_proj.weight")
    assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.05)
    assert (model.get_parameter("layers.0.self_attn.q_proj.bias") == 0).all()
    assert (model.get_parameter("layers.0.input_layernorm.weight") == 1).all()
    wide = Stage(config, range(3), first=True, last=True).double()
    wide.init_weights(3)
    assert torch.equal(wide.embed_tokens.weight, model.embed_tokens.weight.double())


def test_meta_device_needs_no_buffer():
    with torch.device("meta"):
        model = Stage(tiny(), range(3), first=True, last=True)
    model.to_empty(device="cpu").init_weights(0)
    assert not list(model.buffers())
    assert torch.equal(train(model, tiny())[0], train(whole(tiny()), tiny())[0])


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]), (6, 4, [1, 2, 2, 1]), (5, 4, [1, 2, 1, 1]), (7, 4, [2, 2, 2, 1]), (3, 2, [2, 1]),
        (2, 4, [0, 1, 1, 0]), (3, 4, [1, 1, 1, 0]), (0, 2, [0, 0]), (48, 16, [3] * 16), (5, 1, [5]), (0, 1, [0]),
    ],
)
def test_layers_split_evenly_and_lighter_at_the_ends(layers, stages, sizes):
    cuts = split_layers(layers, stages)
    assert [len(cut) for cut in cuts] == sizes
    assert [index for cut in cuts for index in cut] == list(range(layers))


@pytest.mark.parametrize(("layers", "stages"), [(1, 4), (3, 0), (3, -1)])
def test_impossible_splits_are_refused(layers, stages):
    with pytest.raises(ValueError, match=f"cannot cut {layers} layers into {stages} stages"):
        split_layers(layers, stages)


@pytest.mark.parametrize("layers", [1, 4, 5])
def test_the_sizes_of_a_pipeline_that_a_refusal_names_work(layers):
    with pytest.raises(ValueError, match="pp at most ") as error:
        split_layers(layers, 100)
    found = re.search(r"pp at most (\d+) with two stages .* or (\d+) with", str(error.value))
    in_pairs, alone = map(int, found.groups())
    assert len(split_layers(layers, 2 * in_pairs)) == 2 * in_pairs and len(split_layers(layers, alone)) == alone
    for stages in (2 * in_pairs + 2, alone + 1):
        with pytest.raises(ValueError, match="cannot cut"):
            split_layers(layers, stages)


@pytest.mark.parametrize("rule", ["atention", "experts:", "layer:3-", "experts:a", ""])
def test_an_unknown_part_to_recompute_is_refused(rule):
    with pytest.raises(ValueError, match=r"cannot recompute '.*'; say none, or any of attention, experts"):
        Recompute([rule])


@pytest.mark.parametrize("rules", [["none", "attention"], ["experts", "none"], ["none", "none"]])
def test_none_beside_others_is_refused(rules):
    with pytest.raises(ValueError, match=rf"cannot recompute {', '.join(rules)}: none is not one of several"):
        Recompute(rules)
    assert not Recompute(["none"])("attention", 0)


@pytest.mark.parametrize("rule", ["experts:0-9", "layer:4", "norms:3-2"])
def test_layers_that_the_model_has_not_are_refused(rule):
    with pytest.raises(ValueError, match=rf"cannot recompute '{rule}': the model has layers 0 to 3; name the first"):
        Recompute([rule], 4)
    assert Recompute(["experts:0-3", "layer:3"], 4)("experts", 3)
    with pytest.raises(ValueError, match="layers are counted from 0"):
        Recompute(["norms:3-2"])


def test_what_is_recomputed():
    rules = Recompute(["attention", "experts:2-3", "layer:7"])
    assert [[rules(part, layer) for layer in (0, 2, 3, 7)] for part in ("attention", "experts", "norms", "layer")] == [
        [True, True, True, True], [False, True, True, True], [False, False, False, True], [False, False, False, True],
    ]
    assert not Recompute(["none"])("attention", 0)


def test_layers_are_split_by_their_costs():
    assert [len(part) for part in split_layers([1.0] * 24, 8, head=2.0)] == [3, 3, 3, 4, 4, 3, 3, 1]
    assert [len(part) for part in split_layers([0.3] * 3 + [1.0] * 9, 4)] == [5, 3, 2, 2]
    assert [len(part) for part in split_layers(9, 3, (2, 3, 4))] == [2, 3, 4]
    for wrong in ((3, 3), (3, 3, 2), (9, 0, 0), (10, -2, 1)):
        with pytest.raises(ValueError, match="layers_per_stage must be 3 numbers that add up to 9"):
            split_layers(9, 3, wrong)


def best_cut(costs, num_stages, head):
    """The least cost of the costliest stage, by trying every cut."""

    def tries(rest, left):
        if left == 1:
            return sum(rest) + head
        firsts = range(left != num_stages, len(rest) + 1)
        return min((max(sum(rest[:n]), tries(rest[n:], left - 1)) for n in firsts), default=inf)

    return tries(costs, num_stages)


def test_no_other_split_has_a_cheaper_costliest_stage():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        costs = torch.rand(7, generator=generator).tolist()
        head, stages = torch.rand((), generator=generator).item() * 3, 2 + len(costs) % 5
        parts = split_layers(costs, stages, head=head)
        found = max(sum(costs[i] for i in part) + head * (part is parts[-1]) for part in parts)
        assert found == pytest.approx(best_cut(costs, stages, head))
