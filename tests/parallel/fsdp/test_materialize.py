"""Materialization from meta: the same values in every layout; nothing wiped, untied, cast or forgotten unnoticed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.nn.init import seeded_normal_
from dualpipe.parallel import DTypePlan, DTypePolicy, Rule, TensorDTypes, resolve_dtypes
from dualpipe.parallel import shard as shard_by_plan
from dualpipe.parallel.fsdp.materialize import assert_materialized, build_on_meta, materialize
from ranks import run_ranks

BF16, F32 = torch.bfloat16, torch.float32
META, CPU = torch.device("meta"), torch.device("cpu")  # meta is a second device that every machine has


def plan_of(module, storage=F32, special=()):
    """Build a plan: parameters in `storage`, those with a suffix of `special` in its dtype; buffers in their own."""
    ends = dict(special)
    dtypes = {name: buffer.dtype for name, buffer in module.named_buffers(remove_duplicate=False)}
    for name, _ in module.named_parameters(remove_duplicate=False):
        dtypes[name] = next((dtype for end, dtype in ends.items() if name.endswith(end)), storage)
    tensors = {name: TensorDTypes(dtype, dtype, dtype, "by hand") for name, dtype in dtypes.items()}
    return DTypePlan(DTypePolicy(BF16, F32, BF16), tensors)


MIXED = (BF16, {"norm.weight": F32})


def fill(module, device, storage=F32, special=(), **how):
    materialize(module, device, plan_of(module, storage, special), **how)


class Rotary(nn.Module):
    """A buffer of angles per position, which is never in a checkpoint."""

    def __init__(self):
        super().__init__()
        frequencies = 1.0 / 10_000 ** (torch.arange(0, 4, dtype=F32) / 4)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x):
        return x + self.inv_freq.to(x.dtype).sum()


class Layer(nn.Module):
    """A layer of odd sizes, so that shards are uneven; its experts are one (E, 6, 4) parameter."""

    def __init__(self, experts=6):
        super().__init__()
        self.norm = nn.LayerNorm(6, bias=False)
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6, bias=False)
        self.rotary = Rotary()
        self.experts = nn.Parameter(torch.empty(experts, 6, 4))

    def forward(self, x):
        y = self.down(self.up(self.norm(self.rotary(x))))
        experts = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return x + y + experts.mean(dim=(0, 2)).to(x.dtype)


class Toy(nn.Module):
    """Two layers between an embedding and a head; persistent buffers of several kinds and dtypes."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0], dtype=torch.float64))
        self.register_buffer("steps", torch.from_numpy(np.array([3, 4])))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    @torch.no_grad()
    def init_weights(self, seed):
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                param.fill_(1.0)
            elif name.endswith("bias"):
                param.zero_()
            else:
                seeded_normal_(param, std=0.5, seed=seed, name=name)


def initialised(storage=F32, special=(), tied=False, seed=3):
    """Build the same toy without meta and without shards."""
    toy = Toy(tied)
    toy.init_weights(seed)
    plan = plan_of(toy, storage, special)
    for name, param in toy.named_parameters():
        param.data = param.data.to(plan.of(name).storage)
    return toy


def place_experts(toy, mesh):
    """Make the experts DTensors, Shard(0) over `mesh`, still on meta."""
    for layer in toy.layers:
        whole, (rank, size) = layer.experts, (mesh.get_local_rank(), mesh.size())
        local = torch.empty(torch.empty(whole.shape, device="meta").chunk(size)[rank].shape, device="meta")
        sharded = DTensor.from_local(
            local, mesh, (Shard(0),), run_check=False, shape=whole.shape, stride=whole.stride()
        )
        layer.experts = nn.Parameter(sharded)


def shard(toy, mesh, *, expert_dim=0, **options):
    """Wrap each layer as a unit, and the rest as one."""
    place = (lambda param: Shard(expert_dim if param.ndim == 3 else 0)) if expert_dim else None
    for layer in toy.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place, **options)
    return fully_shard(toy, mesh=mesh, **options)


# Rank functions below end in `dist.barrier()` where nothing else keeps a rank from leaving while others connect.


def data_parallel(rank, world, **options):
    return shard(build_on_meta(Toy), init_device_mesh("cpu", (world,)), **options)


def expert_parallel(rank, world, **options):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    toy = build_on_meta(Toy)
    place_experts(toy, mesh["ep"])
    return shard(toy, mesh["dp"], **options)


def same(one, other):
    """Compare values, shape and dtype: `torch.equal` alone ignores the dtype."""
    return one.dtype == other.dtype and torch.equal(one, other)


def whole(param):
    return param.full_tensor() if isinstance(param, DTensor) else param


def differences(module, expected):
    """Return the names of parameters and buffers whose values or dtype differ from those of `expected`."""
    mine = dict(module.named_parameters()) | dict(module.named_buffers())
    theirs = dict(expected.named_parameters()) | dict(expected.named_buffers())
    assert mine.keys() == theirs.keys()
    return [name for name in theirs if not same(whole(mine[name].detach()), theirs[name].detach())]


def lines(error):
    return [line.strip() for line in str(error.value).splitlines()]


# -- building on meta


def test_given_a_constructor_when_built_on_meta_then_parameters_have_no_memory_and_buffers_keep_their_values():
    toy = build_on_meta(Toy)
    assert {param.device for param in toy.parameters()} == {META}
    assert all(isinstance(param, nn.Parameter) and param.requires_grad for param in toy.parameters())
    assert same(toy.scale, torch.tensor([0.5, 2.0], dtype=torch.float64)) and same(toy.steps, torch.tensor([3, 4]))
    assert same(toy.layers[0].rotary.inv_freq, Rotary().inv_freq)


def test_given_one_parameter_under_two_names_when_built_on_meta_then_it_is_one_and_keeps_its_attributes():
    def build():
        module, shared = nn.Module(), nn.Parameter(torch.ones(3), requires_grad=False)
        shared.kind = "router"
        module.a, module.b = shared, shared
        return module

    module = build_on_meta(build)
    assert module.a is module.b and module.a.kind == "router" and not module.a.requires_grad


def test_given_a_gradient_dtype_then_it_survives_materialising():
    linear = build_on_meta(lambda: nn.Linear(3, 2, dtype=BF16))
    linear.weight.grad_dtype = F32
    fill(linear, "cpu", BF16)
    assert (linear.weight.grad_dtype, linear.bias.grad_dtype) == (F32, BF16)


def test_given_a_constructor_that_fails_then_later_modules_have_memory():
    with pytest.raises(ZeroDivisionError):
        build_on_meta(lambda: 1 / 0)
    assert nn.Linear(2, 2).weight.device == CPU


# -- parameters: the same values whatever the layout

LAYOUTS = {
    "dp": (data_parallel, {}),
    "ep, then dp on the same dimension": (expert_parallel, {"expert_dim": 0}),
    "ep, then dp on dimension 1": (expert_parallel, {"expert_dim": 1}),
}


def materialised_layouts(rank, world):
    found = {}
    for name, (build, options) in LAYOUTS.items():
        toy = build(rank, world, **options)
        fill(toy, "cpu", *MIXED, seed=3)
        found[name] = differences(toy, initialised(*MIXED))
    return found


def test_given_a_seed_then_every_layout_holds_the_values_and_dtypes_of_the_unsharded_module():
    assert run_ranks(materialised_layouts, 4, 4) == [{name: [] for name in LAYOUTS}] * 4


QWEN = Qwen3MoeConfig(
    vocab_size=37, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    num_experts=5, num_experts_per_tok=2, moe_intermediate_size=6, tie_word_embeddings=True,
)


def qwen_stages(rank):
    """Compare rank 0 of a V of two, whose stages both have the embedding, with the whole model; dp over the ranks."""
    (reference,) = build_stages(QWEN, 1)
    reference.init_weights(5)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    first, last = build_on_meta(lambda: build_stages(QWEN, 4, only=[0, 3]))
    mesh = init_device_mesh("cpu", (2,))
    for layer in [*first.layers.values(), *last.layers.values()]:
        fully_shard(layer, mesh=mesh)
    for stage in (first, last):
        fill(stage, CPU, BF16, seed=5)
    mine = [*first.named_parameters(), *last.named_parameters()]
    wrong = [name for name, param in mine if not same(whole(param.detach()), expected[name].detach().to(BF16))]
    return wrong, first.embed_tokens.weight is last.lm_head.weight, len(mine)


def test_given_two_stages_of_a_model_that_share_a_weight_then_it_is_shared_after_materialising_each():
    for wrong, tied, count in run_ranks(qwen_stages, 2):
        assert wrong == [] and tied and count > 10


# -- parameters: allocated once, and usable


def trained_step(toy, tokens):
    loss = toy(tokens).square().mean()
    loss.backward()
    return loss.detach(), {name: whole(param.grad) for name, param in toy.named_parameters()}


def train_uneven(rank, world):
    toy = data_parallel(rank, world)
    fill(toy, "cpu", seed=3)
    tokens = torch.arange(7)  # the same on every rank, so that the mean of the gradients is each of them
    loss, grads = trained_step(toy, tokens)
    reference = initialised()
    expected, expected_grads = trained_step(reference, tokens)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, expected_grads)
    return differences(toy, reference)


def test_given_uneven_shards_then_fsdp2_computes_with_what_was_filled():
    assert run_ranks(train_uneven, 4, 4) == [[]] * 4


class Wide(nn.Module):
    """Eight layers of 1 MB of float32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))

    def init_weights(self, seed):
        for name, param in self.named_parameters():
            seeded_normal_(param, std=1.0, seed=seed, name=name)


def peak_of(fn):
    """Return the peak of bytes that `fn` allocated, and the sizes of its allocations of 200 KB and more."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(sizes.cumsum().max()), sizes[sizes >= 200_000].tolist()


def memory(rank, world, filled_by):
    wide = build_on_meta(Wide)
    mesh = init_device_mesh("cpu", (world,))
    for layer in wide.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(wide, mesh=mesh)
    source = {name: torch.ones(param.shape) for name, param in wide.named_parameters()}
    how = {"seed": {"seed": 1}, "source": {"source": source}, "nothing": {}}[filled_by]
    dist.barrier()
    return peak_of(lambda: fill(wide, "cpu", **how))


@pytest.mark.slow
@pytest.mark.parametrize("filled_by", ["seed", "source", "nothing"])
def test_given_shards_then_materialising_takes_them_and_at_most_one_unsharded_layer(filled_by):
    layer, world = 2**20, 4
    for peak, large in run_ranks(memory, world, world, filled_by, fresh=True):
        assert 8 * layer / world <= peak <= 8 * layer / world + layer
        assert large.count(layer // world) == 8, "each shard is allocated once"
        assert filled_by == "seed" or len(large) == 8


def built_in(dtype, fn):
    """Run `build_on_meta(fn)` with another default dtype; explicit dtypes such as a rotary buffer's stay."""
    torch.set_default_dtype(dtype)
    try:
        return build_on_meta(fn)
    finally:
        torch.set_default_dtype(F32)


def by_plan(rank, world):
    """Build a model the usual way: a plan for it, sharded by the plan, materialised by the plan."""
    toy = built_in(BF16, Toy)
    plan = resolve_dtypes(toy, DTypePolicy(BF16, F32, F32, [Rule("*.norm", F32)]))
    shard_by_plan(toy, init_device_mesh("cpu", (world,)), plan)
    materialize(toy, "cpu", plan, seed=3)
    wrong = differences(toy, initialised(*MIXED))
    out = toy(torch.arange(7))
    out.sum().backward()
    return wrong, out.dtype, {name for name, param in toy.named_parameters() if param.dtype == F32}


def test_given_a_resolved_plan_then_what_it_shards_is_materialised_and_runs():
    norms = {"layers.0.norm.weight", "layers.1.norm.weight"}
    assert run_ranks(by_plan, 2, 2) == [([], F32, norms)] * 2


class Tower(nn.Module):
    """A frozen float32 part of a bfloat16 model."""

    def __init__(self):
        super().__init__()
        self.tower = Layer().requires_grad_(False)
        self.head = nn.Linear(6, 2, dtype=BF16)

    def forward(self, x):
        return self.head(self.tower(x))


def frozen_tower(rank, world):
    tower = build_on_meta(Tower)
    plan = resolve_dtypes(tower, DTypePolicy(BF16, F32, BF16))
    source = {name: torch.full(tensor.shape, 1 / 3, dtype=tensor.dtype) for name, tensor in tower.state_dict().items()}
    shard_by_plan(tower, init_device_mesh("cpu", (world,)), plan)
    materialize(tower, "cpu", plan, source=source)
    rotary = same(tower.tower.rotary.inv_freq, Rotary().inv_freq.to(BF16))
    wrong = [name for name, param in tower.named_parameters() if not same(whole(param), source[name].to(BF16))]
    return wrong, rotary, tower(torch.ones(2, 6)).dtype


def test_given_a_frozen_part_that_the_plan_narrows_then_a_wider_source_and_its_buffers_are_rounded():
    assert run_ranks(frozen_tower, 2, 2) == [([], True, BF16)] * 2


# -- parameters: a module without shards


def test_given_plain_parameters_with_values_then_the_module_moves_to_the_device_and_keeps_its_objects(monkeypatch):
    monkeypatch.setattr(nn.Module, "to_empty", None)
    toy = Toy()
    before = dict(toy.named_parameters())
    fill(toy, META, torch.float64)
    assert {tensor.device for tensor in [*toy.parameters(), *toy.buffers()]} == {META}
    assert {param.dtype for param in toy.parameters()} == {torch.float64}
    assert all(param is before[name] for name, param in toy.named_parameters())


def test_given_plain_parameters_whose_values_do_not_fit_the_plan_then_they_are_named_and_nothing_changed():
    toy = initialised(F32, {"head.weight": BF16})
    with pytest.raises(ValueError, match=r"embed.weight: .* rounded"):
        fill(toy, "cpu", BF16, seed=0)
    assert differences(toy, initialised(F32, {"head.weight": BF16})) == []


# -- buffers


def sharded_buffers(rank, world):
    """Return device and dtype of buffers, and of parameters, which `model.to(device)` skips: they are DTensors."""
    toy = data_parallel(rank, world)
    fill(toy, META, param_device=CPU)
    dist.barrier()
    return {name: (buffer.device.type, buffer.dtype) for name, buffer in toy.named_buffers()}, {
        (type(param.data), param.device.type) for param in toy.parameters()
    }


def test_given_dtensor_parameters_then_buffers_go_to_the_device_with_their_own_dtypes():
    expected = {
        "scale": ("meta", torch.float64), "steps": ("meta", torch.int64),
        "layers.0.rotary.inv_freq": ("meta", F32), "layers.1.rotary.inv_freq": ("meta", F32),
    }
    for buffers, params in run_ranks(sharded_buffers, 2, 2):
        assert buffers == expected and params == {(DTensor, "cpu")}


def sharded_with_values(rank, world):
    toy = shard(initialised(), init_device_mesh("cpu", (world,)))
    before = {name: param.to_local().data_ptr() for name, param in toy.named_parameters()}
    with pytest.raises(ValueError) as error:
        fill(toy, CPU, torch.float64)
    fill(toy, META)
    dist.barrier()
    after = {name: param.to_local().data_ptr() for name, param in toy.named_parameters()}
    return lines(error)[1], before == after, {buffer.device.type for buffer in toy.buffers()}


def test_given_dtensor_parameters_with_values_then_they_stay_as_they_are_and_the_buffers_move():
    for refused, stayed, devices in run_ranks(sharded_with_values, 2, 2):
        assert refused.startswith("embed.weight") and "torch.float64" in refused
        assert stayed and devices == {"meta"}


def offloaded(rank):
    toy = data_parallel(rank, 2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fill(toy, CPU, seed=3, param_device="cpu")
    toy(torch.arange(7)).sum().backward()
    return differences(toy, initialised())


def test_given_cpu_offload_then_a_step_works_and_the_values_are_the_same():
    assert run_ranks(offloaded, 2) == [[], []]


def test_given_a_buffer_on_meta_that_no_checkpoint_has_then_it_is_refused():
    with META:
        toy = Rotary()
    with pytest.raises(ValueError, match="inv_freq: on meta"):
        fill(toy, "cpu")


def test_given_torch_tensor_under_a_meta_device_then_the_lost_value_is_named_with_the_remedy():
    with META:
        toy = Toy()
    for layer in toy.layers:
        layer.rotary = Rotary()
    assert toy.scale.device == META and toy.steps.device == CPU, "from_numpy stays on the CPU"
    with pytest.raises(ValueError, match="scale: on meta") as error:
        fill(toy, "cpu", seed=0)
    assert len(lines(error)) == 2
    toy.scale = torch.ones(2, dtype=torch.float64)
    fill(toy, "cpu", seed=0)
    assert same(toy.scale, torch.ones(2, dtype=torch.float64)) and same(toy.steps, torch.tensor([3, 4]))


# -- tied parameters


def tied_unit(rank, world):
    toy = build_on_meta(lambda: Toy(tied=True))
    fully_shard(toy, mesh=init_device_mesh("cpu", (world,)))
    fill(toy, "cpu", BF16, seed=3)
    wrong = differences(toy, initialised(BF16, tied=True))
    toy(torch.arange(7)).sum().backward()
    return toy.head.weight is toy.embed.weight, wrong


def test_given_tied_parameters_in_one_unit_then_they_are_tied_again():
    assert run_ranks(tied_unit, 2, 2) == [(True, [])] * 2


# -- filled by a checkpoint


class Reader:
    """A tensor in a file that is read in parts."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.dtype, self.read = tensor, tensor.shape, tensor.dtype, 0

    def __getitem__(self, part):
        found = self.tensor[part]
        self.read += found.numel()
        return found


def from_checkpoint(rank, world):
    results = []
    saved = initialised(BF16, seed=9)
    saved.scale.fill_(0.25)
    for build, options in LAYOUTS.values():
        toy = build(rank, world, **options)
        source = {name: Reader(tensor) for name, tensor in saved.state_dict().items()}
        fill(toy, "cpu", BF16, {"norm.weight": F32, "experts": F32}, source=source)
        held = {name: param.to_local().numel() for name, param in toy.named_parameters()}
        too_much = [name for name, size in held.items() if source[name].read != size]
        expected = initialised(BF16, seed=9)
        expected.scale.fill_(0.25)
        for name, param in expected.named_parameters():
            if name.endswith(("norm.weight", "experts")):
                param.data = param.data.float()
        results.append((differences(toy, expected), too_much))
    return results


def test_given_a_source_then_each_rank_reads_its_part_alone_and_widens_to_the_plan():
    assert run_ranks(from_checkpoint, 4, 4) == [[([], [])] * len(LAYOUTS)] * 4


def test_given_a_source_that_does_not_match_then_all_its_faults_are_listed_and_nothing_changed():
    toy = build_on_meta(Toy)
    source = dict(initialised(BF16).state_dict())
    del source["head.weight"], source["scale"]
    source |= {"embed.weight": torch.ones(8, 6, dtype=BF16), "extra": torch.ones(1)}
    source["layers.0.experts"] = torch.ones(6, 6, 4)
    with pytest.raises(ValueError) as error:
        fill(toy, "cpu", BF16, source=source)
    faults = dict(line.split(": ", 1) for line in lines(error)[1:])
    assert faults.keys() == {"embed.weight", "layers.0.experts", "head.weight", "scale", "extra"}
    assert "(8, 6)" in faults["embed.weight"] and "torch.bfloat16" in faults["layers.0.experts"]
    assert "missing" in faults["head.weight"] and "missing" in faults["scale"]
    assert {param.device for param in toy.parameters()} == {META}


def test_given_a_source_with_one_name_of_a_tied_parameter_then_it_is_enough_and_two_must_agree():
    source = dict(initialised(tied=True).state_dict())
    del source["embed.weight"]
    toy = build_on_meta(lambda: Toy(tied=True))
    fill(toy, "cpu", source=source)
    assert toy.head.weight is toy.embed.weight and same(toy.embed.weight.detach(), source["head.weight"])
    fill(toy, "cpu", source=source | {"embed.weight": source["head.weight"].clone()})
    with pytest.raises(ValueError, match=r"embed.weight and head.weight are tied, but"):
        fill(toy, "cpu", source=source | {"embed.weight": source["head.weight"] + 1})


def from_distributed_checkpoint(rank, world, folder):
    saved = data_parallel(rank, world)
    fill(saved, "cpu", *MIXED, seed=4)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    dist.barrier()
    toy = expert_parallel(rank, world, expert_dim=1)
    fill(toy, "cpu", *MIXED)
    with pytest.raises(ValueError) as error:
        assert_materialized(toy, "cpu")
    unfilled = {line.split()[0] for line in lines(error)[1:]}
    dcp.load(toy.state_dict(), checkpoint_id=folder)
    assert_materialized(toy, "cpu")
    held = {name for name, param in toy.named_parameters() if param.to_local().numel()}
    return unfilled == held, differences(toy, initialised(*MIXED, seed=4))


def test_given_neither_seed_nor_source_then_a_distributed_checkpoint_fills_what_was_named(tmp_path):
    assert run_ranks(from_distributed_checkpoint, 4, 4, str(tmp_path)) == [(True, [])] * 4


def test_given_wrong_arguments_then_they_are_named():
    with pytest.raises(ValueError, match=r"both seed \(1\) and source are given"):
        fill(build_on_meta(Toy), "cpu", seed=1, source={})
    with pytest.raises(ValueError, match=r"Linear has no init_weights\(seed\)"):
        materialize(build_on_meta(lambda: nn.Linear(2, 2)), "cpu", None, seed=1)


# -- what is not materialised


def test_given_an_initialisation_that_forgets_a_parameter_then_it_is_named():
    toy = build_on_meta(Toy)
    toy.init_weights = lambda seed: [nn.init.zeros_(p) for n, p in toy.named_parameters() if "1.experts" not in n]
    with pytest.raises(ValueError) as error:
        fill(toy, "cpu", BF16, seed=0)
    (line,) = lines(error)[1:]
    assert line.startswith("layers.1.experts")


def test_given_buffers_on_meta_that_a_checkpoint_is_to_fill_then_integers_are_named_too_and_booleans_are_not():
    module = nn.Module()
    for name, dtype in (("steps", torch.int64), ("angles", torch.complex64), ("mask", torch.bool)):
        module.register_buffer(name, torch.empty(3, dtype=dtype, device="meta"))
    fill(module, "cpu")
    with pytest.raises(ValueError) as error:
        assert_materialized(module, "cpu")
    assert [line.split()[0] for line in lines(error)[1:]] == ["steps", "angles"]


def unfinished(rank, world):
    toy = data_parallel(rank, world)
    found = []
    for device, options in ((CPU, {}), (META, {"param_device": "cpu"})):
        with pytest.raises(ValueError) as error:
            assert_materialized(toy, device, **options)
        found.append(lines(error)[1:])
    fill(toy, CPU, seed=0)
    with torch.no_grad():
        toy.embed.weight.to_local().view(-1)[:1].fill_(float("nan"))
        toy.steps.fill_(torch.iinfo(torch.int64).max)
    assert_materialized(toy, CPU, values=False)
    for device, options in ((CPU, {}), ("cuda", {})):
        with pytest.raises(ValueError) as error:
            assert_materialized(toy, device, **options)
        found.append(lines(error)[1:])
    dist.barrier()
    return found


def test_given_what_is_on_meta_elsewhere_or_uninitialised_then_each_is_named():
    names = [name for name, _ in Toy().named_parameters()]
    buffers = [name for name, _ in Toy().named_buffers()]
    for on_meta, both, unfilled, elsewhere in run_ranks(unfinished, 2, 2):
        assert on_meta == [f"{name} is on meta" for name in names]
        assert both == on_meta + [f"{name} is on cpu, not on meta" for name in buffers]
        assert [re.match(r"(\S+) was never filled, or holds NaN", line)[1] for line in unfilled] == [
            "embed.weight", "steps",
        ]
        assert elsewhere == [f"{name} is on cpu, not on cuda" for name in names + buffers]


def test_given_a_cuda_device_then_everything_is_there_with_the_values_of_the_cpu(any_cuda):
    toy = build_on_meta(Toy)
    fill(toy, "cuda", *MIXED, seed=3)
    assert {tensor.device.type for tensor in [*toy.parameters(), *toy.buffers()]} == {"cuda"}
    assert differences(toy.cpu(), initialised(*MIXED)) == []


def test_values_that_look_unfilled_are_kept_where_they_came_with_the_module():
    module = build_on_meta(lambda: nn.Linear(2, 2))
    module.register_buffer("mask", torch.full((3,), 255, dtype=torch.uint8))
    module.register_buffer("missing", torch.tensor(float("nan")))
    module.init_weights = lambda seed: [p.fill_(1.0) for p in module.parameters()]
    materialize(module, "cpu", plan_of(module), seed=0)
    assert module.mask.tolist() == [255] * 3 and module.missing.isnan()
