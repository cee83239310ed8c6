"""A step of a small Qwen3-MoE, and what a pretend device launches in it, by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device_book import CUDA, where
from dualpipe import Pipeline
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.nn import GroupedLinear, RouterSet
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.quantized import FORMATS, quantize_weights
from pretend_cuda import UNWRITTEN, PretendCuda, pretend_cuda

MICRO_BATCHES = 2
# By what they consist of there: count, running sum, place, copy; choose, sort; attention's backward is three kernels,
# and a sum for keys and one for values where heads share them. Memory that is not written, and a look at pinned memory,
# are none.
SEVERAL = {
    "dualpipe::sort_tokens": 4, "dualpipe::find_destinations": 2, "topk": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}
NONE = {*UNWRITTEN, "tolist"}


class AllRanksAlike:
    """An all-to-all between ranks that all send what this one, the first, does. What comes back is of no use."""

    rank, size, device, group = 0, 2, CUDA, None

    def start(self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]):
        if len({*received_rows, sent_rows[0]}) == 1:
            received.view(self.size, sent_rows[0], -1).copy_(sent[: sent_rows[0]].expand(self.size, -1, -1))
        else:
            received.zero_()
        return mock.Mock()


def make_step(num_layers: int, ep: bool, format: str | None, device: torch.device) -> Callable[[], None]:
    """Return a function that runs a step with all micro-batches; from the second on it has accumulators to add to.

    format: of quantized weights, whose rows then go to other ranks in FP8.
    """
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
    )
    (stage,) = build_stages(config, 1)
    stage.init_weights(0)
    stage = stage.to(device, torch.bfloat16)
    if format is not None:
        quantize_weights(stage, format)
    if ep:
        fp8_rows = None if format is None else FORMATS[format].block[1]
        stage.use_expert_parallelism(ExpertParallel(config.num_experts, AllRanksAlike(), fp8_rows=fp8_rows))
        for module in stage.modules():
            if isinstance(module, GroupedLinear):
                module.weight = nn.Parameter(module.weight.detach().chunk(AllRanksAlike.size)[0].clone())
    for parameter in stage.parameters():
        parameter.grad_dtype = torch.float32
    pipe = Pipeline([stage], schedule="1f1b")
    routers = RouterSet([stage], num_microbatches=MICRO_BATCHES, balance=0.001, level="global", device=device)
    tokens = torch.randint(64, (2, 2 * MICRO_BATCHES, 8)).to(device)

    def step() -> None:
        with routers.step():
            pipe.step(tokens[0], num_chunks=MICRO_BATCHES, labels=(tokens[1],), criterion=lambda logits, labels:
                      F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))
        assert all(parameter.grad is not None for parameter in stage.parameters())

    return step


def launches(num_layers: int, ep: bool, format: str | None = None) -> Counter[tuple[str, str]]:
    """Return how often what was launched where, on the pretend device, in the second step of `make_step`."""
    found: Counter[tuple[str, str]] = Counter()
    launch, is_second = PretendCuda.launch, False

    def counted(device, name, *args, **kwargs):
        node = torch._C._current_autograd_node()
        if is_second and name not in NONE:
            at = where(2).partition(" < ")[2] if node is None else f"backward: {node.name()}"  # whom this was called by
            found[name, at] += SEVERAL.get(name, 1)
        return launch(device, name, *args, **kwargs)

    with pretend_cuda(), mock.patch.object(PretendCuda, "launch", counted):
        step = make_step(num_layers, ep, format, CUDA)
        step()
        is_second = True
        step()
    return found


def layer_launches(ep: bool, format: str | None = None) -> dict[tuple[str, str], float]:
    """Return what a layer launches for a micro-batch: what two layers do, less what one does."""
    one, two = launches(1, ep, format), launches(2, ep, format)
    return {what: (two[what] - one[what]) / MICRO_BATCHES for what in two if two[what] != one[what]}
