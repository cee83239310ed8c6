"""Rows dispatched in FP8 between processes, as gloo sends them."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import dequantize_rows, quantize_rows
from dualpipe.nn.segments import Communicate, Compute, run_segments
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.experts.one_hop import SCALES
from dualpipe.parallel.fsdp.shard import _cast
from ranks import run_ranks

EXPERTS, HIDDEN, TOKENS, K = 4, 160, 6, 2  # 160: neither 128 nor a multiple of it


def dispatched(rank, block, dtype):
    """Return what the experts get for a batch, its gradient, and the bytes sent and by formula; plain and in FP8."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    generator, found = torch.Generator().manual_seed(rank), []
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    choices = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :K]
    weights, dy = torch.rand(TOKENS, K, generator=generator), torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    for ep in (ExpertParallel(EXPERTS, mesh), ExpertParallel(EXPERTS, mesh, fp8_rows=block)):
        dispatcher, got, inputs = ep.dispatcher(), [], x.clone().requires_grad_()

        def look(rows, weights, received, got=got):
            got += rows.detach(), received.quantized, weights.detach(), received.ids
            return rows * 1

        y = run_segments([
            Compute(dispatcher.plan, ("x", "weights", "choices"), ("rows", "weights", "plan")),
            Communicate(dispatcher.dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received")),
            Compute(look, ("rows", "weights", "received"), "rows"),
            Communicate(dispatcher.combine, ("rows", "received"), "rows"),
            Compute(dispatcher.finish, ("rows", "plan"), "x"),
        ], {"x": inputs, "weights": weights, "choices": choices})["x"]
        forward = ep.sent_bytes
        y.backward(dy)
        found.append((*got, inputs.grad, forward, ep.sent_bytes - forward))
    plain, fp8 = found
    quantized = quantize_rows(plain[0], block)
    equal = [torch.equal(a, b) for a, b in [
        (fp8[0], dequantize_rows(quantized, dtype)), (fp8[1].elements.float(), quantized.elements.float()),
        (fp8[1].scales.float(), quantized.scales.float()), *zip(fp8[2:5], plain[2:5]),
    ]]
    sent = int(((choices // 2) == 1 - rank).any(1).sum())  # tokens with an expert on the other rank
    saved = sent * (HIDDEN * (dtype.itemsize - 1) - {128: 2 * 4, 32: 5}[block])
    return equal, plain[1], plain[5] - fp8[5] - saved, plain[6] - fp8[6]


@pytest.mark.parametrize("block, dtype", [
    (128, torch.bfloat16), (32, torch.float32),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((32, torch.bfloat16), (128, torch.float32))),
], ids=str)
def test_experts_get_quantized_rows_and_gradients_stay_as_they_are(block, dtype):
    for equal, plain, forward, backward in run_ranks(dispatched, 2, block, dtype):
        assert equal == [True] * 6
        assert (plain, forward, backward) == (None, 0, 0)


def without_tokens(rank, block):
    """Return the rows that a rank gets, in the forward and recomputed; rank 1 has no tokens, then both have one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dispatcher, got = ExpertParallel(EXPERTS, mesh, fp8_rows=block).dispatcher(), []
    for tokens in (1 - rank, 1):
        x = torch.full((tokens, HIDDEN), rank + 1.0).bfloat16()
        made = dispatcher.plan(x, torch.ones(tokens, K), torch.tensor([[0, 2]] * tokens).view(tokens, 2))
        pending = dispatcher.dispatch.forward(made)
        pending.advance()
        (rows, _, received), context = pending.wait()
        again = dispatcher.dispatch.recompute(context, made)
        again.advance()
        assert torch.equal(again.wait()[0][0], rows)
        back = dispatcher.combine.forward((rows, received))
        back.advance()
        assert torch.equal(dispatcher.finish(back.wait()[0][0], made[2]), 2 * x)
        got.append(rows.float().unique().tolist())
    return got


@pytest.mark.parametrize("block", [128, 32])
def test_a_rank_without_tokens_gets_those_of_others(block):
    assert run_ranks(without_tokens, 2, block) == [[[1.0], [1.0, 2.0]]] * 2


def disagreeing(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dispatcher = ExpertParallel(EXPERTS, mesh, fp8_rows=(32, 128)[rank]).dispatcher()
    made = dispatcher.plan(torch.zeros(1, HIDDEN), torch.ones(1, K), torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="the same sizes, dtypes and fp8_rows everywhere"):
        dispatcher.dispatch.forward(made).advance()
    return True


def test_what_does_not_fit_is_refused():
    assert run_ranks(disagreeing, 2) == [True, True]
    with pytest.raises(ValueError, match="fp8_rows must be 128, 32, elements under a scale, or None; got 64"):
        ExpertParallel(4, fp8_rows=64)


class Experts(nn.Module):
    def forward(self, x: Tensor, quantized: QuantizedRows) -> tuple[Tensor, QuantizedRows]:
        return x, quantized


@pytest.mark.parametrize("block", [128, 32])
def test_casts_where_dtypes_meet_leave_quantized_rows(block):
    """DeepSeek-V3 has such a cast: its routers have a bias in float32."""
    experts = Experts()
    _cast(experts, torch.bfloat16, torch.bfloat16)
    x, rows = experts(torch.ones(2, 128), quantized=quantize_rows(torch.ones(2, 128), block))
    assert x.dtype is torch.bfloat16
    assert [part.dtype for part in rows] == [torch.float8_e4m3fn, SCALES[block]]
