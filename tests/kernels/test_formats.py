"""References of the formats: errors, incomplete blocks, idempotence, and comparison with other encoders."""

import pytest
import torch

from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.formats import (
    FORMATS,
    Format,
    dequantize_reference,
    format_of,
    matrix_amax,
    quantize_reference,
    round_to_element,
)

pytestmark = pytest.mark.skipif(INTERPRET, reason="nothing here is a kernel")
ALL = pytest.mark.parametrize("format", FORMATS.values(), ids=str)
# Of the largest number of a block, where its scale is not the smallest. e2m1 has 4 and 6
# as its largest two, which one above 6, and below 7, can be off by 1 / 5 from; the scales of nvfp4 follow amax.
ERROR = {"mxfp8": 1 / 16, "nvfp4": 0.177, "fp8_block": 1 / 28, "fp8_block_pow2": 1 / 16, "mxfp4": 1 / 5}
SMALLEST = {"mxfp8": 2.0**-127, "mxfp4": 2.0**-127}  # scale; of float32 ones 2^-100


def blocks(x, format):
    """Split (N, K) -> (block rows, rows of a block, blocks across, columns of a block); both must be multiples."""
    return x.unflatten(1, (-1, format.block[1])).unflatten(0, (-1, format.block[0]))


def spread(kind, shape, generator):
    """Return Gaussian values with magnitudes that differ by row, by element or by matrix, and many zeros."""
    x = torch.randn(shape, generator=generator)
    if kind == "sparse":
        return torch.where(torch.rand(shape, generator=generator) < 0.7, 0.0, x)
    size, low, high = {"rows": ((shape[0], 1), -44, 37), "numbers": (shape, -12, 12), "matrix": (1, -32, -26)}[kind]
    return x * 10.0 ** torch.empty(size).uniform_(low, high, generator=generator)


def again(data, format, rows, columns):
    return quantize_reference(dequantize_reference(data, format, rows, columns), format)


@pytest.mark.parametrize("kind", ["rows", "numbers", "matrix", "sparse"])
@ALL
def test_errors_and_idempotence(format, kind):
    generator, shape = torch.Generator().manual_seed(0), (256, 256) if format.block[0] > 1 else (48, 256)
    for _ in range(5):
        x = spread(kind, shape, generator)
        data = quantize_reference(x, format)
        assert torch.equal(again(data, format, *shape), data)
        error = blocks((dequantize_reference(data, format, *shape).double() - x.double()).abs(), format).amax((1, 3))
        amax = blocks(x.double().abs(), format).amax((1, 3))
        smallest = torch.tensor(SMALLEST.get(format.name, 2.0**-100), dtype=torch.float64)
        scale = format.scales(data, shape[1]).double()
        if format.matrix_scale:
            whole = format.matrix_scales(data)[:, None].double()
            scale, smallest = scale * whole, whole / 64
        # at the smallest scale numbers of any size below the largest: half of the distance of the largest two elements
        bound = torch.where(scale > smallest, ERROR[format.name] * amax, (16 if format.bits == 8 else 1) * smallest)
        assert (error <= bound * (1 + 1e-5)).all(), (error / bound).max()


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_pow2"])
def test_products_of_elements_and_float32_scales_are_exact(name):
    format, generator = FORMATS[name], torch.Generator().manual_seed(0)
    x = spread("rows", (256, 128), generator)
    data = quantize_reference(x, format)
    elements = format.elements(data, 128).view(torch.float8_e4m3fn).double()
    exact = (elements * format.scales(data, 128).double()[:, None]).flatten(0, 1)
    assert torch.equal(dequantize_reference(data, format, 256, 128).double(), exact)


@ALL
def test_odd_shapes_are_idempotent_and_parts_of_blocks_are_whole(format):
    torch.manual_seed(0)
    for rows, columns in ((1, 2), (130, 34), (3, 130), (127, 576)):
        x = torch.randn(2, rows, columns)
        data = quantize_reference(x, format)
        assert data.shape == (2, format.block_rows(rows), format.row_bytes(columns))
        assert torch.equal(again(data, format, rows, columns), data)
        wider = torch.nn.functional.pad(x, (0, -columns % 256, 0, -rows % 128))
        whole = dequantize_reference(quantize_reference(wider, format), format, *wider.shape[-2:])
        assert torch.equal(dequantize_reference(data, format, rows, columns), whole[:, :rows, :columns])


@pytest.mark.parametrize("name, bound", [("mxfp8", 0.03), ("nvfp4", 0.10), ("fp8_block", 0.03), ("mxfp4", 0.13),
                                         ("fp8_block_pow2", 0.03)])
def test_product_with_a_quantized_weight(name, bound):
    torch.manual_seed(0)
    x, w = torch.randn(64, 512), torch.randn(256, 512)
    exact = x.double() @ w.double().T
    got = x.double() @ dequantize_reference(quantize_reference(w, FORMATS[name]), FORMATS[name], 256, 512).double().T
    assert (got - exact).norm() / exact.norm() < bound


@ALL
def test_zero_and_tiny_blocks(format):
    for value in (0.0, -0.0, 1e-45, 2.0**-149 * 3):
        x = torch.full((128, 256), value)
        data = quantize_reference(x, format)
        y = dequantize_reference(data, format, 128, 256)
        assert y.isfinite().all() and (y - x).abs().max() <= abs(value)
        assert torch.equal(again(data, format, 128, 256), data)
    x = torch.ones(128, 512)
    x[:, :256] = 0  # beside others, too, where the matrix has a scale that is not the smallest
    y = dequantize_reference(quantize_reference(x, format), format, 128, 512)
    assert not y[:, :256].any() and ((y[:, 256:] - 1).abs() < 0.1).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@ALL
def test_a_block_that_is_not_finite_is_nan_and_no_other_is(format, value):
    torch.manual_seed(0)
    x = torch.randn(256, 512)
    x[130, 300] = value
    data = quantize_reference(x, format)
    y = dequantize_reference(data, format, 256, 512)
    expected = torch.zeros(256, 512, dtype=torch.bool)
    blocks(expected, format)[130 // format.block[0], :, 300 // format.block[1]] = True
    assert torch.equal(y.isnan(), expected) and y[~expected].isfinite().all()
    assert torch.equal(again(data, format, 256, 512), data)
    assert torch.equal(y[:128, :128], dequantize_reference(quantize_reference(x, format), format, 256, 512)[:128, :128])
    assert matrix_amax(x, format).isfinite()


def test_elements_are_those_of_ml_dtypes():
    """Round every float16 up to the largest element: to the nearest, ties to even."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    for name, theirs in (("fp8_block", ml_dtypes.float8_e4m3fn), ("mxfp4", ml_dtypes.float4_e2m1fn)):
        held = x[x.abs() <= FORMATS[name].largest]
        expected = torch.from_numpy(held.numpy().astype(theirs).astype("float32"))
        got = round_to_element(held, FORMATS[name])
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name, top", [("mxfp8", (448, 464)), ("mxfp4", (6, 7))])
def test_bytes_are_those_of_torchao(name, top):
    """Scales of 2^ceil(log2(amax / largest)), but for amax that lie, in units of a power of two, within `top`: these
    round to the largest element, so the scale below holds them, and quantizing again needs it: idempotence."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    torch.manual_seed(0)
    x, format = torch.randn(512, 512) * 10 ** torch.empty(512, 1).uniform_(-6, 6), FORMATS[name]
    dtype = torch.float8_e4m3fn if format.bits == 8 else torch.float4_e2m1fn_x2
    theirs = [part.view(torch.uint8) for part in mx.to_mx(x, dtype, 32, mx.ScaleCalculationMode.RCEIL)]
    data = quantize_reference(x, format)
    ours = format.scales(data, 512).view(torch.uint8)
    amax = torch.frexp(x.unflatten(1, (-1, 32)).abs().amax(-1)).mantissa * (512 if format.bits == 8 else 8)
    assert torch.equal(ours != theirs[0], (amax > top[0]) & (amax < top[1]))
    same = (ours == theirs[0]).repeat_interleave(format.bits * 4, 1)
    assert 0.7 < same.float().mean() < 1
    assert torch.equal(format.elements(data, 512).squeeze(1)[same], theirs[1][same])


def test_nvfp4_bytes_are_those_of_torchao():
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    torch.manual_seed(0)
    x, format = torch.randn(512, 512) * 10 ** torch.empty(512, 1).uniform_(-2, 2), FORMATS["nvfp4"]
    data = quantize_reference(x, format)
    scales, elements = nvfp4.nvfp4_quantize(x, 16, format.matrix_scales(data)[0])
    assert torch.equal(scales.view(torch.uint8), format.scales(data, 512).view(torch.uint8))
    assert torch.equal(elements, format.elements(data, 512).squeeze(1))


def test_mxfp4_is_what_transformers_reads():
    """Two elements per byte, the first in the low half, with the scale 2^(scale - 127)."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    x, format = torch.randn(3, 40, 96), FORMATS["mxfp4"]
    data = quantize_reference(x, format)
    packed = format.elements(data, 96).reshape(3, 40, 3, 16)
    read = mxfp4.convert_moe_packed_tensors(packed, format.scales(data, 96).view(torch.uint8), dtype=torch.float32)
    assert torch.equal(read.transpose(1, 2), dequantize_reference(data, format, 40, 96))


def test_misuse_is_a_value_error():
    with pytest.raises(ValueError, match=r"'fp8'.*mxfp8"):
        format_of("fp8")
    assert format_of(FORMATS["nvfp4"]) is format_of("nvfp4")
    for name in ("nvfp4", "mxfp4"):
        with pytest.raises(ValueError, match=r"the shape is \(4, 5\), .* must be even"):
            quantize_reference(torch.zeros(4, 5), FORMATS[name])
    with pytest.raises(ValueError, match=r"the shape is \(4,\), but mxfp8 stores matrices"):
        FORMATS["mxfp8"].check((4,))


def test_bytes_as_documented():
    """Bytes per row of the module's table, and bytes per element of large matrices."""
    assert FORMATS["mxfp8"].row_bytes(64) == 80 and FORMATS["nvfp4"].row_bytes(64) == 48
    size = {name: format.row_bytes(4096) / format.block[0] / 4096 for name, format in FORMATS.items()}
    assert size == pytest.approx({"mxfp8": 1.031, "nvfp4": 0.566, "fp8_block": 1.0, "fp8_block_pow2": 1.0,
                                  "mxfp4": 0.531}, abs=6e-4)
    assert all(isinstance(format, Format) and str(format) == name for name, format in FORMATS.items())
