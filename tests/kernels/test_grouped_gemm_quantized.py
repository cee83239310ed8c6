"""Grouped GEMMs with quantized weights against a plain loop over dequantized operands, in float64.

On CPU this is the reference, under TRITON_INTERPRET=1 (tests/kernels/test_interpreter.py) and on CUDA the kernel.
"""

import importlib

import pytest
import torch

from dualpipe.kernels import grouped_gemm_dequantize, grouped_gemm_fp8
from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.formats import FORMATS, QuantizedRows, dequantize_reference, quantize_reference
from dualpipe.kernels.grouped_gemm_tiles import GemmConfig, dequantize_configs
from dualpipe.kernels.quantize import dequantize_rows, quantize_rows, transpose_blocks

MODULES = [importlib.import_module(f"dualpipe.kernels.{name}") for name in ("grouped_gemm", "grouped_gemm_quantized")]
# Half precision rounds once; float32 sums some hundred products. Hopper's tensor cores keep 14 bits of 128 sums.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
HOPPER = 5e-4
COMPUTES = [format for format in FORMATS.values() if format.computes]
COUNTS = {"first empty": [0, 5, 2], "last empty": [66, 1, 0]}
# N, K: less than a block, more than one in both with partial ones at the ends, and what no 16 bytes divide.
SIZES = [(24, 32), (200, 176), (20, 12)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def ids(format):
    return str(format)


def ends(counts, device="cpu"):
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(device)


def make(format, counts, n, k, device, extra=2):
    """Return weights of all magnitudes as (bytes, float64), x and dy with `extra` rows of NaN past the last end, offs.

    Halves of a matrix that has a scale have their own, as those that a checkpoint in parts was loaded into.
    """
    generator = torch.Generator().manual_seed(0)
    rows, experts = sum(counts), len(counts)
    shapes = (experts, n, k), (rows + extra, k), (rows + extra, n)
    w, x, dy = (torch.randn(*shape, generator=generator) for shape in shapes)
    w *= torch.randint(-9, 4, (experts, n, 1), generator=generator).float().exp2()
    x[rows:], dy[rows:] = float("nan"), float("nan")
    parts = w.split(n // 2 if format.matrix_scale else n, 1)
    data = torch.cat([quantize_reference(part, format) for part in parts], 1)
    wide = dequantize_reference(data, format, n, k).double()
    return data.to(device), wide.to(device), x.to(device), dy.to(device), ends(counts, device)


def loop(counts, x, w):
    """Compute x[m] w[e] for the rows m of every expert e, in float64."""
    return torch.cat([rows.double() @ w[e] for e, rows in enumerate(x[: sum(counts)].split(counts))])


def check(actual, expected, tolerance):
    error = (actual[: len(expected)].double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= tolerance


@pytest.fixture(autouse=INTERPRET)
def larger_tiles(monkeypatch):
    """Use the tiles of float32: few steps, whose number determines the interpreter's time."""
    monkeypatch.setitem(dequantize_configs(), "float32", GemmConfig(64, 64, 64, 4, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [*SIZES, (7, 10)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
def test_dequantized_products_equal_a_loop(format, counts, n, k, dtype, device, chip):
    data, w, x, dy, offs = make(format, counts, n, k, device)
    x, dy, w = x.to(dtype), dy.to(dtype), w.to(dtype).double()
    y = grouped_gemm_dequantize(x, data, format, (len(counts), n, k), offs)
    dx = grouped_gemm_dequantize(dy, data, format, (len(counts), n, k), offs, transposed=True)
    assert y.shape == (len(x), n) and dx.shape == (len(x), k) and y.dtype is dx.dtype is dtype
    check(y, loop(counts, x, w.mT), TOLERANCE[dtype])
    check(dx, loop(counts, dy, w), TOLERANCE[dtype])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("format", COMPUTES, ids=ids)
def test_fp8_products_equal_a_loop(format, counts, n, k, out_dtype, device, chip):
    data, w, x, dy, offs = make(format, counts, n, k, device)
    rows = quantize_rows(x, format.block[1])
    y = grouped_gemm_fp8(rows, data, format, (len(counts), n, k), offs, out_dtype=out_dtype)
    assert y.shape == (len(x), n) and y.dtype is out_dtype
    tolerance = max(TOLERANCE[out_dtype], HOPPER if device.type == "cuda" else 0)
    check(y, loop(counts, dequantize_rows(rows), w.mT), tolerance)
    if format.block[0] > 1:
        rows, turned = quantize_rows(dy, format.block[1]), transpose_blocks(data, format, n, k)
        dx = grouped_gemm_fp8(rows, turned, format, (len(counts), k, n), offs, out_dtype=out_dtype)
        check(dx, loop(counts, dequantize_rows(rows), w), tolerance)


@pytest.mark.parametrize(("n", "k"), [(24, 2880), (576, 48)])
@pytest.mark.parametrize("format", [FORMATS["mxfp8"], FORMATS["fp8_block"], FORMATS["mxfp4"]], ids=ids)
def test_partial_blocks_of_real_models(format, n, k, device, chip):
    """gpt-oss has 2880 features, a latent of DeepSeek 576: 22.5 and 4.5 blocks of 128."""
    data, w, x, _dy, offs = make(format, [3], n, k, device)
    y = grouped_gemm_dequantize(x.half(), data, format, (1, n, k), offs)
    check(y, loop([3], x.half(), w.half().double().mT), TOLERANCE[torch.float16])
    if format.computes:
        rows = quantize_rows(x, format.block[1])
        y = grouped_gemm_fp8(rows, data, format, (1, n, k), offs, out_dtype=torch.float32)
        check(y, loop([3], dequantize_rows(rows), w.mT), 1e-6 if device.type == "cpu" else HOPPER)


@pytest.mark.parametrize("format", [FORMATS["mxfp8"], FORMATS["fp8_block"], FORMATS["nvfp4"]], ids=ids)
def test_many_experts(format, device):
    experts = 33
    counts = [(7 * e * e) % 11 if e % 3 else 0 for e in range(experts)]
    data, w, x, _dy, offs = make(format, counts, 16, 48, device)
    shape = (experts, 16, 48)
    check(grouped_gemm_dequantize(x, data, format, shape, offs), loop(counts, x, w.mT), 1e-6)
    if format.computes:
        rows = quantize_rows(x, format.block[1])
        y = grouped_gemm_fp8(rows, data, format, shape, offs, out_dtype=torch.float32)
        check(y, loop(counts, dequantize_rows(rows), w.mT), 1e-6 if device.type == "cpu" else HOPPER)


@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
def test_bias_and_gather(format, device, chip):
    """Indices past the last end are not read, and a row may be gathered twice."""
    counts, n, k = [2, 0, 3], 72, 48
    data, w, x, _dy, offs = make(format, counts, n, k, device, extra=0)
    gather, bias = torch.tensor([3, 0, 0, 1, 2, 10**6, -1], device=device), torch.randn(3, n, device=device)
    added = bias.double().repeat_interleave(torch.tensor(counts, device=device), 0)
    y = grouped_gemm_dequantize(x, data, format, (3, n, k), offs, bias=bias, gather=gather.int())
    check(y, loop(counts, x[gather[:5]], w.mT) + added, 1e-6)
    if format.computes:
        rows = quantize_rows(x, format.block[1])
        y = grouped_gemm_fp8(rows, data, format, (3, n, k), offs, out_dtype=torch.float32, bias=bias, gather=gather)
        expected = loop(counts, dequantize_rows(rows)[gather[:5]], w.mT) + added
        check(y, expected, 1e-6 if device.type == "cpu" else HOPPER)


@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
def test_exact_numbers(format, device):
    """Every format represents the largest element times a power of two exactly."""
    offs, w = torch.tensor([2, 2, 4], dtype=torch.int32, device=device), torch.zeros(3, 2, 16, device=device)
    w[0], w[2] = 2 * format.largest, 4 * format.largest
    data = quantize_reference(w, format)
    x = torch.tensor([0.0, 448, 896, 1792], device=device)[:, None].repeat(1, 16)
    expected = [[16 * 448 * format.largest * each] * 2 for each in (0, 2, 8, 16)]
    assert grouped_gemm_dequantize(x, data, format, (3, 2, 16), offs).tolist() == expected
    if format.computes:
        rows = quantize_rows(x, format.block[1])
        assert grouped_gemm_fp8(rows, data, format, (3, 2, 16), offs, out_dtype=torch.float32).tolist() == expected


@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
def test_a_broken_block_reaches_what_it_is_in_and_no_more(format, device, chip):
    """Column 3 of expert 1's first 8 rows is infinite or NaN: these rows, or all under the same scale, are NaN."""
    if INTERPRET and format.matrix_scale:
        pytest.skip("Triton's interpreter reads the NaN of e4m3 as 480")
    w = torch.randn(3, 144, 160, generator=torch.Generator().manual_seed(0))
    w[1, :8, 3] = torch.tensor([torch.inf, torch.nan] * 4)
    data, x, offs = quantize_reference(w, format).to(device), torch.ones(9, 160, device=device), ends([3, 3, 3], device)
    wide, hit = dequantize_reference(data, format, 144, 160), max(8, min(format.block[0], 128))
    results = [grouped_gemm_dequantize(x, data, format, (3, 144, 160), offs)]
    if format.computes:
        rows = quantize_rows(x, format.block[1])
        results.append(grouped_gemm_fp8(rows, data, format, (3, 144, 160), offs, out_dtype=torch.float32))
    for y in results:
        assert y[3:6, :hit].isnan().all() and not y[3:6, hit:].isnan().any() and not y[[0, 1, 2, 6, 7, 8]].isnan().any()
    dx = grouped_gemm_dequantize(torch.ones(9, 144, device=device), data, format, (3, 144, 160), offs, transposed=True)
    assert torch.equal(dx[3:6].isnan(), wide[1].isnan().any(0).expand(3, 160)) and not dx[6:].isnan().any()


@pytest.mark.parametrize("format", COMPUTES, ids=ids)
def test_a_broken_row_stays_alone(format, device, chip):
    data, _w, x, _dy, offs = make(format, [3, 3], 24, 48, device)
    x[1, 7], x[4] = torch.inf, 0.0
    y = grouped_gemm_fp8(quantize_rows(x, format.block[1]), data, format, (2, 24, 48), offs, out_dtype=torch.float32)
    assert y[1].isnan().all() and not y[[0, 2, 3, 5]].isnan().any() and (y[4] == 0).all()


@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
@pytest.mark.parametrize("size", [0.0, 2.0**-127, 2.0**-40, 2.0**60])
def test_scales_of_any_size(format, size, device):
    """The smallest scales are subnormal numbers, whose products with 2^60 are not."""
    w = torch.full((1, 16, 32), size, device=device)
    data, x = quantize_reference(w, format), torch.full((2, 32), 2.0**60, device=device)
    w = dequantize_reference(data, format, 16, 32).double()
    y = grouped_gemm_dequantize(x, data, format, (1, 16, 32), ends([2], device))
    check(y, loop([2], x, w.mT), 1e-6)
    assert (y == 0).all() if size == 0 else y.isfinite().all()


@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
def test_bytes_that_lie_apart(format, device, chip):
    """Slices of experts and rows, rows of every second token, and an expanded gradient."""
    data, w, x, _dy, offs = make(format, [2, 3], 144, 48, device, extra=0)
    buffer = torch.full((4, data.shape[1] + 2, data.shape[2] + 32), 255, dtype=torch.uint8, device=device)
    apart = buffer[1:3, 1:-1, 16:-16].copy_(data)
    every = x.repeat_interleave(2, 0)[::2]
    ones, shape = torch.ones((), device=device).expand(5, 144), (2, 144, 48)
    check(grouped_gemm_dequantize(every, apart, format, shape, offs), loop([2, 3], x, w.mT), 1e-6)
    check(grouped_gemm_dequantize(x.t().contiguous().t(), data, format, shape, offs), loop([2, 3], x, w.mT), 1e-6)
    check(grouped_gemm_dequantize(ones, apart, format, shape, offs, transposed=True), loop([2, 3], ones, w), 1e-6)
    if format.computes:
        rows = quantize_rows(x, format.block[1])
        y = grouped_gemm_fp8(rows, data, format, shape, offs, out_dtype=torch.float32)
        twice = QuantizedRows(*(
            each.view(torch.uint8).repeat_interleave(2, 0)[::2].view(each.dtype) for each in rows
        ))
        assert torch.equal(grouped_gemm_fp8(twice, apart, format, shape, offs, out_dtype=torch.float32), y)


def test_more_than_two_billion_bytes(tmp_path):
    """Expert 1 starts past 2^31 bytes; a sparse file replaces memory of that size."""
    for format in (FORMATS["fp8_block"], FORMATS["mxfp8"], FORMATS["mxfp4"]):
        data, _w, x, _dy, offs = make(format, [2, 3], 16, 32, "cpu", extra=0)
        apart = 2**31 + 16
        size = apart + data[0].numel()
        file = torch.from_file(str(tmp_path / f"{format}"), shared=True, size=size, dtype=torch.uint8)
        far = file.as_strided(data.shape, (apart, *data.stride()[1:])).copy_(data)
        shape = (2, 16, 32)
        assert torch.equal(grouped_gemm_dequantize(x, far, format, shape, offs),
                           grouped_gemm_dequantize(x, data, format, shape, offs))
        if format.computes:
            rows = quantize_rows(x, format.block[1])
            assert torch.equal(grouped_gemm_fp8(rows, far, format, shape, offs, out_dtype=torch.float32),
                               grouped_gemm_fp8(rows, data, format, shape, offs, out_dtype=torch.float32))


@pytest.mark.parametrize("format", FORMATS.values(), ids=ids)
def test_no_rows_and_no_columns(format, device, chip):
    data, _w, x, dy, offs = make(format, [0, 0], 16, 32, device, extra=0)
    assert grouped_gemm_dequantize(x, data, format, (2, 16, 32), offs).shape == (0, 16)
    assert grouped_gemm_dequantize(dy, data, format, (2, 16, 32), offs, transposed=True).shape == (0, 32)
    x, none = torch.ones(3, 32, device=device), quantize_reference(torch.ones(1, 0, 32, device=device), format)
    assert grouped_gemm_dequantize(x, none, format, (1, 0, 32), ends([3], device)).shape == (3, 0)
    if format.computes:
        rows = quantize_rows(x, format.block[1])
        assert grouped_gemm_fp8(rows, data, format, (2, 16, 32), offs, out_dtype=torch.half).shape == (3, 16)
        offs = ends([3], device)
        assert grouped_gemm_fp8(rows, none, format, (1, 0, 32), offs, out_dtype=torch.half).shape == (3, 0)


def test_float64_is_multiplied_as_it_is(device):
    data, w, x, _dy, offs = make(FORMATS["nvfp4"], [2, 3], 24, 48, device)
    y = grouped_gemm_dequantize(x.double(), data, FORMATS["nvfp4"], (2, 24, 48), offs)
    check(y, loop([2, 3], x, w.mT), TOLERANCE[torch.float64])


def call_fp8(format=FORMATS["fp8_block"], **changes):
    rows = quantize_rows(torch.zeros(5, 48), 128)
    given = {"elements": rows.elements, "scales": rows.scales, "data": torch.zeros(2, 1, 6160, dtype=torch.uint8),
             "offs": ends([2, 3]), "out_dtype": torch.float32} | changes
    rows = QuantizedRows(given.pop("elements"), given.pop("scales"))
    return grouped_gemm_fp8(rows, given.pop("data"), format, (2, 24, 48), given.pop("offs"), **given)


def call_dequantize(format=FORMATS["fp8_block"], **changes):
    data = torch.zeros(2, 1, 6160, dtype=torch.uint8)
    given = {"x": torch.zeros(5, 48), "data": data, "offs": ends([2, 3])} | changes
    return grouped_gemm_dequantize(given.pop("x"), given.pop("data"), format, (2, 24, 48), given.pop("offs"), **given)


@pytest.mark.parametrize(("call", "changes", "message"), [
    (call_fp8, {"format": FORMATS["nvfp4"]}, "use grouped_gemm_dequantize"),
    (call_fp8, {"elements": torch.zeros(5, 48)}, "are torch.float32 .* expected a matrix of float8_e4m3fn"),
    (call_fp8, {"scales": torch.zeros(5, 2)}, r"scales \(5, 1\)"),
    (call_fp8, {"format": FORMATS["mxfp8"]}, r"scales \(5, 2\) in torch.float8_e8m0fnu"),
    (call_fp8, {"data": torch.zeros(2, 1, 6160)}, r"data is torch.float32 .* expected uint8"),
    (call_fp8, {"bias": torch.zeros(2, 24, dtype=torch.bfloat16)}, r"bias is torch.bfloat16 .* of shape \(2, 24\)"),
    (call_fp8, {"gather": torch.zeros(5)}, "gather is torch.float32"),
    (call_fp8, {"offs": ends([2, 4])}, "expected ends that rise from 0 to at most 5"),
    (call_fp8, {"out_dtype": torch.int32}, "out_dtype is torch.int32"),
    (call_dequantize, {"data": torch.zeros(2, 2, 6160, dtype=torch.uint8)},
     r"of shape \(2, 2, 6160\), expected uint8 of shape \(2, 1, 6160\)"),
    (call_dequantize, {"x": torch.zeros(5, 48, dtype=torch.long)}, "x is torch.int64 .* expected a floating-point"),
    (call_dequantize, {"x": torch.zeros(5, 24)}, r"x\.shape\[1\] is 24 and w\.shape\[2\] is 48"),
    (call_dequantize, {"transposed": True}, r"x\.shape\[1\] is 48 and w\.shape\[1\] is 24"),
    (call_dequantize, {"offs": torch.tensor([2, 5])}, "offs is torch.int64, expected int32"),
    (call_dequantize, {"offs": ends([1, 1, 1])}, "one end for each of 2 experts"),
    (call_dequantize, {"gather": torch.tensor([0, 9, 1, 1, 1])}, "expected values within the 5 rows of x"),
    (call_dequantize, {"data": torch.zeros(2, 1, 6160, dtype=torch.uint8, device="meta")}, "expected one device"),
])
def test_misfit_is_a_value_error(call, changes, message):
    call()
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize(("arch", "format", "shape", "rows", "reason"), [
    (90, "fp8_block", (8, 5760, 2880), 4096, None),
    (90, "fp8_block", (8, 512, 2048), 4096, "4096 rows per expert and 512 columns takes about 1.5 times"),
    (90, "fp8_block", (8, 1536, 2048), 4096, "takes about 1.1 times as long"),
    (90, "mxfp8", (8, 5760, 2880), 4096, "takes about 1.6 times as long"),
    (90, "mxfp8", (8, 5760, 2880), 30, None),  # reading the weights is all that takes time
    (100, "mxfp8", (8, 5760, 2880), 4096, None),
    (80, "mxfp8", (8, 5760, 2880), 4096, "sm_80 has no e4m3 GEMMs"),
    (90, "fp8_block", (8, 5760, 2888), 4096, "2888 columns are not a multiple of 16"),
])
def test_where_fp8_is_slower(arch, format, shape, rows, reason, monkeypatch):
    monkeypatch.setattr(MODULES[1], "architecture", lambda device: arch)
    found = MODULES[1].slower_in_fp8(FORMATS[format], shape, rows, torch.device("cuda"))
    assert found is None if reason is None else reason in found
    assert MODULES[1].slower_in_fp8(FORMATS[format], shape, rows, torch.device("cpu")) is None
