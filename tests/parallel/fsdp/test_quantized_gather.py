"""Quantized weights under FSDP2: what is gathered is, bit for bit, what a quantized whole weight is, and trains."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dualpipe import Pipeline
from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.models import Qwen3MoeConfig
from dualpipe.nn.accumulators import local
from dualpipe.parallel import DTypePolicy, Rule, resolve_dtypes, shard
from dualpipe.parallel.fsdp.driver import StageStep
from dualpipe.parallel.fsdp.materialize import assert_materialized, build_on_meta, materialize
from dualpipe.parallel.fsdp.stage_parameters import StageParameters
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.quantized import QuantizedTensor, quantize_weights
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.schedule import build
from dualpipe.train.config.schema import Config, TrainConfig
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import build_model, build_whole, resolve_model_dtypes
from ranks import run_ranks
from refusals import refusal
from toys import relative_error

BF16, FP32 = torch.bfloat16, torch.float32
COLUMNS = 64


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])


# -- plain fully_shard


def linears(rows: int, format: str, *, trained: bool = True) -> nn.Sequential:
    """The first is quantized, its bias and the second are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, rows), nn.Linear(rows, 32)).to(BF16).requires_grad_(trained)
    quantize_weights(model, format, "0.*")
    return model


def numbers(param: Tensor) -> Tensor:
    return param.dequantize() if isinstance(param, QuantizedTensor) else param.detach().clone()


def gathered_plainly(
    rank: int, shape: tuple[int, ...], units: str, cases: list[tuple[str, int]], **options: Any
) -> None:
    for format, rows in cases:
        model = linears(rows, format, trained=units != "frozen")
        expected = list(map(numbers, model.parameters()))
        for layer in model if units != "whole" else ():
            fully_shard(layer, mesh=mesh_of(*shape), **options)
        fully_shard(model, mesh=mesh_of(*shape), **options)
        x = torch.randn(3, COLUMNS, dtype=BF16, requires_grad=True)
        for _ in range(3):  # from the second on into the memory of the first
            model(x).sum().backward()
            for unit in (model, *model) if units != "whole" else (model,):
                unit.unshard()
            for p, whole in zip(model.parameters(), expected, strict=True):
                assert torch.equal(numbers(p), whole), f"{format}, {rows} rows"
            assert isinstance(model[0].weight, QuantizedTensor) and model[0].weight.master is None
            for unit in (model, *model) if units != "whole" else (model,):
                unit.reshard()
        if units != "frozen":
            grad = model[0].weight.grad
            assert type(grad.to_local()) is Tensor and grad.shape == (rows, COLUMNS) and bool(grad.full_tensor().any())


def rows_of(format: str, plain: int, blocks: int) -> tuple[str, int]:
    return format, blocks if FORMATS[format].block[0] > 1 else plain


@pytest.mark.parametrize(("shape", "plain", "blocks"), [
    ((2,), 7, 255), ((4,), 5, 511), slow((2, 2), 7, 256), ((1,), 7, 300),
])
def test_given_plain_fully_shard_then_what_is_gathered_is_what_was_quantized(shape, plain, blocks):
    """Padded and empty shards (5 rows over 4 ranks), HSDP, one rank."""
    cases, ranks = [rows_of(format, plain, blocks) for format in FORMATS], torch.Size(shape).numel()
    run_ranks(gathered_plainly, ranks, shape, "layers", cases)


def every_way(rank: int, cases: list[tuple[str, int]]) -> None:
    gathered_plainly(rank, (2,), "whole", cases)
    gathered_plainly(rank, (2,), "frozen", cases)
    gathered_plainly(rank, (2,), "layers", cases, reshard_after_forward=False)
    gathered_plainly(rank, (2,), "layers", cases, offload_policy=CPUOffloadPolicy(pin_memory=False))


def test_given_one_unit_or_frozen_or_kept_or_offloaded_weights_then_what_is_gathered_is_what_was_quantized():
    run_ranks(every_way, 2, [("mxfp8", 7), ("nvfp4", 7), ("fp8_block", 255)])


def refused_plainly(rank: int) -> list[str]:
    experts, cut = nn.Module(), linears(300, "fp8_block")
    experts.weight = nn.Parameter(QuantizedTensor.quantize(torch.randn(4, 6, COLUMNS), "mxfp8"), requires_grad=False)
    fully_shard(experts, mesh=mesh_of(2), shard_placement_fn=lambda _: Shard(1))
    return [refusal(experts.unshard), refusal(lambda: fully_shard(cut, mesh=mesh_of(2)))]


def test_given_another_dimension_or_cut_blocks_then_plain_fully_shard_is_refused_on_every_rank():
    for dimension, blocks in run_ranks(refused_plainly, 2):
        assert "dualpipe.parallel.shard" in dimension and "multiples of 128" in blocks


def replicated(rank: int) -> None:
    for format in ("mxfp8", "nvfp4", "fp8_block"):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(COLUMNS, 256), nn.Linear(256, 32))
        quantize_weights(model, format)
        torch.manual_seed(0)
        first = nn.Linear(COLUMNS, 256)
        replicas = nn.parallel.DistributedDataParallel(model)
        assert torch.equal(model[0].weight.master, first.weight)
        assert torch.equal(model[0].weight, QuantizedTensor.quantize(first.weight, format))
        replicas(torch.full((3, COLUMNS), float(rank))).sum().backward()
        mean = model[1].weight.dequantize().sum(0) * 3 / 2  # 3 rows of zeros on the first rank, of ones on the other
        assert torch.allclose(model[0].weight.grad, mean[:, None].expand(256, COLUMNS), atol=1e-5)


def test_given_data_parallel_replicas_then_all_have_the_masters_of_the_first():
    run_ranks(replicated, 2)


def tensors_held(rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the numbers of tensors and of their elements after 20 steps, and after 100.

    Each is the least after five steps: for a moment, gloo's thread holds tensors of a finished communication.
    """
    model, held = linears(7, "mxfp8"), []
    for layer in model:
        fully_shard(layer, mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    for step in range(100):
        model(torch.randn(3, COLUMNS, dtype=BF16)).sum().backward()
        model.zero_grad()
        if step in (*range(15, 20), *range(95, 100)):
            gc.collect()
            tensors = [each for each in gc.get_objects() if type(each) in (Tensor, QuantizedTensor)]
            held.append((len(tensors), sum(each.numel() for each in tensors)))
    return min(held[:5]), min(held[5:])


def test_given_100_steps_then_no_tensor_is_left():
    for early, late in run_ranks(tensors_held, 2):
        assert late == early


# -- the dtype plan, on models

CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True, initializer_range=0.3,
)
WAYS: dict[str, Callable[[str, str], Rule]] = {
    "stored": lambda pattern, format: Rule(pattern, storage=format),
    "gathered": lambda pattern, format: Rule(pattern, gather=format),
}


def made(shape: tuple[int, int], rules: list[Rule], dtype: torch.dtype = FP32) -> tuple[nn.Module, DeviceMesh]:
    mesh = build_mesh(1, *shape, torch.device("cpu"))
    plan = resolve_model_dtypes(CONFIG, dtype, replicas=Mesh.of(mesh).replicas, rules=rules)
    settings = Config(train=TrainConfig(seed=3))
    common = {"dtypes": plan, "device": torch.device("cpu"), "settings": settings, "mesh": mesh}
    return build_model(CONFIG, build("1f1b", 1, 1), 0, **common).stages[0], mesh


def pattern_of(format: str) -> str:
    return "*.experts" if FORMATS[format].block[0] > 1 else "*"  # attention has 16 rows


def seeded(rank: int, shape: tuple[int, int], formats: list[str]) -> int:
    whole = dict(build_whole(CONFIG, seed=3, dtypes=FP32, device=torch.device("cpu")).named_parameters())
    compared = 0
    for format in formats:
        for way, rule in WAYS.items():
            stage, mesh = made(shape, [rule(pattern_of(format), format)])
            parameters, experts = StageParameters(stage), CONFIG.num_experts // shape[1]
            mine = slice(mesh["ep"].get_local_rank() * experts, (mesh["ep"].get_local_rank() + 1) * experts)
            for _ in range(2):
                parameters.check()
                step = StageStep(parameters)
                step.gather()
                step.wait()
                for name, param in stage.named_parameters():
                    weight = local(param.detach())
                    if isinstance(weight, QuantizedTensor):
                        expected = QuantizedTensor.quantize(whole[name], format)
                        expected = expected[mine] if weight.shape != expected.shape else expected
                        assert torch.equal(weight, expected), f"{name} {way} {format}"
                        if weight.transposed is not None:
                            assert torch.equal(weight.transposed, expected.transposed_rows())
                        compared += 1
                step.complete(reduce=False)
                step.finish()
    return compared


@pytest.mark.parametrize("shape", [(2, 1), slow((2, 2)), slow((1, 2)), slow((1, 1))])
def test_given_a_seed_then_every_layout_gathers_the_bytes_of_the_quantized_whole(shape):
    formats = ["mxfp8", "nvfp4", "fp8_block"]
    compared = run_ranks(seeded, shape[0] * shape[1], shape, formats)
    assert all(number >= 2 * 2 * (2 + 2 * 12) for number in compared)


def check(weight: Tensor, values: Tensor, format: Format) -> None:
    expected = QuantizedTensor.quantize(values, format)
    assert isinstance(weight, QuantizedTensor) and weight.dtype is BF16 and torch.equal(weight, expected)
    if format.block[0] > 1:
        assert torch.equal(weight.transposed, expected.transposed_rows())


def loaded_twice(rank: int, shape: tuple[int, ...], rows: int, rules: list[Rule]) -> None:
    for rule in rules:
        model = nn.Sequential(nn.Linear(COLUMNS, rows), nn.Linear(rows, 8, bias=False))
        plan = resolve_dtypes(model, DTypePolicy(BF16, FP32, BF16, [rule]))
        shard(model, mesh_of(*shape), plan)
        for seed in range(2):  # the first forward pads; what is loaded afterwards is in other memory
            values = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))
            placed = distribute_tensor(values, mesh_of(*shape), model[0].weight.placements)
            state = {name: param.detach().clone() for name, param in model.state_dict().items()}
            model.load_state_dict(state | {"0.weight": placed}, assign=True)
            handle = model[0].register_forward_hook(lambda module, *_: check(module.weight, values, rule.format))  # noqa: B023
            model(torch.ones(2, COLUMNS, dtype=BF16)).sum().backward()
            handle.remove()
            assert model[0].weight.grad.dtype is FP32


@pytest.mark.parametrize(
    ("shape", "rows", "blocks"), [((2,), 7, 255), slow((4,), 5, 511), slow((2, 2), 7, 255), ((1,), 7, 300)]
)
def test_given_plain_shards_that_are_loaded_then_they_are_gathered_quantized(shape, rows, blocks):
    byte_formats = [Rule("0", gather=format) for format in ("mxfp8", "nvfp4")]
    run_ranks(loaded_twice, torch.Size(shape).numel(), shape, rows, byte_formats)
    run_ranks(loaded_twice, torch.Size(shape).numel(), shape, blocks, [Rule("0", gather="fp8_block")])


# -- training


def whole(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in values.items()}


def trained(
    shape: tuple[int, int], rules: list[Rule], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of the first step, and what the optimizer updates as it is after three."""
    stage, mesh = made(shape, rules, dtype)
    place = Mesh.of(mesh)
    pipe = Pipeline([stage], process_group=mesh["pp"].get_group(), schedule="1f1b")
    optimizer = Optimizer([stage], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    rows = torch.randint(CONFIG.vocab_size, (8, 9), generator=torch.Generator().manual_seed(1))
    mine, gradients = rows.chunk(place.replicas)[place.replica], {}
    for _ in range(3):
        pipe.step(mine[:, :-1], num_chunks=2, criterion=MicroBatchLoss(2), labels=(mine[:, 1:].contiguous(),))
        assert not any(isinstance(local(param.grad), QuantizedTensor) for param in stage.parameters())
        gradients = gradients or whole({name: param.grad for name, param in stage.named_parameters()})
        optimizer.step(0.01)
        optimizer.zero_grad()
    state, masters = optimizer.state_tensors(), {}
    for name, param in stage.named_parameters():
        masters[name] = state[param]["master"].detach()
        if (part := quantized_part(param)) is not None:
            assert local(masters[name]).data_ptr() == part.master.data_ptr()
    for name, master in (masters := whole(masters)).items():
        param = stage.get_parameter(name)
        if (part := quantized_part(param)) is not None:
            expected = QuantizedTensor.quantize(master, part.format)
            place = tuple(slice(o, o + n) for o, n in zip(*offsets(param)))
            assert torch.equal(part, expected[place[:-1]])
    return gradients, masters


def offsets(param: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(param, DTensor):
        return (0,) * param.dim(), tuple(param.shape)
    (chunk,) = param.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def both_ways(rank: int, shape: tuple[int, int], format: str, dtype: torch.dtype) -> dict[str, tuple[dict, dict]]:
    return {way: trained(shape, [rule(pattern_of(format), format)], dtype) for way, rule in WAYS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "format", "dtype"), [
    ((2, 1), "nvfp4", FP32), slow((2, 1), "fp8_block", BF16), slow((2, 2), "mxfp8", BF16), slow((2, 2), "nvfp4", FP32),
])
def test_stored_and_gathered_weights_are_trained_alike_and_as_on_one_rank(shape, format, dtype):
    """Bit for bit alike: the same bytes are computed with, and the same float32 values updated. The sums of another
    number of ranks differ, in float32."""
    (alone,) = run_ranks(both_ways, 1, (1, 1), format, dtype)
    for results in run_ranks(both_ways, shape[0] * shape[1], shape, format, dtype):
        for stored, gathered in zip(results["stored"], results["gathered"]):
            assert stored.keys() == gathered.keys() == alone["stored"][0].keys()
            assert not [name for name in stored if not torch.equal(stored[name], gathered[name])]
        for name, expected in alone["stored"][0].items() if dtype is FP32 else ():
            assert relative_error(results["stored"][0][name], expected) < 1e-5, name


def kept_in_fp32(rank: int, world: int) -> None:
    """Weights that compute in the dtype that they give themselves out as."""
    model = linears(8, "mxfp8").float()
    fully_shard(model, mesh=mesh_of(world))
    assert model[0].weight.dtype is FP32
    for _ in range(2):
        model(torch.randn(3, COLUMNS)).sum().backward()
    assert type(model[0].weight.grad.to_local()) is Tensor
    model.zero_grad()
    parameters = StageParameters(model)
    parameters.check()
    step = StageStep(parameters)
    step.gather()
    step.wait()
    step.complete(reduce=True)  # of a step without a backward: zeros
    step.finish()
    assert type(model[0].weight.grad.to_local()) is Tensor


@pytest.mark.parametrize("world", [1, 2])  # of one rank the gradients become the reduced ones as they are
def test_gradients_are_plain_where_weights_compute_in_the_dtype_of_their_shards(world):
    run_ranks(kept_in_fp32, world, world)


def late_optimizer(rank: int) -> None:
    """An optimizer that is made before the first forward, which pads 7 rows over 2 ranks into other memory."""
    model = linears(7, "mxfp8")
    expected = model[0].weight.master.clone()
    for layer in model:
        fully_shard(layer, mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    optimizer = Optimizer([model], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    model(torch.ones(3, COLUMNS, dtype=BF16)).sum().backward()
    optimizer.step(0.1)
    updated = quantized_part(model[0].weight).master
    assert torch.allclose((updated - expected.chunk(2)[rank]).abs(), torch.tensor(0.1), atol=1e-3)
    model[0].unshard()
    assert torch.equal(model[0].weight[4 * rank :][: len(updated)].dequantize(),
                       QuantizedTensor.quantize(updated, "mxfp8").dequantize())


def test_given_an_optimizer_that_is_older_than_the_padding_then_it_updates_what_is_gathered():
    run_ranks(late_optimizer, 2)


# -- refusals


def refused(rank: int) -> list[str]:
    mesh, texts = mesh_of(2), []
    policy = DTypePolicy(BF16, FP32, BF16, [Rule("0", storage="fp8_block")])
    for rows, rule in ((300, Rule("0", storage="fp8_block")), (300, Rule("0", gather="fp8_block"))):
        model = nn.Sequential(nn.Linear(COLUMNS, rows), nn.Linear(rows, 8))
        plan = resolve_dtypes(model, DTypePolicy(BF16, FP32, BF16, [rule]))
        texts.append(refusal(lambda model=model, plan=plan: shard(model, mesh, plan)))
        assert not any(isinstance(p, DTensor | QuantizedTensor) for p in model.parameters())
    frozen = linears(256, "fp8_block", trained=False).requires_grad_()
    texts.append(refusal(lambda: shard(frozen, mesh, resolve_dtypes(frozen, policy))))
    texts.append(refusal(lambda: Optimizer([frozen], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)))
    return texts


def test_given_cut_blocks_or_no_masters_then_every_rank_is_refused_with_the_remedy():
    for *cut, sharded, optimized in run_ranks(refused, 2):
        assert all("0.weight is (300, 64)" in text and "150 rows" in text and "mxfp8" in text for text in cut)
        assert "0.weight is trainable" in sharded and "or freeze it" in sharded
        assert "without a master" in optimized


def refused_in_one_stage(rank: int) -> str:
    mesh, dtype, device = build_mesh(2, 2, 1, torch.device("cpu")), FP32, torch.device("cpu")
    config = dataclasses.replace(CONFIG, mlp_only_layers=(1,), intermediate_size=192)
    plan = resolve_model_dtypes(config, dtype, replicas=2, rules=[Rule("*.mlp.up_proj", storage="fp8_block")])
    return refusal(lambda: build_model(
        config, build("1f1b", 2, 1), mesh["pp"].get_local_rank(), dtypes=plan, device=device, mesh=mesh))


def test_given_cut_blocks_in_one_stage_then_the_ranks_of_the_other_are_refused_too():
    """Layer 1 alone is dense."""
    for text in run_ranks(refused_in_one_stage, 4):
        assert "ranks 2-3: layers.1.mlp.up_proj.weight is (192, 32)" in text and "96 rows, which cuts" in text


# -- filling


class Gone:
    """A tensor in a file that cannot be read any more."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        raise OSError("the file is gone")


def on_meta(trained: bool, rule: Rule) -> tuple[nn.Module, Any]:
    model = build_on_meta(lambda: nn.Sequential(nn.Linear(COLUMNS, 7), nn.Linear(7, 6, bias=False)))
    model.requires_grad_(trained)
    plan = resolve_dtypes(model, DTypePolicy(BF16, FP32, BF16, [rule]))
    return shard(model, mesh_of(2), plan), plan


def filled(rank: int) -> None:
    torch.manual_seed(5)
    source = {"0.weight": torch.randn(7, COLUMNS), "0.bias": torch.randn(7), "1.weight": torch.randn(6, 7)}
    for format in ("mxfp8", "nvfp4"):
        for trained in (True, False):
            rule = Rule("0" if format == "nvfp4" else "*", storage=format)  # 7 columns are odd
            values = source if trained else {name: value.to(BF16) for name, value in source.items()}
            model, plan = on_meta(trained, rule)
            materialize(model, "cpu", plan, source=values)
            part = quantized_part(model[0].weight)
            expected = QuantizedTensor.quantize(values["0.weight"], format)
            mine = slice(0, 4) if rank == 0 else slice(4, 7)
            assert torch.equal(part, expected[mine])
            assert (part.master is None) is not trained
            if trained:
                assert torch.equal(part.master, values["0.weight"][mine])
            empty, plan = on_meta(trained, rule)
            materialize(empty, "cpu", plan)
            with pytest.raises(ValueError, match=r"0\.weight was never filled"):
                assert_materialized(empty, "cpu")
            broken, plan = on_meta(trained, rule)
            with pytest.raises((OSError, ValueError)) as error:  # rank 0 ends, too
                materialize(broken, "cpu", plan, source=values | ({"0.bias": Gone(values["0.bias"])} if rank else {}))
                raise ValueError("done")
            assert str(error.value) == ("the file is gone" if rank else "done")


def test_given_a_source_then_bytes_are_those_of_the_whole_and_a_rank_that_fails_keeps_no_other_waiting():
    run_ranks(filled, 2)
