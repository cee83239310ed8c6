"""Weight gradients of several micro-batches in one launch, against a plain loop in float64.

On CPU this is the reference, under TRITON_INTERPRET=1 (tests/kernels/test_interpreter.py) and on CUDA the kernel.
"""

import importlib
from itertools import pairwise

import pytest
import torch

from dualpipe.kernels import WgradOperands, grouped_gemm_wgrad, grouped_gemm_wgrad_merged
from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.grouped_gemm_tiles import MOST_MERGED

MODULE = importlib.import_module("dualpipe.kernels.grouped_gemm")  # the package's attribute is the function
# Half precision rounds the result once, on CPU once for each micro-batch; float32 sums at most 600 products.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
COUNTS = {  # of three experts, by micro-batch
    "uneven": [[3, 0, 9], [1, 0, 64], [0, 0, 65]],
    "one row": [[0, 0, 1], [0, 0, 0]],
    "no rows": [[0, 0, 0], [0, 0, 0]],
    "an empty micro-batch": [[2, 3, 4], [0, 0, 0], [5, 0, 1], [1, 1, 1]],
    "more than one launch": [[2, 1, 0]] * 7,
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NEEDS_A_KERNEL = "the reference adds one micro-batch after the other"


def make(counts_of, hidden, out, dtype, device, *, gathered=False, extra=2):
    """The operands of each micro-batch, with `extra` rows of NaN past the last offset."""
    generator = torch.Generator().manual_seed(0)
    operands = []
    for counts in counts_of:
        rows = sum(counts)
        num_tokens = max(1, rows // 2) if gathered else rows
        x, dy = (torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)
                 for size, width in ((num_tokens + extra, hidden), (rows + extra, out)))
        x[num_tokens:] = float("nan")
        dy[rows:] = float("nan")
        offs = torch.tensor(counts).cumsum(0).to(torch.int32)
        gather = None
        if gathered:
            used = torch.randint(0, num_tokens, (rows,), generator=generator)
            gather = torch.cat([used, torch.full((extra,), 10**6)]).int().to(device)  # unused ones are not looked at
        operands.append(WgradOperands(dy.to(device), x.to(device), offs.to(device), gather))
    return operands


def expected_sum(operands):
    """Sum over the micro-batches and the rows of each expert, in float64 (E, N, H)."""
    total = 0.0
    for dy, x, offs, gather in operands:
        ends = [0, *offs.tolist()]
        rows = x if gather is None else x[gather[: ends[-1]].long()]
        experts = [dy[a:b].double().T @ rows[a:b].double() for a, b in pairwise(ends)]
        total = total + torch.stack(experts)
    return total


def check(actual, expected, dtype):
    assert actual.dtype is dtype
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= TOLERANCE[dtype]


def check_sums(operands, out_dtype):
    expected = expected_sum(operands)
    poisoned = torch.full_like(expected, float("nan"), dtype=out_dtype)
    grouped_gemm_wgrad_merged(operands, out=poisoned, accumulate=False)
    check(poisoned, expected, out_dtype)
    ones = torch.ones_like(expected, dtype=out_dtype)
    grouped_gemm_wgrad_merged(operands, out=ones, accumulate=True)
    check(ones, expected + 1, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize(("hidden", "out"), [(16, 24), (5, 7)])
@pytest.mark.parametrize("counts_of", COUNTS.values(), ids=COUNTS)
def test_equals_a_loop(counts_of, hidden, out, gathered, dtype, device, chip):
    check_sums(make(counts_of, hidden, out, dtype, device, gathered=gathered), dtype)


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_tiles(dtype, gathered, device, chip):
    """Several of rows, columns and depth; float32 and float64 have tiles of 32 x 64 x 32 and 32 x 32 x 16 at most."""
    half = dtype in (torch.float16, torch.bfloat16)
    counts_of = [[66, 0, 129], [1, 0, 64], [65, 0, 0]] if half else [[34, 0, 65], [1, 0, 32], [33, 0, 0]]
    hidden, out = (136, 264) if half else (72, 72)
    check_sums(make(counts_of, hidden, out, dtype, device, gathered=gathered), dtype)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64], ids=str)
def test_wider_accumulators_are_not_rounded_to_half(out_dtype, device, chip):
    dtype = torch.float16 if INTERPRET else torch.bfloat16
    check_sums(make([[40, 3, 0], [2, 0, 1]], 16, 8, dtype, device), out_dtype)


def test_worked_example(device):
    ones = torch.ones(1, 1, device=device)
    offs = torch.ones(1, dtype=torch.int32, device=device)
    out = torch.full((1, 1, 1), 4.0, device=device)
    grouped_gemm_wgrad_merged([WgradOperands(ones, ones, offs), WgradOperands(2 * ones, ones, offs)], out=out,
                              accumulate=True)
    assert out.item() == 7


def test_adding_leaves_an_expert_without_rows_alone(device, chip):
    operands = make([[4, 0, 0], [0, 0, 3]], 16, 8, torch.float32, device)
    out = torch.full((3, 8, 16), float("nan"), device=device)
    out[0] = 0
    out[2] = 0
    grouped_gemm_wgrad_merged(operands, out=out, accumulate=True)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_one_experts_nan_stays_with_it(device, chip):
    operands = make([[5, 70, 5], [3, 3, 3]], 40, 24, torch.float32, device)
    operands[0].x[5:75] = float("nan")
    operands[0].dy[5:75] = float("inf")
    out = torch.empty(3, 24, 40, device=device)
    grouped_gemm_wgrad_merged(operands, out=out, accumulate=False)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


@pytest.mark.skipif(INTERPRET, reason="of the reference")
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_reference_has_the_bits_of_separate_calls(accumulate, out_dtype, device):
    if device.type == "cuda":
        pytest.skip("of the reference")
    operands = make([[70, 0, 30], [5, 6, 7], [1, 0, 0]], 72, 136, torch.bfloat16, device, gathered=True)
    merged = torch.ones(3, 136, 72, dtype=out_dtype)
    grouped_gemm_wgrad_merged(operands, out=merged, accumulate=accumulate)
    separate = torch.ones(3, 136, 72, dtype=out_dtype)
    for number, (dy, x, offs, gather) in enumerate(operands):
        grouped_gemm_wgrad(dy, x, offs, out=separate, accumulate=accumulate or number > 0, gather=gather)
    assert torch.equal(merged, separate)


def test_the_kernel_adds_to_the_accumulator_once(device, chip):
    """1 is lost next to 2^24 in float32, 1 + 1 is not."""
    if not (INTERPRET or device.type == "cuda"):
        pytest.skip(NEEDS_A_KERNEL)
    ones = torch.ones(1, 1, device=device)
    offs = torch.ones(1, dtype=torch.int32, device=device)
    out = torch.full((1, 1, 1), 2.0**24, device=device)
    grouped_gemm_wgrad_merged([WgradOperands(ones, ones, offs)] * 2, out=out, accumulate=True)
    assert out.item() == 2**24 + 2


@pytest.mark.parametrize("arch", [80, 90])
def test_launches(arch, monkeypatch):
    """Seven micro-batches alike are two launches, on sm_80 four; another layout, or a copy in float64, has its own."""
    monkeypatch.setattr(MODULE, "architecture", lambda device: arch)
    operands = make([[2, 1, 0]] * 7, 16, 8, torch.float32, torch.device("cpu"))

    def sizes(operands, dtype=torch.float32):
        return [len(batch) for batch in MODULE._mergeable_batches(operands, torch.empty(1, dtype=dtype))]

    assert sizes(operands) == ([3, 4] if arch == 90 else [1, 2, 2, 2])
    assert sizes(operands[:MOST_MERGED]) == ([4] if arch == 90 else [2, 2])
    assert sizes(operands[:2], torch.float64) == [1, 1]
    transposed = operands[1]._replace(x=operands[1].x.t().contiguous().t())
    assert sizes([operands[0], transposed, operands[2], operands[3]]) == [1, 1, 2]


def test_misfits_are_refused_before_anything_is_added():
    operands = make([[2, 1, 0], [3, 0, 1]], 16, 8, torch.float32, torch.device("cpu"))
    out = torch.zeros(3, 8, 16)
    wrong = {
        "one dtype": operands[1]._replace(x=operands[1].x.half()),
        r"out has shape \(3, 8, 16\), expected \(E, 7, 16\)": operands[1]._replace(dy=operands[1].dy[:, 1:]),
        "expected ends that rise from 0 to at most 6": operands[1]._replace(offs=operands[1].offs.flip(0)),
    }
    for message, other in wrong.items():
        with pytest.raises(ValueError, match=message):
            grouped_gemm_wgrad_merged([operands[0], other], out=out, accumulate=True)
    with pytest.raises(ValueError, match="at least one micro-batch; got none"):
        grouped_gemm_wgrad_merged([], out=out, accumulate=True)
    assert not out.any()


