"""Grouped GEMMs against a plain loop in float64, on odd and empty sizes, with poisoned results and unused rows.

On CPU this is the reference, under TRITON_INTERPRET=1 (tests/kernels/test_interpreter.py) and on CUDA the kernel.
"""

import importlib

import pytest
import torch

from dualpipe.kernels import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_swiglu, grouped_gemm_wgrad
from dualpipe.kernels.common import INTERPRET
from row_kernels import no_synchronisation  # noqa: F401

MODULE = importlib.import_module("dualpipe.kernels.grouped_gemm")  # the package's attribute is the function
# Half precision rounds the result once; float32 sums at most 600 products, in the order of the tiles.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
COUNTS = {
    "balanced": [3, 3, 3],
    "first empty": [0, 5, 2],
    "middle empty": [1, 0, 64],
    "last empty": [65, 1, 0],
    "all empty": [0, 0, 0],
    "one expert": [7],
}
# H, N: with and without rows of 16-byte multiples.
SIZES = [(16, 24), (5, 7), (80, 12), (8, 8)][: 2 if INTERPRET else 4]
BORDERS = {"63 to 65": [63, 0, 64, 65, 1], "127 to 129": [127, 128, 0, 129]}
FAST_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def make(counts, hidden, out, dtype, device, extra=2):
    """Return operands with `extra` rows of NaN past the last offset."""
    generator = torch.Generator().manual_seed(0)
    experts, rows = len(counts), sum(counts)
    x, dy, w = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
                for shape in ((rows + extra, hidden), (rows + extra, out), (experts, out, hidden)))
    x[rows:], dy[rows:] = float("nan"), float("nan")
    return x.to(device), dy.to(device), w.to(device), ends(counts, device)


def ends(counts, device="cpu"):
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(device)


def loop(function, counts, *operands):
    """Apply `function(e, *rows of the operands)` to every expert, in float64."""
    start, results = 0, []
    for e, count in enumerate(counts):
        results.append(function(e, *(operand[start : start + count].double() for operand in operands)))
        start += count
    return results


def check(actual, expected, dtype):
    assert actual.dtype is dtype
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= TOLERANCE[dtype]


def check_products(counts, hidden, out, dtype, device, accumulators=None):
    x, dy, w, offs = make(counts, hidden, out, dtype, device)
    rows = sum(counts)
    wide = w.double()
    check(grouped_gemm(x, w, offs)[:rows], torch.cat(loop(lambda e, a: a @ wide[e].T, counts, x)), dtype)
    check(grouped_gemm_dgrad(dy, w, offs)[:rows], torch.cat(loop(lambda e, a: a @ wide[e], counts, dy)), dtype)
    expected = torch.stack(loop(lambda e, a, b: a.T @ b, counts, dy, x))
    for accumulator in accumulators or [dtype]:
        poisoned = torch.full_like(w, float("nan"), dtype=accumulator)
        grouped_gemm_wgrad(dy, x, offs, out=poisoned, accumulate=False)
        check(poisoned, expected, accumulator)
        ones = torch.ones_like(w, dtype=accumulator)
        grouped_gemm_wgrad(dy, x, offs, out=ones, accumulate=True)
        check(ones, expected + 1, accumulator)


@pytest.mark.parametrize("dtype", FAST_DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "out"), SIZES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_equal_a_loop(counts, hidden, out, dtype, device, chip):
    check_products(counts, hidden, out, dtype, device)


@pytest.mark.parametrize("dtype", FAST_DTYPES, ids=str)
def test_products_of_several_tiles(dtype, device, chip):
    """Several tiles of rows, columns and depth; tiles of float32 have at most 32 x 64 x 32, of float64 32 x 32 x 16."""
    half = dtype in (torch.float16, torch.bfloat16)
    check_products([66, 0, 1, 129] if half else [34, 0, 1, 65], 136 if half else 72, 264 if half else 72, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FAST_DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "out"), [(72, 328), (264, 136), (130, 67), (8, 512), (512, 8), (576, 1)])
@pytest.mark.parametrize("counts", BORDERS.values(), ids=BORDERS)
def test_borders_of_tiles(counts, hidden, out, dtype, device, chip):
    check_products(counts, hidden, out, dtype, device, [dtype, torch.promote_types(dtype, torch.float32)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FAST_DTYPES, ids=str)
@pytest.mark.parametrize("experts", [1, 2, 17, 64, 128])
def test_numbers_of_experts(experts, dtype, device, chip):
    counts = [(7 * e * e) % 41 if e % 3 else 0 for e in range(experts)]
    check_products(counts if sum(counts) else [300], 40, 24, dtype, device)


def test_more_than_a_group_of_tiles(device, chip):
    """Several groups of row tiles."""
    dtype = torch.float16
    check_products([1300, 0, 400], 16, 136, dtype, device)


def test_worked_example(device):
    x = torch.tensor([[1.0], [2], [3], [4], [5]], device=device)
    w = torch.tensor([[[10.0]], [[100]], [[1000]]], device=device)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    assert grouped_gemm(x, w, offs).flatten().tolist() == [10, 20, 3000, 4000, 5000]


@pytest.mark.parametrize("dtype", FAST_DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "out"), [(16, 8), (5, 7)])
def test_bias_and_gather(hidden, out, dtype, device, chip):
    counts, gather = [2, 0, 3], torch.tensor([3, 0, 0, 1, 2, 10**6, -1], device=device)  # unused ones are not looked at
    x, dy, w, offs = make(counts, hidden, out, dtype, device, extra=0)
    bias = torch.randn(3, out, device=device).to(dtype)
    taken, wide, wide_bias = x[gather[:5]], w.double(), bias.double()
    expected = torch.cat(loop(lambda e, a: a @ wide[e].T + wide_bias[e], counts, taken))
    check(grouped_gemm(x, w, offs, bias=bias, gather=gather)[:5], expected, dtype)
    dy = torch.cat([dy, dy.new_full((2, out), float("nan"))])
    gathered = torch.full_like(w, float("nan"))
    grouped_gemm_wgrad(dy, x, offs, out=gathered, accumulate=False, gather=gather.int().clamp(max=10**6))
    check(gathered, torch.stack(loop(lambda e, a, b: a.T @ b, counts, dy, taken)), dtype)


def test_gather_repeats_and_skips_rows_of_another_number(device):
    x, _, w, offs = make([3, 40], 16, 24, torch.float16, device, extra=0)
    gather = torch.randint(0, 9, (43,), device=device)
    assert torch.equal(grouped_gemm(x[:9], w, offs, gather=gather.int()), grouped_gemm(x[:9][gather], w, offs))


def test_wgrad_into_float32_is_not_rounded_to_half(device):
    dtype = torch.float16 if INTERPRET else torch.bfloat16
    x, dy, w, offs = make([40, 3, 0], 16, 8, dtype, device)
    out = torch.empty_like(w, dtype=torch.float32)
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=False)
    check(out, torch.stack(loop(lambda e, a, b: a.T @ b, [40, 3, 0], dy, x)), torch.float32)


@pytest.mark.parametrize("dtype", FAST_DTYPES, ids=str)
def test_wgrad_into_float64_multiplies_in_float64(dtype, device, chip):
    x, dy, w, offs = make([40, 3, 0], 16, 8, dtype, device)
    gather = torch.arange(44, -1, -1, device=device).clamp(max=42)
    for rows in (None, gather):
        out = torch.ones_like(w, dtype=torch.float64)
        grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=True, gather=rows)
        taken = x if rows is None else x[rows]
        check(out, torch.stack(loop(lambda e, a, b: a.T @ b, [40, 3, 0], dy, taken)) + 1, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adding_leaves_an_expert_without_rows_alone(dtype, device, chip):
    x, dy, w, offs = make([4, 0, 3], 16, 8, dtype, device)
    out = torch.full_like(w, float("nan"))
    out[0], out[2] = 0, 0
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=True)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", FAST_DTYPES, ids=str)
def test_one_experts_nan_stays_with_it(dtype, device, chip):
    x, dy, w, offs = make([5, 70, 5], 40, 24, dtype, device)
    x[5:75], dy[5:75], w[1] = float("nan"), float("inf"), float("nan")
    others = [*range(5), *range(75, 80)]
    assert not grouped_gemm(x, w, offs)[others].isnan().any()
    assert not grouped_gemm_dgrad(dy, w, offs)[others].isnan().any()
    out = torch.empty_like(w)
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=False)
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("kernel_writes", ["grouped_gemm", "grouped_gemm_dgrad"])
def test_rows_past_the_last_end_are_not_written(kernel_writes, device, chip, monkeypatch):
    x, dy, w, offs = make([3, 66], 24, 40, torch.float16, device, extra=70)
    poisoned = []

    def new_empty(self, *size, **options):
        made = self.new_full(size, 7.0, **options)
        poisoned.extend([made] if made.numel() else [])  # the interpreter makes empty ones
        return made

    if not (INTERPRET or device.type == "cuda"):
        pytest.skip("torch.nn.functional.grouped_mm allocates for itself")
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    y = grouped_gemm(x, w, offs) if kernel_writes == "grouped_gemm" else grouped_gemm_dgrad(dy, w, offs)
    assert len(poisoned) == 1 and (poisoned[0][69:] == 7).all() and not y[:69].isnan().any()


def test_bits_depend_neither_on_the_order_of_programs_nor_on_their_number(device, chip, monkeypatch):
    """Like tiles on a device with occupied multiprocessors; the grid is an upper bound."""
    if not (INTERPRET or device.type == "cuda"):
        pytest.skip("the reference has no programs")
    x, dy, w, offs = make([70, 0, 30], 72, 136, torch.float16, device, extra=0)

    def results():
        dw = torch.ones_like(w, dtype=torch.float32)
        grouped_gemm_wgrad(dy, x, offs, out=dw, accumulate=True)
        return grouped_gemm(x, w, offs), grouped_gemm_dgrad(dy, w, offs), dw

    class More:
        kernel = MODULE._rows_kernel

        def __getitem__(self, grid):
            return self.kernel[(grid[0] + 7,)]

    expected = results()
    monkeypatch.setattr(MODULE, "_rows_kernel", More())
    if INTERPRET:
        from triton.runtime.interpreter import interpreter_builder as programs

        place = programs.set_grid_idx
        monkeypatch.setattr(programs, "set_grid_idx", lambda x, y, z: place(programs.grid_dim[0] - 1 - x, y, z))
    assert all(torch.equal(actual, first) for actual, first in zip(results(), expected, strict=True))


def test_no_rows_at_all(device):
    x, dy, w, offs = make([0, 0], 16, 8, torch.float16, device, extra=0)
    assert grouped_gemm(x, w, offs).shape == (0, 8)
    assert grouped_gemm_dgrad(dy, w, offs).shape == (0, 16)
    out = torch.full_like(w, float("nan"))
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=False)
    assert (out == 0).all()
    out.fill_(3)
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=True)
    assert (out == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_views_work(dtype, device, chip):
    x, dy, w, offs = make([2, 3], 16, 8, dtype, device, extra=0)
    x_view, w_view = x.t().contiguous().t(), w.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(grouped_gemm(x_view, w_view, offs), grouped_gemm(x, w, offs))
    torch.testing.assert_close(grouped_gemm(x[:, 3:], w[:, :, 3:], offs),
                               grouped_gemm(x[:, 3:].contiguous(), w[:, :, 3:].contiguous(), offs))
    ones = torch.ones((), device=device).to(dtype).expand(5, 8)  # what sum().backward() hands over
    torch.testing.assert_close(grouped_gemm_dgrad(ones, w, offs), grouped_gemm_dgrad(ones.contiguous(), w, offs))
    plain, view = torch.zeros_like(w), torch.zeros_like(w.transpose(1, 2)).transpose(1, 2)
    grouped_gemm_wgrad(dy, x, offs, out=plain, accumulate=True)
    grouped_gemm_wgrad(dy, x_view, offs, out=view, accumulate=True)
    torch.testing.assert_close(view, plain)
    gather, bias = torch.tensor([1, 0, 4, 4, 2], device=device), torch.randn(2, 8, device=device).to(dtype)
    apart = (t.repeat_interleave(2, 0)[::2] for t in (offs, gather, bias))
    offs_view, gather_view, bias_view = apart
    torch.testing.assert_close(grouped_gemm(x, w, offs_view, bias=bias_view, gather=gather_view),
                               grouped_gemm(x, w, offs, bias=bias, gather=gather))


def test_more_than_two_billion_elements(tmp_path):
    """Row 2 starts past 2^31 elements; a sparse file replaces memory of that size."""
    row = 2**30 + 8
    size = 2 * row + 8  # 4.3 GB of float16, of which a few pages exist
    storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.float16)
    x = storage.as_strided((3, 8), (row, 1))
    small, dy, w, offs = make([1, 2], 8, 8, torch.float16, "cpu", extra=0)
    x.copy_(small)
    assert torch.equal(grouped_gemm(x, w, offs), grouped_gemm(small, w, offs))
    out = torch.zeros(2, 2, 8, 8)
    grouped_gemm_wgrad(dy, x, offs, out=out[0], accumulate=False)
    grouped_gemm_wgrad(dy, small, offs, out=out[1], accumulate=False)
    assert torch.equal(out[0], out[1])
    twice = torch.tensor([2, 0, 2])
    assert torch.equal(grouped_gemm(x, w, offs, gather=twice), grouped_gemm(small, w, offs, gather=twice))
    assert torch.equal(grouped_gemm_dgrad(x, w, offs), grouped_gemm_dgrad(small, w, offs))
    for result, operand in zip(out, (x, small)):
        grouped_gemm_wgrad(operand, operand, offs, out=result, accumulate=False)
    assert torch.equal(out[0], out[1])
    for result, operand in zip(out, (x, small)):
        grouped_gemm_wgrad(dy, operand, offs, out=result, accumulate=True, gather=twice)
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("trained", ["x", "w", "bias"])
def test_a_backward_raises_instead_of_losing_the_gradient(trained, device):
    x, dy, w, offs = make([3, 0, 2], 16, 8, torch.float16, device, extra=0)
    operands = {"x": x, "w": w, "bias": torch.zeros(3, 8, dtype=torch.float16, device=device)}
    operands[trained].requires_grad_()
    results = [grouped_gemm(x, w, offs, bias=operands["bias"]),
               *grouped_gemm_swiglu(x, w, offs, bias=operands["bias"])]
    if trained == "w":
        results.append(grouped_gemm_dgrad(dy, w, offs))
    for result in results:
        with pytest.raises(RuntimeError, match="no backward"):
            result.sum().backward()
    with torch.no_grad():
        assert not grouped_gemm(x, w, offs, bias=operands["bias"]).requires_grad


CALLS = {
    "gemm": lambda x, w, offs, dy=None, **options: grouped_gemm(x, w, offs, **options),
    "dgrad": lambda dy, w, offs, **_: grouped_gemm_dgrad(dy, w, offs),
    "wgrad": lambda x, dy, w, offs, gather=None, **_: grouped_gemm_wgrad(
        dy, x, offs, out=w, accumulate=True, gather=gather
    ),
}
TAKES = {"gemm": {"x", "w", "offs", "bias", "gather"}, "dgrad": {"dy", "w", "offs"},
         "wgrad": {"x", "dy", "w", "offs", "gather"}}


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_offsets_are_checked_on_the_device_when_asked(call, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    good = {name: value.cuda() for name, value in operands().items()}
    wrong = good | {"offs": torch.tensor([3, 6], dtype=torch.int32, device="cuda")}
    call(**wrong)  # not asked: ends past the rows count as rows
    monkeypatch.setenv("DUALPIPE_CHECK_OFFSETS", "1")
    with pytest.raises(ValueError, match="expected ends that rise from 0 to at most 5"):
        call(**wrong)
    if call is not CALLS["dgrad"]:
        with pytest.raises(ValueError, match="expected values within the 5 rows of x"):
            call(**good, gather=torch.tensor([0, 1, 5, 2, 3], device="cuda"))


def operands(device="cpu"):
    """Return operands that match."""
    offs = torch.tensor([2, 5], dtype=torch.int32, device=device)
    return {"x": torch.zeros(5, 4, device=device), "dy": torch.zeros(5, 6, device=device),
            "w": torch.zeros(2, 6, 4, device=device), "offs": offs}


BAD = {
    "x is torch.int64 .* expected a floating-point tensor": {"x": torch.zeros(5, 4, dtype=torch.long)},
    r"dy is .* of shape \(5, 6, 1\), expected a floating-point tensor with 2": {"dy": torch.zeros(5, 6, 1)},
    r"(w|out) is .* of shape \(3, 4\), expected a floating-point tensor with 3": {"w": torch.zeros(3, 4)},
    r"x\.shape\[1\] is 3": {"x": torch.zeros(5, 3)},
    r"dy\.shape\[1\] is 7": {"dy": torch.zeros(5, 7)},
    "expected one dtype": {"x": torch.zeros(5, 4, dtype=torch.bfloat16), "dy": torch.zeros(5, 6).half()},
    "offs is torch.int64, expected int32": {"offs": torch.tensor([1, 2])},
    "one end for each of 2": {"offs": torch.tensor([1, 2, 3], dtype=torch.int32)},
    "expected at least one expert": {"w": torch.zeros(0, 6, 4), "offs": torch.zeros(0, dtype=torch.int32)},
    r"offs is \[3, 2\], expected ends that rise": {"offs": torch.tensor([3, 2], dtype=torch.int32)},
    "expected ends that rise from 0 to at most 5": {"offs": torch.tensor([3, 6], dtype=torch.int32)},
    r"offs is \[-1, 2\], expected ends that rise": {"offs": torch.tensor([-1, 2], dtype=torch.int32)},
    "expected one device": {"w": torch.zeros(2, 6, 4, device="meta")},
    r"operands are on \[.*'meta'\], expected one": {"offs": torch.zeros(2, dtype=torch.int32, device="meta")},
    "bias is .* one row for each expert": {"bias": torch.zeros(6)},
    "gather is torch.float32": {"gather": torch.zeros(5)},
    "expected values within the 5 rows of x": {"gather": torch.tensor([0, 1, 5, 2, 3])},
    "gather has values from -1 to 3, expected values within": {"gather": torch.tensor([0, 1, -1, 2, 3])},
    r"dy\.shape\[0\] is 4": {"dy": torch.zeros(4, 6)},
}
ONLY = {  # the others refuse every entry that they have the operand of
    r"dy\.shape\[1\] is 7": {"dgrad"},
    r"x\.shape\[1\] is 3": {"gemm"},
    r"dy\.shape\[0\] is 4": {"wgrad"},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message, call):
    if not BAD[message].keys() & TAKES[call] or call not in ONLY.get(message, CALLS):
        pytest.skip("has no such operand")
    with pytest.raises(ValueError, match=message):
        CALLS[call](**(operands() | BAD[message]))


def test_wgrad_refuses_a_wrong_out():
    x, dy, w, offs = make([2, 3], 4, 6, torch.float32, "cpu", extra=0)
    with pytest.raises(ValueError, match=r"out has shape .* expected \(E, 6, 4\)"):
        grouped_gemm_wgrad(dy, x, offs, out=w.transpose(1, 2), accumulate=False)
    with pytest.raises(ValueError, match=r"dy\.shape\[0\] is 4"):
        grouped_gemm_wgrad(dy[:4], x, offs, out=w, accumulate=False)
    with pytest.raises(ValueError, match="share memory"):
        grouped_gemm_wgrad(dy, x, offs, out=w[:1].expand(2, 6, 4), accumulate=False)
    with pytest.raises(ValueError, match="expected one dtype"):
        grouped_gemm_wgrad(dy.half(), x, offs, out=w, accumulate=False)
    with pytest.raises(ValueError, match=r"out is torch\.int64"):
        grouped_gemm_wgrad(dy, x, offs, out=w.long(), accumulate=False)
