"""Bytes of the kernels against those of the references, with poisoned results; test_formats.py tests the references."""

import pytest
import torch

from dualpipe.kernels.formats import FORMATS, dequantize_reference, quantize_reference
from dualpipe.kernels.formats import matrix_amax as matrix_amax_reference
from dualpipe.kernels.quantize import (
    dequantize,
    dequantize_rows,
    matrix_amax,
    quantize,
    quantize_rows,
    quantize_rows_reference,
    swiglu_quantize,
    transpose_blocks,
)
from dualpipe.kernels.swiglu import clamped_swiglu, swiglu
from row_kernels import far_apart, poisoned_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned_memory")
ALL = pytest.mark.parametrize("format", FORMATS.values(), ids=str)
KINDS = pytest.mark.parametrize("format", [FORMATS["mxfp8"], FORMATS["nvfp4"], FORMATS["fp8_block"]], ids=str)
SQUARE = [format for format in FORMATS.values() if format.block[0] == format.block[1]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def make(shape, dtype, device, seed=0):
    """Return values of all magnitudes, zeros of both signs, the smallest and largest numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-30, 15, (*shape[:-1], 1), generator=generator)
    if shape[-2] > 4 and shape[-1] > 130:
        x[..., 0, 4:6], x[..., 2, :] = -0.0, x[..., 2, :] * 1e-40
        x[..., 1, :], x[..., -1, 70] = 0, 1e38
        x[..., 3, 16], x[..., 3, 66], x[..., 3, 116] = float("inf"), -float("inf"), float("nan")
    return x.to(dtype).to(device)


def bits(x):
    """Convert to values that compare equal for equal bits, NaN included."""
    return x.nan_to_num(nan=12345.0).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_rows(a, b):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ALL
def test_bytes_and_numbers(format, dtype, device):
    matrices, rows = (1, 130) if format.block[0] > 1 else (2, 5)
    for shape in ((matrices, rows, 270), (3, 64), (1, 2), (2, 1, 3, 34), (0, 4, 32), (2, 0, 32), (2, 3, 0)):
        x = make(shape, dtype, device)
        data = quantize(x, format)
        assert torch.equal(data, quantize_reference(x, format))
        for wanted in (torch.float32, dtype):
            y = dequantize(data, format, *shape[-2:], wanted)
            assert y.shape == shape and y.dtype is wanted
            if x.numel():
                assert torch.equal(bits(y), bits(dequantize_reference(data, format, *shape[-2:]).to(wanted)))
        assert torch.equal(matrix_amax(x, format), matrix_amax_reference(x, format))


@pytest.mark.slow
@ALL
def test_bytes_at_every_scale(format, device):
    """All 8-bit mantissas at every exponent: both sides of every change of a scale and of every tie of elements.

    Blocks of 128 x 128 have all 5-bit mantissas, enough for elements with 3 bits, in an eighth of the time.
    """
    mantissas = 2**8 if format.block[0] == 1 else 2**5
    steps = 2.0 ** torch.arange(-150, 127, dtype=torch.float64)[:, None] * (1 + torch.arange(mantissas) / mantissas)
    x = (steps[..., None] * torch.linspace(1, -1, 32, dtype=torch.float64)).float().to(device)
    x = x if format.block[0] == 1 else x[:, :, None, :].expand(-1, -1, 4, -1).flatten(0, 1)
    for part in x.split(1024):  # the reference has some copies of all blocks: 4.6 GB each, of 128 x 128
        assert torch.equal(quantize(part, format), quantize_reference(part, format))


@KINDS
def test_strides(format, device):
    rows = 129 if format.block[0] > 1 else 5
    x = make((2, rows, 132), torch.float32, device)
    spaced = torch.full((2, rows + 1, 150), float("nan"), device=device)[:, :rows, 7:139].copy_(x)
    turned = x.mT.contiguous().mT
    data = quantize_reference(x, format)
    numbers = bits(dequantize_reference(data, format, rows, 132))
    room = torch.full((3, data.shape[1] + 1, data.shape[2] + 32), 7, dtype=torch.uint8, device=device)
    out = room[1:, :-1, 16:-16]
    for other in (spaced, turned, x.flip(0).flip(0)):
        assert quantize(other, format, out=out.fill_(9)) is out and torch.equal(out, data)
        assert torch.equal(bits(dequantize(out, format, rows, 132)), numbers)
    room[1:, :-1, 16:-16] = 7
    assert (room == 7).all()  # nothing was written beside it


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_rows_beyond_two_to_the_31_elements(name):
    x = make((3, 130), torch.float16, "cpu")
    assert torch.equal(quantize(far_apart(x), name), quantize(x, name))
    data = quantize(x, name)
    assert torch.equal(bits(dequantize(far_apart(data), name, 3, 130)), bits(dequantize(data, name, 3, 130)))


def test_parts_of_a_matrix_share_its_scale(device):
    x = torch.randn(2, 6, 100, generator=torch.Generator().manual_seed(0)).to(device)
    x[:, 0] *= 64
    whole, parts = quantize(x, "nvfp4"), x.split((4, 2), 1)
    amax = torch.stack([matrix_amax(part, "nvfp4") for part in parts]).amax(0)
    assert torch.equal(torch.cat([quantize(part, "nvfp4", amax) for part in parts], 1), whole)
    assert not torch.equal(quantize(parts[1], "nvfp4"), whole[:, 4:])


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype, block, device):
    for shape in ((9, 304), (2, 16), (0, 64), (3, 0)):
        x = make(shape, dtype, device)
        rows = quantize_rows(x, block)
        assert rows.elements.dtype is torch.float8_e4m3fn and rows.elements.shape == shape
        assert rows.scales.dtype is {128: torch.float32, 32: torch.float8_e8m0fnu}[block]
        assert rows.scales.shape == (shape[0], -(-shape[1] // block))
        assert not x.numel() or same_rows(rows, quantize_rows_reference(x, block))
        wide = rows.scales.float().repeat_interleave(block, 1)[:, : shape[1]] * rows.elements.float()
        assert torch.equal(bits(dequantize_rows(rows, dtype)), bits(wide.to(dtype)))


@pytest.mark.parametrize("block", [128, 32])
def test_a_row_depends_on_itself_alone(block, device):
    torch.manual_seed(0)
    x = torch.randn(7, 160, device=device)
    rows = quantize_rows(x, block)
    x[3:] = float("nan")  # as rows past the last expert's end may be
    garbage = quantize_rows(x, block)
    assert same_rows((part[:3] for part in garbage), (part[:3] for part in rows))
    assert dequantize_rows(garbage)[3:].isnan().all()
    error = (dequantize_rows(rows) - x)[:3].abs().unflatten(1, (-1, 32)).amax(-1)
    assert (error <= x[:3].abs().amax(1, keepdim=True) / (16 if block == 32 else 28)).all()


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [swiglu, clamped_swiglu])
def test_activation_and_quantization_in_one(form, dtype, weighted, block, device):
    for rows, width in ((5, 144), (3, 7), (0, 32), (2, 0)):
        generator = torch.Generator().manual_seed(0)
        gate_up = (4 * torch.randn(rows, 2 * width, generator=generator)).to(device, dtype)
        weight = torch.rand(rows, generator=generator).to(device) if weighted else None
        if rows == 5:
            gate_up[4] = float("nan")
        h, quantized = swiglu_quantize(gate_up, weight, block=block, clamped=form is clamped_swiglu)
        assert torch.equal(bits(h), bits(form(gate_up, weight)))
        assert same_rows(quantized, quantize_rows(h, block))


@pytest.mark.parametrize("rows, columns", [(128, 128), (130, 200), (300, 64), (1, 129), (0, 5)])
@pytest.mark.parametrize("format", SQUARE, ids=str)
def test_transposed_blocks(format, rows, columns, device):
    data = quantize(make((2, rows, columns), torch.float32, device), format)
    turned = transpose_blocks(data, format, rows, columns)
    expected = dequantize(data, format, rows, columns).mT.contiguous()
    assert torch.equal(bits(dequantize(turned, format, columns, rows)), bits(expected))
    assert torch.equal(transpose_blocks(turned, format, columns, rows), data)  # and so its zeros are where they belong
    spaced = torch.full((2, data.shape[1] + 1, data.shape[2] + 16), 9, dtype=torch.uint8, device=device)[:, 1:, 16:]
    assert torch.equal(transpose_blocks(spaced.copy_(data), format, rows, columns), turned)


X = torch.zeros(2, 4, 6)
BAD = {
    "there is no format 'int8'": lambda: quantize(X, "int8"),
    r"the shape is \(4, 5\), .* must be even": lambda: quantize(X[0, :, :5], "nvfp4"),
    r"the shape is \(6,\), but mxfp8 stores matrices": lambda: quantize(X[0, 0], "mxfp8"),
    "x is torch.int64": lambda: quantize(X.long(), "mxfp8"),
    r"amax has shape \(4,\) .* expected \(2,\)": lambda: quantize(X, "nvfp4", torch.zeros(4)),
    r"out is torch.float32 .* expected uint8 of shape \(2, 4, 16\)": lambda: quantize(X, "mxfp8", out=X),
    r"data is torch.uint8 of shape \(2, 4, 32\), .* uint8 \(..., 4, 16\)":
        lambda: dequantize(torch.zeros(2, 4, 32, dtype=torch.uint8), "mxfp8", 4, 6),
    "blocks of mxfp8 are 1 x 32, not square": lambda: transpose_blocks(quantize(X, "mxfp8"), "mxfp8", 4, 6),
    "block is 64, .* blocks of 128 or 32": lambda: quantize_rows(X[0], 64),
    r"x is torch.float32 of shape \(2, 4, 6\), expected floating-point \(M, K\)": lambda: quantize_rows(X, 32),
    r"weight is .*, expected floating-point of shape \(4,\)": lambda: swiglu_quantize(X[0], torch.zeros(3), block=32),
    "limit is 0.0, expected a positive number": lambda: swiglu_quantize(X[0], block=32, clamped=True, limit=0.0),
}


@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
