"""Quantized weights under FSDP2: what is gathered is, bit for bit, what a quantized whole weight is, and trains."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from dualpipe.kernels.formats import FORMATS
from dualpipe.models import Qwen3MoeConfig
from dualpipe.nn.deferral import local
from dualpipe.parallel import Rule
from dualpipe.parallel.fsdp import StageParameters
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.quantized import QuantizedTensor, quantize_weights
from dualpipe.schedule import build
from dualpipe.train.model import build_model, build_whole, plan_model
from ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
COLUMNS = 64


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
    ((2,), 7, 255), ((4,), 5, 511), ((2, 2), 7, 256), ((1,), 7, 300),
])
def test_given_plain_fully_shard_then_what_is_gathered_is_what_was_quantized(shape, plain, blocks):
    """Padded and empty shards (5 rows over 4 ranks), HSDP, one rank."""
    cases, ranks = [rows_of(format, plain, blocks) for format in FORMATS], torch.Size(shape).numel()
    run_ranks(gathered_plainly, ranks, shape, "layers", cases, reuse=True)


def every_way(rank: int, cases: list[tuple[str, int]]) -> None:
    gathered_plainly(rank, (2,), "whole", cases)
    gathered_plainly(rank, (2,), "frozen", cases)
    gathered_plainly(rank, (2,), "layers", cases, reshard_after_forward=False)
    gathered_plainly(rank, (2,), "layers", cases, offload_policy=CPUOffloadPolicy(pin_memory=False))


def test_given_one_unit_or_frozen_or_kept_or_offloaded_weights_then_what_is_gathered_is_what_was_quantized():
    run_ranks(every_way, 2, [("mxfp8", 7), ("nvfp4", 7), ("fp8_block", 255)], reuse=True)


def refused_plainly(rank: int) -> list[str]:
    experts, cut = nn.Module(), linears(300, "fp8_block")
    experts.weight = nn.Parameter(QuantizedTensor.quantize(torch.randn(4, 6, COLUMNS), "mxfp8"), requires_grad=False)
    fully_shard(experts, mesh=mesh_of(2), shard_placement_fn=lambda _: Shard(1))
    texts = []
    for call in (experts.unshard, lambda: fully_shard(cut, mesh=mesh_of(2))):
        with pytest.raises(ValueError) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_given_another_dimension_or_cut_blocks_then_plain_fully_shard_is_refused_on_every_rank():
    for dimension, blocks in run_ranks(refused_plainly, 2, reuse=True):
        assert "dualpipe.parallel.shard" in dimension and "multiples of 128" in blocks


def bytes_held(rank: int) -> list[int]:
    model, held = linears(7, "mxfp8"), []
    for layer in model:
        fully_shard(layer, mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    for step in range(200):
        model(torch.randn(3, COLUMNS, dtype=BF16)).sum().backward()
        model.zero_grad()
        if step in (20, 199):
            gc.collect()
            tensors = [each for each in gc.get_objects() if type(each) in (Tensor, QuantizedTensor)]
            held += [len(tensors), sum(each.numel() for each in tensors)]
    return held


def test_given_200_steps_then_no_tensor_is_left():
    for number, elements, later, more in run_ranks(bytes_held, 2, reuse=True):
        assert (later, more) == (number, elements)


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
    plan = plan_model(CONFIG, dtype, replicas=Mesh.of(mesh).replicas, rules=rules)
    common = {"seed": 3, "dtype": dtype, "device": torch.device("cpu"), "mesh": mesh, "plan": plan}
    return build_model(CONFIG, build("1f1b", 1, 1), 0, **common).stages[0], mesh


def pattern_of(format: str) -> str:
    return "*.experts" if FORMATS[format].block[0] > 1 else "*"  # attention has 16 rows


def seeded(rank: int, shape: tuple[int, int], formats: list[str]) -> int:
    whole = dict(build_whole(CONFIG, seed=3, dtype=FP32, device=torch.device("cpu")).named_parameters())
    compared = 0
    for format in formats:
        for way, rule in WAYS.items():
            stage, mesh = made(shape, [rule(pattern_of(format), format)])
            parameters, experts = StageParameters(stage), CONFIG.num_experts // shape[1]
            mine = slice(mesh["ep"].get_local_rank() * experts, (mesh["ep"].get_local_rank() + 1) * experts)
            for _ in range(2):
                parameters.gather()
                parameters.wait()
                for name, param in stage.named_parameters():
                    weight = local(param.detach())
                    if isinstance(weight, QuantizedTensor):
                        expected = QuantizedTensor.quantize(whole[name], format)
                        expected = expected[mine] if weight.shape != expected.shape else expected
                        assert torch.equal(weight, expected), f"{name} {way} {format}"
                        if weight.transposed is not None:
                            assert torch.equal(weight.transposed, expected.transposed_rows())
                        compared += 1
                parameters.complete(reduce=False)
                parameters.finish()
    return compared


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2), (1, 1)])
def test_given_a_seed_then_every_layout_gathers_the_bytes_of_the_quantized_whole(shape):
    formats = ["mxfp8", "nvfp4", "fp8_block", "fp8_tensor"]
    compared = run_ranks(seeded, shape[0] * shape[1], shape, formats, reuse=True)
    assert all(number >= 2 * 2 * (2 + 3 * 12) for number in compared)
