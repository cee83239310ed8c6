"""Sharding by the dtype plan, on real ranks: dtypes in forward, reduction and storage, and gradients."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from dualpipe import DualPipeV, Pipeline
from dualpipe.parallel import DTypePolicy, Rule, assert_contract, resolve_dtypes, shard, shard_stages
from dualpipe.parallel.precision.partition import ModuleUnits
from ranks import run_ranks
from refusals import refusal
from toys import param_groups, relative_error

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
WIDTH = 8


class Scale(nn.Module):
    """Promotes its input to the dtype of its weight, as most norms do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = Scale(), nn.Linear(WIDTH, WIDTH)
        self.gate, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h)) * self.gate(h).sigmoid())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PINS = (Rule("*.norm", FP32), Rule("*.gate", FP32))


def make(cls=Model, dtype=FP32):
    """Build a model whose values bfloat16 can represent, so that either storage dtype gives the same model."""
    torch.manual_seed(0)
    return cls().to(BF16).to(dtype)


def policy(*rules, param=BF16, reduce=FP32, output=BF16):
    return DTypePolicy(param, reduce, output, rules)


def batch(rank, dtype=FP32):
    torch.manual_seed(100 + rank)
    return torch.randn(4, WIDTH, dtype=dtype)


def backward(model, x):
    model(x).to(torch.promote_types(x.dtype, FP32)).square().mean().backward()


def gradients(model):
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }


def mean_gradients(model, ranks, dtype=FP32):
    """Return the unsharded model's mean gradients over all ranks' batches, accumulated in the dtype of its plan."""
    for rank in range(ranks):
        backward(model, batch(rank, dtype))
    return {name: p.grad / ranks for name, p in model.named_parameters()}


def worst(actual, expected):
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)


@contextmanager
def collectives():
    """Return the dtypes that FSDP2 reduces, by collective, in order; torch 2.13 renamed one of them."""
    seen = {"reduce_scatter": [], "all_reduce": []}
    names = dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), "reduce_scatter")
    names["all_reduce"] = "all_reduce"
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def recorder(name, original):
        def call(*args, **kwargs):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            seen[names[name]].append(tensors[0].dtype)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, recorder(name, original))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextmanager
def flow(model):
    """Return the dtypes of every module's input, after all casts, and of its output, by name."""
    seen = {}
    hook = lambda name: lambda m, args, out: seen.__setitem__(name, (args[0].dtype, out.dtype))  # noqa: E731
    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# -- dtypes are kept apart


def mixed(rank, world):
    """Return activation dtypes, reduction dtypes and the gradients' error of a model with fp32 norms and gates."""
    mesh = init_device_mesh("cpu", (world,))
    model, plain = make(), make(dtype=BF16)
    shard(plain, None, resolve_dtypes(plain, policy(*PINS)))
    plan = resolve_dtypes(model, policy(*PINS))
    shard(model, mesh, plan)
    with flow(model) as seen, collectives() as reduced:
        assert_contract(model, plan, run=lambda: backward(model, batch(rank)))
    error = worst(gradients(model), mean_gradients(plain, world))
    assert all(isinstance(p, DTensor) and p.dtype is FP32 for p in model.parameters())
    return seen, reduced["reduce_scatter"], error


def test_given_a_mixed_module_then_it_shards_and_its_fp32_units_stay_in_fp32():
    for seen, reduced, error in run_ranks(mixed, 2, 2):
        for i in range(2):
            assert seen[f"layers.{i}.norm"] == (FP32, FP32) and seen[f"layers.{i}.gate"] == (FP32, FP32)
            assert seen[f"layers.{i}.up"] == (BF16, BF16) and seen[f"layers.{i}.down"] == (BF16, BF16)
            assert seen[f"layers.{i}"] == (BF16, BF16)
        assert reduced == [FP32] * 5  # two layers of two units, the head
        # The same bfloat16 operations; only the order in which two ranks' gradients are added differs, in fp32.
        assert error < 1e-6


def narrow_reduction(rank):
    model = make()
    plan = resolve_dtypes(model, policy(*PINS, reduce=BF16))
    shard(model, init_device_mesh("cpu", (2,)), plan)
    with collectives() as reduced:
        assert_contract(model, plan, run=lambda: backward(model, batch(rank)))
    return reduced["reduce_scatter"]


def test_given_a_bf16_reduction_then_fp32_units_still_reduce_in_fp32():
    for reduced in run_ranks(narrow_reduction, 2):
        assert sorted(map(str, reduced)) == sorted(map(str, [BF16, FP32] * 2 + [BF16]))


def accumulated(rank):
    """Return the worst gradient error of two micro-batches, of which the second reduces and would vanish in bf16."""
    model, plain = make(), make(dtype=BF16)
    plan = resolve_dtypes(model, policy(*PINS))
    shard(model, init_device_mesh("cpu", (2,)), plan)
    shard(plain, None, resolve_dtypes(plain, policy(*PINS)))
    for scale, last in ((1.0, False), (1e-2, True)):
        model.set_requires_gradient_sync(last)
        backward(model, scale * batch(rank))
        for other in range(2):
            backward(plain, scale * batch(other))
    return worst(gradients(model), {name: p.grad / 2 for name, p in plain.named_parameters()})


def test_given_two_micro_batches_then_their_gradients_add_in_the_reduce_dtype():
    assert max(run_ranks(accumulated, 2)) < 1e-6


# -- every gradient is reduced


def replicated(rank, shape, names):
    """Return gradients and dtypes over a mesh whose last dimension shards and whose other dimensions replicate."""
    results = {}
    for param, pins in ((FP32, ()), (BF16, PINS)):
        model, plain = make(), make(dtype=param)
        plan = resolve_dtypes(model, policy(*pins, param=param, output=param))
        shard(plain, None, resolve_dtypes(plain, policy(*pins, param=param, output=param)))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        shard(model, mesh, plan)
        with collectives() as reduced:
            assert_contract(model, plan, run=lambda: backward(model, batch(rank)))  # noqa: B023
        p = model.layers[0].up.weight
        assert p.placements == (Replicate(), Shard(0)) and p.to_local().shape[0] == WIDTH // shape[-1]
        assert set(reduced["all_reduce"]) == {FP32} and {p.grad.dtype for p in model.parameters()} == {FP32}
        results[param] = worst(gradients(model), mean_gradients(plain, 4))
    return results


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
def test_given_replicas_over_one_or_two_dimensions_then_gradients_are_the_mean_over_all(shape):
    names = ("pods", "nodes", "shard")[-len(shape) :]
    for errors in run_ranks(replicated, 4, shape, names):
        assert max(errors.values()) < 1e-6


class Tied(nn.Module):
    """An embedding, a layer between, and a head that shares its weight with a module inside a layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].gate.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tied(rank):
    mesh = init_device_mesh("cpu", (2,))
    model, plain = make(Tied), make(Tied)
    plan = resolve_dtypes(model, policy(param=FP32, output=FP32))
    shard(model, mesh, plan)
    backward(model, batch(rank))
    same = model.head.weight is model.layers[0].gate.weight
    return same, worst(gradients(model), mean_gradients(plain, 2))


def test_given_tied_parameters_in_different_layers_then_they_are_one_unit_and_stay_tied():
    for same, error in run_ranks(tied, 2):
        assert same and error < 1e-6


class Ends(nn.Module):
    """An embedding in the first stage of two, and a head in the last."""

    def __init__(self, end):
        super().__init__()
        self.end = end
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.dense(self.end(x)) if isinstance(self.end, nn.Embedding) else self.end(self.dense(x))


def tied_ends():
    torch.manual_seed(0)
    first, last = Ends(nn.Embedding(11, WIDTH)), Ends(nn.Linear(WIDTH, 11, bias=False))
    last.end.weight = first.end.weight
    return [first.double(), last.double()]


def tied_stages(rank):
    """Shard two stages of a rank that share a weight in many ways; return errors, and gradient errors without one."""
    mesh = init_device_mesh("cpu", (2,))
    fp64 = policy(param=torch.float64, reduce=torch.float64, output=torch.float64)
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))

    def shard_alone(module, stages):
        shard(module, mesh, resolve_dtypes(stages, fp64))

    def apart(stages):
        for stage in stages:
            shard_alone(stage, stages)

    def by_hand(stages):
        for stage in stages:
            fully_shard(stage, mesh=mesh)

    def in_part(stages):
        shard_alone(stages[0], stages)
        fully_shard(stages[1], mesh=mesh)

    def first_alone(stages):
        fully_shard(stages[0], mesh=mesh)

    def ends_alone(stages):
        for stage in stages:
            shard(stage.end, mesh, resolve_dtypes(stage.end, fp64))

    def frozen(stages):
        stages[0].end.weight.requires_grad_(False)
        apart(stages)

    def together(stages):
        shard_stages(stages, mesh, resolve_dtypes(stages, fp64))

    errors, gradient_errors = {}, {}
    for way in (apart, by_hand, in_part, first_alone, ends_alone, frozen, together):
        stages, plain = tied_ends(), tied_ends()
        plain[0].end.weight.requires_grad_(way is not frozen)
        group = torch.distributed.new_subgroups(1)[0]
        errors[way.__name__] = refusal(lambda way=way, stages=stages, group=group: [
            way(stages), DualPipeV(stages, process_group=group)])
        if errors[way.__name__]:
            continue
        pipe = DualPipeV(stages, process_group=group)
        x = tokens[rank]
        pipe.step(x, num_chunks=2, criterion=lambda a, b: F.cross_entropy(a, b) / 2, labels=(x,))
        for x in tokens:
            (F.cross_entropy(plain[1](plain[0](x)), x) / 2).backward()
        found = [gradients(stage) for stage in stages]
        gradient_errors[way.__name__] = max(
            float((grads[name] - p.grad).abs().max() / p.grad.abs().max())
            for grads, stage in zip(found, plain) for name, p in stage.named_parameters() if p.requires_grad)
    stage = nn.Sequential(*tied_ends())  # both ends in one stage, in units of their own
    fully_shard(stage[0], mesh=mesh)
    fully_shard(stage, mesh=mesh)
    errors["one stage"] = refusal(lambda: Pipeline([stage], process_group=torch.distributed.new_subgroups(1)[0]))
    return errors, gradient_errors


def test_given_tied_stages_then_they_are_one_weight_or_refused():
    for errors, gradient_errors in run_ranks(tied_stages, 2, fresh=True):
        assert {way for way, text in errors.items() if not text} == gradient_errors.keys() == {"frozen", "together"}
        assert max(gradient_errors.values()) < 1e-12
        for way, text in errors.items():
            assert not text or ("tied" in text and "shard_stages" in text and "weight" in text), (way, text)
        assert "end.weight of module 0 and end.weight of module 1 of this rank" in errors["by_hand"]


# -- what cannot be kept apart is refused at plan time


@pytest.mark.parametrize(("output", "expected"), [(None, FP32), (BF16, BF16)])
def test_given_a_whole_layer_in_fp32_then_it_returns_fp32_unless_the_rule_says_otherwise(output, expected):
    model = make(dtype=BF16)
    plan = resolve_dtypes(model, policy(Rule("layers.0", FP32, output_dtype=output)))
    shard(model, None, plan)
    with flow(model) as seen:
        assert_contract(model, plan, run=lambda: backward(model, batch(0)))
    assert seen["layers.0"] == (FP32, expected) and seen["layers.1"] == (BF16, BF16)


class Direct(nn.Module):
    def __init__(self, A_log=(4,)):
        super().__init__()
        self.proj = nn.Parameter(torch.zeros(4, 4))
        self.A_log = nn.Parameter(torch.zeros(A_log))

    def forward(self, x):
        return x


def test_given_dtypes_that_one_module_owns_then_the_plan_is_refused():
    with pytest.raises(ValueError, match=r"m \(Direct\) directly owns .*m\.proj \(fp32 computing in bf16, .*m\.A_log"):
        resolve_dtypes(nn.ModuleDict({"m": Direct()}), policy(("*.A_log", FP32)))
    resolve_dtypes(nn.ModuleDict({"m": Direct()}), policy(("m", FP32)))


def test_given_a_scalar_parameter_then_the_plan_is_refused_unless_it_is_frozen():
    model = Direct(A_log=())
    with pytest.raises(ValueError, match=r"A_log is a scalar.*shape \(1,\)"):
        resolve_dtypes(model, policy())
    model.A_log.requires_grad_(False)
    assert resolve_dtypes(model, policy()).of("A_log").storage is BF16


def names_of_units(model, *rules):
    names = {module: name for name, module in model.named_modules()}
    units = ModuleUnits(model, resolve_dtypes(model, policy(*rules))).units
    return [[names[module] for module in modules] for modules, _ in units]


class Calling(nn.Module):
    """Owns the modules it is given."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return x


def test_a_layer_has_no_layers_of_its_own():
    layers = [Calling(experts=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), norm=Scale()) for _ in range(2)]
    model = Calling(layers=nn.ModuleList(layers), head=nn.Linear(4, 4))
    assert names_of_units(model) == [["layers.0"], ["layers.1"], [""]]
    mixed = names_of_units(model, ("*.experts.1", FP32), ("*.norm", FP32))
    assert mixed == [["layers.0.experts.1", "layers.0.norm"], ["layers.0"], ["layers.1.experts.1", "layers.1.norm"],
                     ["layers.1"], [""]]


def test_a_frozen_scalar_of_another_dtype_does_not_decide_what_goes_into_its_module():
    scaled, norm = Scale(), Scale()
    scaled.factor = nn.Parameter(torch.tensor(2.0), requires_grad=False)
    model = Calling(scaled=scaled, norm=norm)
    cut = ModuleUnits(model, resolve_dtypes(model, policy(("scaled.factor", FP32), ("norm", FP32))))
    assert {module: inputs for module, (inputs, _) in cut.casts.items()} == {model: BF16, scaled: BF16, norm: FP32}


def test_given_a_container_without_forward_then_the_plan_is_refused():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.zeros(4)])
            self.proj = nn.Linear(4, 4)

        def forward(self, x):
            return self.proj(x) * self.scales[0]

    with pytest.raises(ValueError, match=r"scales \(ParameterList\) has no forward"):
        resolve_dtypes(Holder(), policy(("scales", FP32)))


def test_given_tied_modules_that_own_more_then_the_plan_is_refused():
    model = Tied()
    model.layers[0].gate.extra = Scale()
    with pytest.raises(ValueError, match="share a parameter across units"):
        resolve_dtypes(model, policy())


def refusals(rank):
    ep = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    both, copies, experts = Direct(), Direct(), Experts(2, ep)
    both.proj = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), ep, [Shard(0)]))
    copies.proj = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), ep, [Replicate()]))
    del copies.A_log
    sharded = shard(make(), ep, resolve_dtypes(make(), policy()))
    return [
        refusal(lambda module=module, mesh=mesh: shard(module, mesh, resolve_dtypes(module, policy(), sharded=False)))
        for module, mesh in ((both, ep), (copies, ep), (experts, None), (experts, ep), (sharded, ep))]


def test_given_experts_or_meshes_that_do_not_fit_then_shard_says_why():
    both, copies, unsharded, no_mesh, twice = run_ranks(refusals, 2)[0]
    assert "directly owns" in both and "expert" in both
    assert "not be reduced" in copies
    assert "shard it over a mesh" in unsharded
    assert "expert_mesh must be given" in no_mesh
    assert "sharded already" in twice


def test_given_no_mesh_and_a_parameter_that_would_compute_in_another_dtype_then_it_is_refused():
    with pytest.raises(ValueError, match="stored in fp32 and computes in bf16"):
        shard(make(), None, resolve_dtypes(make(), policy()))


# -- frozen modules


class Tower(nn.Module):
    """Multiplies by a pinned parameter and a pinned buffer; without casts, its output is fp32."""

    keep_fp32 = ("scale.weight", "positions")

    def __init__(self):
        super().__init__()
        self.proj, self.scale = nn.Linear(WIDTH, WIDTH), Scale()
        self.register_buffer("positions", torch.linspace(0, 1, WIDTH))
        self.register_buffer("offset", torch.ones(WIDTH))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale(self.proj(x) + self.offset) * self.positions * self.temperature


class WithTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower().requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.tower(x))


def frozen(rank):
    model = make(WithTower)
    plan = resolve_dtypes(model, policy())
    shard(model, init_device_mesh("cpu", (2,)), plan)
    stored = {name: t.dtype for name, t in [*model.tower.named_parameters(), *model.tower.named_buffers()]}
    with flow(model) as seen:
        assert_contract(model, plan, run=lambda: backward(model, batch(rank)))
    return stored, seen, isinstance(model.tower, FSDPModule)


def test_given_a_frozen_tower_then_it_is_a_unit_in_the_compute_dtype_except_for_its_pins():
    for stored, seen, unit in run_ranks(frozen, 2):
        assert unit
        assert stored == {"proj.weight": BF16, "proj.bias": BF16, "scale.weight": FP32, "temperature": BF16,
                          "positions": FP32, "offset": BF16}
        assert seen["tower.scale"] == (FP32, FP32) and seen["tower"] == (BF16, BF16) and seen["head"] == (BF16, BF16)


def partly_frozen(rank):
    model, plain = make(), make(dtype=BF16)
    for each in (model, plain):
        each.layers[0].gate.requires_grad_(False)
    plan = resolve_dtypes(model, policy())
    shard(model, init_device_mesh("cpu", (2,)), plan)
    shard(plain, None, resolve_dtypes(plain, policy()))
    assert_contract(model, plan, run=lambda: backward(model, batch(rank)))
    for other in range(2):
        backward(plain, batch(other))
    trained = {name: p.grad / 2 for name, p in plain.named_parameters() if p.requires_grad}
    frozen = model.layers[0].gate.weight
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    return frozen.dtype, frozen.grad, worst(found, trained)


def test_given_a_frozen_module_in_a_layer_then_it_is_stored_in_the_compute_dtype_and_the_rest_trains():
    for dtype, grad, error in run_ranks(partly_frozen, 2):
        assert dtype is BF16 and grad is None and error < 1e-6


class Buffered(nn.Module):
    """A trainable module with an fp32 buffer, which nothing casts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return self.down(self.up(x) * self.scale)


def buffered(rank):
    model = make(Buffered)
    plan = resolve_dtypes(model, policy())
    shard(model, init_device_mesh("cpu", (2,)), plan)
    assert_contract(model, plan, run=lambda: backward(model, batch(rank)))
    return model.scale.dtype


def test_given_an_fp32_buffer_in_a_trainable_module_then_the_next_module_is_given_its_own_dtype():
    assert run_ranks(buffered, 2) == [FP32] * 2


# -- experts


class Experts(nn.Module):
    """Computes `experts` linear maps, of which a rank holds a part; every rank applies its own to its own rows."""

    def __init__(self, experts, mesh=None, rank=0, dtype=FP32):
        super().__init__()
        torch.manual_seed(7)
        weight = torch.randn(experts, 6, WIDTH).to(BF16).to(dtype)
        if mesh is not None:
            each = experts // mesh.size()
            local = weight[mesh.get_local_rank() * each :][:each].clone()
            weight = DTensor.from_local(local, mesh, [Shard(0)])
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.einsum("bh,enh->bn", x, weight)


class Moe(nn.Module):
    def __init__(self, mesh, dtype):
        super().__init__()
        self.dense, self.experts = make(Scale, dtype), Experts(4, mesh, dtype=dtype)

    def forward(self, x):
        return self.experts(self.dense(x))


def experts(rank, dp, ep, param, rules):
    """Return the errors of the gradients of experts and of a dense parameter, and the placements of the experts."""
    wide = FP64 if param is FP64 else FP32
    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    model = Moe(mesh["ep"], wide)
    plan = resolve_dtypes(model, policy(*rules, param=param, reduce=wide, output=param))
    whole = init_device_mesh("cpu", (dp * ep,), mesh_dim_names=("all",))
    shard(model, whole, plan, expert_mesh=mesh["dp"])
    with collectives() as reduced:
        assert_contract(model, plan, run=lambda: backward(model, batch(rank, wide)))
    dense, expert = 0.0, torch.zeros(4, 6, WIDTH, dtype=wide)
    for other in range(dp * ep):  # the mean over the global batch; each rank's rows have seen its own experts
        local, held = other % ep, 4 // ep
        plain = Moe(None, wide)
        plain.experts.weight.data = plain.experts.weight.data[local * held :][:held].clone()
        plain = plain.to(param)
        shard(plain, None, resolve_dtypes(plain, policy(*rules, param=param, reduce=wide, output=param)))
        backward(plain, batch(other, wide))
        expert[local * held :][:held] += plain.experts.weight.grad / (dp * ep)
        dense = dense + plain.dense.weight.grad / (dp * ep)
    grad = model.experts.weight.grad
    errors = relative_error(grad.full_tensor(), expert), relative_error(model.dense.weight.grad.full_tensor(), dense)
    return errors, str(model.experts.weight.placements), set(reduced["reduce_scatter"])


@pytest.mark.parametrize(
    ("dp", "ep", "param", "rules"),
    [
        (2, 2, BF16, ()),
        (2, 2, BF16, (Rule("dense", FP32),)),
        (2, 2, FP64, ()),
        (1, 2, BF16, (Rule("experts", FP32),)),
        (1, 2, FP64, ()),  # one rank to reduce over, in a dtype for which FSDP2 itself divides
    ],
)
def test_given_experts_then_their_gradients_too_are_the_mean_over_the_global_batch(dp, ep, param, rules):
    for (expert, dense), placements, reduced in run_ranks(experts, dp * ep, dp, ep, param, rules):
        assert expert < 1e-6 and dense < 1e-6
        assert placements == "(Shard(dim=1), Shard(dim=0))", "dimension 0 is sharded over ep already"
        assert reduced == {FP64 if param is FP64 else FP32}


def hooked(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    model = Moe(mesh["ep"], BF16)
    plan = resolve_dtypes(model, policy())
    shard(model, init_device_mesh("cpu", (2,)), plan, expert_mesh=mesh["dp"])
    backward(model, batch(rank, BF16))
    (group,) = param_groups(model.experts)
    return group._all_reduce_hook_stream is group.comm_ctx.reduce_scatter_stream


def test_given_a_plain_backward_then_gradients_of_experts_are_divided_where_they_are_reduced():
    assert run_ranks(hooked, 2) == [True, True]


def strided(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    odd = Experts(4, mesh["ep"])
    odd.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 3, 5), mesh["ep"], [Shard(0)]))
    ours = shard(odd, mesh["dp"], resolve_dtypes(odd, policy()), expert_mesh=mesh["dp"])
    return str(ours.weight.placements)


def test_given_experts_of_an_uneven_size_then_they_are_sharded_along_dimension_0():
    assert run_ranks(strided, 2) == ["(Shard(dim=0), Shard(dim=0))"] * 2
