"""First GEMM of the experts, fused with its activation, against the two separate functions, bit for bit.

The reference runs on CPU; the kernel runs on CUDA, and under TRITON_INTERPRET=1 (tests/kernels/test_interpreter.py).
"""

import importlib

import pytest
import torch

from dualpipe.kernels import clamped_swiglu, grouped_gemm, grouped_gemm_swiglu, swiglu
from dualpipe.kernels.common import INTERPRET
from row_kernels import far_apart, no_synchronisation, poisoned_memory  # noqa: F401

MODULE = importlib.import_module("dualpipe.kernels.grouped_gemm")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float16, torch.float32, torch.bfloat16, torch.float64]
SIZES = [(5, 7), (8, 12), (40, 72), (16, 24), (72, 1)][: 2 if INTERPRET else 5]  # H, I
FORMS = {"halves": False, "pairs": True}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # rounded twice


def make(counts, hidden, width, dtype, device, extra=2):
    """Return x (M + extra, H), w (E, 2I, H), offs, bias (E, 2I), weight (M + extra,); NaN past the last offset."""
    generator = torch.Generator().manual_seed(0)
    experts, rows = len(counts), sum(counts)
    shapes = (rows + extra, hidden), (experts, 2 * width, hidden), (experts, 2 * width), (rows + extra,)
    x, w, bias, weight = (torch.randn(*s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes)
    x[rows:], weight[rows:] = float("nan"), float("nan")
    return x, w, torch.tensor(counts).cumsum(0).to(torch.int32).to(device), bias, weight


def formula(x, w, offs, bias, weight, clamped, alpha=1.702, limit=7.0):
    """Compute (h, gate_up) of the rows up to the last end, in float64."""
    expert = torch.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)).long())
    x, w, bias, weight = (None if t is None else t.double() for t in (x[: len(expert)], w, bias, weight))
    gate_up = torch.einsum("mh,mnh->mn", x, w[expert]) + (0 if bias is None else bias[expert])
    if clamped:
        gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit) + 1
    else:
        (gate, up), alpha = gate_up.chunk(2, 1), 1.0
    h = up * gate * torch.sigmoid(alpha * gate)
    return h if weight is None else h * weight[: len(expert), None], gate_up


def same(a, b):
    """Return True if the bits are equal; interpreted, if the difference is rounding.

    On some processors the summation order of numpy's GEMM depends on the shape of the tiles (seen with numpy 2.4 on an
    AMD EPYC).
    """
    if not INTERPRET:
        return torch.equal(a, b)
    return a.shape == b.shape and (a - b).double().norm() <= TOLERANCE[a.dtype] * b.double().norm()


def check(x, w, offs, bias, weight, clamped, gather=None):
    rows = int(offs[-1])
    h, gate_up = grouped_gemm_swiglu(x, w, offs, bias=bias, gather=gather, weight=weight, clamped=clamped)
    assert h.dtype is gate_up.dtype is x.dtype
    assert (h.shape, gate_up.shape) == ((len(gather if gather is not None else x), w.shape[1] // 2),
                                        (len(gather if gather is not None else x), w.shape[1]))
    apart = grouped_gemm(x, w, offs, bias=bias, gather=gather)
    assert same(gate_up[:rows], apart[:rows])
    assert same(h[:rows], (clamped_swiglu if clamped else swiglu)(apart, weight)[:rows])
    taken = x if gather is None else x[gather[:rows]]
    for actual, expected in zip((h, gate_up), formula(taken, w, offs, bias, weight, clamped)):
        error = (actual[:rows].double() - expected).norm()
        assert error <= TOLERANCE[x.dtype] * expected.norm(), f"relative error {error / expected.norm():.2e}"


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("counts", [[3, 0, 3], [0, 66, 2, 0], [0, 0]], ids=str)
def test_equals_the_two_functions(counts, hidden, width, dtype, clamped, device, chip):
    x, w, offs, _, _ = make(counts, hidden, width, dtype, device)
    check(x, w, offs, None, None, clamped)


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(16, 40), (5, 7)])
def test_weight_bias_and_gather(hidden, width, dtype, clamped, device, chip):
    x, w, offs, bias, weight = make([2, 0, 3], hidden, width, dtype, device, extra=2)
    gather = torch.tensor([3, 0, 0, 1, 2, 10**6, -1], device=device)  # unused indices are not read
    for options in ({"bias": bias}, {"weight": weight}, {"gather": gather}, {"bias": bias, "weight": weight},
                    {"bias": bias, "weight": weight.float(), "gather": gather.clamp(0, 10**6).int()},
                    {"bias": None, "weight": weight.double()}):
        check(x, w, offs, **({"bias": None, "weight": None} | options), clamped=clamped)


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("counts", "width"), [([300], 136), ([300], 40), ([70, 0, 40], 200)], ids=str)
def test_every_class_of_tiles(counts, width, clamped, device, chip):
    """Wide and narrow shapes with several tiles."""
    check(*make(counts, 16, width, torch.float16, device), clamped)


@pytest.mark.slow
@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 63, 64, 65, 127, 128, 129, 136, 256, 264])
@pytest.mark.parametrize("counts", [[63, 0, 64, 65, 1], [129, 128], [400]], ids=str)
def test_borders_of_tiles(counts, width, dtype, clamped, device, chip):
    check(*make(counts, 72, width, dtype, device), clamped)


@pytest.mark.skipif(not INTERPRET, reason="watches the launcher, interpreted")
@pytest.mark.parametrize(
    ("arch", "counts", "width", "weight", "clamped", "fused"),
    [(90, [300], 136, None, True, True), (90, [300], 136, None, False, True), (80, [300], 136, None, False, True),
     (80, [300], 136, None, True, False), (90, [3], 12, None, False, False), (90, [3], 7, None, False, True),
     (100, [300], 40, None, False, False), (90, [3], 16, torch.float32, False, True),
     (90, [3], 16, torch.float64, False, False)],
)
def test_one_kernel_where_the_table_says_so(arch, counts, width, weight, clamped, fused, monkeypatch):
    apart, launch = [], MODULE.launch_swiglu
    monkeypatch.setattr(MODULE, "launch_swiglu", lambda *operands: [apart.append(True), launch(*operands)])
    monkeypatch.setattr(MODULE, "architecture", lambda device: arch)
    x, w, offs, _, weights = make(counts, 16, width, torch.float16, "cpu", extra=0)
    check(x, w, offs, None, None if weight is None else weights.to(weight), clamped)
    assert apart == ([] if fused else [True])


def test_worked_example(device):
    """The result of gate 10 and up 3, clamped at 7, with alpha 0, is (3 + 1) * 7 / 2."""
    x, offs = torch.tensor([[1.0]], device=device), torch.tensor([1], dtype=torch.int32, device=device)
    w = torch.tensor([[[10.0], [3]]], device=device)
    h, gate_up = grouped_gemm_swiglu(x, w, offs, clamped=True, alpha=0.0)
    assert (h.tolist(), gate_up.tolist()) == ([[14.0]], [[10, 3]])


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
def test_alpha_and_limit(clamped, device, chip):
    x, w, offs, _, _ = make([3], 16, 8, torch.float32, device, extra=0)
    h, gate_up = grouped_gemm_swiglu(x, w, offs, clamped=clamped, alpha=0.5, limit=0.25)
    assert torch.equal(h, clamped_swiglu(gate_up, alpha=0.5, limit=0.25) if clamped else swiglu(gate_up))


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
def test_rows_past_the_last_end_are_not_written(clamped, device, chip, monkeypatch):
    if not (INTERPRET or device.type == "cuda"):
        pytest.skip("the reference computes with every row")
    x, w, offs, bias, weight = make([3, 66], 24, 40, torch.float16, device, extra=70)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **options: self.new_full(size, 7.0, **options))
    for result in grouped_gemm_swiglu(x, w, offs, bias=bias, weight=weight, clamped=clamped):
        assert (result[69:] == 7).all() and not result[:69].isnan().any()


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
def test_one_experts_nan_stays_with_it(clamped, device, chip):
    x, w, offs, _, weight = make([5, 70, 5], 40, 24, torch.float16, device, extra=0)
    x[5:75], w[1], weight[5:75] = float("nan"), float("inf"), float("nan")
    for result in grouped_gemm_swiglu(x, w, offs, weight=weight, clamped=clamped):
        assert not result[[*range(5), *range(75, 80)]].isnan().any()


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
def test_nothing_to_do(clamped, device):
    for rows, width in ((0, 8), (3, 0)):
        x, w, offs, _, weight = make([rows, 0], 16, width, torch.float16, device, extra=0)
        h, gate_up = grouped_gemm_swiglu(x, w, offs, weight=weight, clamped=clamped)
        assert (h.shape, gate_up.shape) == ((rows, width), (rows, 2 * width))


@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_views_work(dtype, clamped, device, chip):
    x, w, offs, bias, weight = make([2, 3], 24, 8, dtype, device, extra=0)
    expected = grouped_gemm_swiglu(x, w, offs, bias=bias, weight=weight, clamped=clamped)
    x_view, w_view = x.t().contiguous().t(), w.transpose(1, 2).contiguous().transpose(1, 2)
    bias_view, weight_view = bias.t().contiguous().t(), weight.repeat_interleave(2)[::2]
    views = grouped_gemm_swiglu(x_view, w_view, offs, bias=bias_view, weight=weight_view, clamped=clamped)
    torch.testing.assert_close(views, expected)
    inner = grouped_gemm_swiglu(x[:, 8:], w[:, :, 8:], offs, clamped=clamped)
    plain = grouped_gemm_swiglu(x[:, 8:].contiguous(), w[:, :, 8:].contiguous(), offs, clamped=clamped)
    torch.testing.assert_close(inner, plain)


def test_rows_beyond_two_to_the_31_elements(chip):
    x, w, offs, _, weight = make([1, 2], 8, 8, torch.float16, "cpu", extra=0)
    for gather in (None, torch.tensor([2, 0, 2])):
        far = grouped_gemm_swiglu(far_apart(x), w, offs, gather=gather, weight=weight)
        near = grouped_gemm_swiglu(x, w, offs, gather=gather, weight=weight)
        assert all(torch.equal(a, b) for a, b in zip(far, near))


BAD = {
    r"w has shape \(2, 5, 4\), expected .* gate and up": {"w": torch.zeros(2, 5, 4)},
    "x is torch.int64 .* expected a floating-point tensor": {"x": torch.zeros(5, 4, dtype=torch.long)},
    r"x\.shape\[1\] is 3": {"x": torch.zeros(5, 3)},
    "expected one dtype": {"x": torch.zeros(5, 4, dtype=torch.bfloat16)},
    "offs is torch.int64, expected int32": {"offs": torch.tensor([1, 2])},
    "one end for each of 2": {"offs": torch.tensor([1, 2, 3], dtype=torch.int32)},
    r"offs is \[3, 2\], expected ends that rise": {"offs": torch.tensor([3, 2], dtype=torch.int32)},
    "expected ends that rise from 0 to at most 5": {"offs": torch.tensor([3, 6], dtype=torch.int32)},
    "expected one device": {"w": torch.zeros(2, 6, 4, device="meta")},
    "bias is .* one row for each expert": {"bias": torch.zeros(2, 3)},
    "gather is torch.float32": {"gather": torch.zeros(5)},
    "expected values within the 5 rows of x": {"gather": torch.tensor([0, 1, 5, 2, 3])},
    "weight is .*, expected floating-point of shape \\(5,\\)": {"weight": torch.zeros(2)},
    "weight is .*, expected floating-point of shape \\(6,\\)":
        {"weight": torch.zeros(5), "gather": torch.zeros(6).int()},
    "weight is on meta": {"weight": torch.zeros(5, device="meta")},
    "limit is 0.0, expected a positive number": {"limit": 0.0, "clamped": True},
}


@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message):
    good = {"x": torch.zeros(5, 4), "w": torch.zeros(2, 6, 4), "offs": torch.tensor([2, 5], dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_gemm_swiglu(**(good | BAD[message]))
