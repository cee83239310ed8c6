"""Attention on tensors without memory: the kernels that devices take, by what they keep."""

import pytest
import torch
import torch.nn.functional as F

from dualpipe.plan.meta_transformers import DeviceAttention

BATCH, HEADS, LENGTH, SIZE = 2, 4, 16, 8


def operands(device, heads=HEADS, v_size=SIZE):
    """Queries, keys and values, as layers make them: heads behind the sequence in memory."""
    sizes = (HEADS, SIZE), (heads, SIZE), (heads, v_size)
    return [torch.zeros(BATCH, LENGTH, *size, device=device, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)
            for size in sizes]


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("options", [
    {"is_causal": True}, {"is_causal": True, "enable_gqa": True}, {"attn_mask": (LENGTH, LENGTH)}], ids=str)
def test_kernels_keep_no_scores(cpu, options):
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = torch.ones(BATCH, 1, *options["attn_mask"], dtype=torch.bool, device="meta")
    q, k, v = operands("meta", heads=2 if "enable_gqa" in options else HEADS)
    sizes = []

    def keep(tensor):
        sizes.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
        return tensor

    with DeviceAttention(cpu), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = F.scaled_dot_product_attention(q, k, v, **options)
    assert y.shape == q.shape and sizes
    assert HEADS * LENGTH * LENGTH * BATCH not in sizes, "the scores"
    y.sum().backward()


@pytest.mark.parametrize("options", [{}, {"v_size": 4}], ids=str)
def test_the_cpu_takes_the_kernel_that_torch_takes(options):
    """Without one for values of another size than queries, where scores are kept."""
    names = []
    for device in ("cpu", "meta"):
        with DeviceAttention(cpu=True):
            y = F.scaled_dot_product_attention(*operands(device, **options), is_causal=True)
        names.append(y.grad_fn.name())
    with torch.no_grad():
        plain = F.scaled_dot_product_attention(*operands("cpu", **options), is_causal=True)
    assert names[0] == names[1] and y.stride() == plain.stride()
