"""Quantized tensors: against transformers' dequantization and a plain loop; any slice is the slice of the whole."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dualpipe.checkpoint.hub.stored_formats import Fp8, Mxfp4, Stored, find_stored, fp8_block
from dualpipe.checkpoint.tensors import Box, TensorHeader

WHOLE = (slice(0, 3), slice(0, 10), slice(0, 96))
PARTS = [WHOLE, (slice(1, 2), slice(0, 10), slice(0, 96)), (slice(0, 3), slice(3, 7), slice(32, 64)),
         (slice(2, 3), slice(9, 10), slice(31, 65)), (slice(0, 3), slice(4, 4), slice(5, 9))]


def mxfp4(seed=0):
    torch.manual_seed(seed)
    blocks = torch.randint(256, (3, 10, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 3), dtype=torch.uint8)
    return {"w_blocks": blocks, "w_scales": scales}


def decode(stored, files, part, dtype):
    box = Box.from_slices(part)
    out = torch.empty(box.shape, dtype=dtype)
    stored.decode([files[name][at.slices] for name, at in stored.raw(box)], box, out)
    return out


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_transformers(part, dtype):
    files = mxfp4()
    expected = convert_moe_packed_tensors(files["w_blocks"], files["w_scales"], dtype=torch.bfloat16).mT
    actual = decode(Mxfp4("w", (3, 10, 96)), files, part, dtype)
    torch.testing.assert_close(actual, expected[part].to(dtype), rtol=0, atol=0)


def test_mxfp4_by_hand():
    """0x21 is 0.5 (low nibble) and then 1; 0xf7 is 6 and -6. A scale of 128 doubles, 0 is 2 ** -127, 255 is NaN."""
    files = {"w_blocks": torch.zeros(3, 1, 16, dtype=torch.uint8), "w_scales": torch.tensor([[128], [0], [255]]).byte()}
    files["w_blocks"][:, 0, :2] = torch.tensor([0x21, 0xF7])
    out = decode(Mxfp4("w", (3, 32)), files, (slice(0, 3), slice(0, 4)), torch.bfloat16)
    values = torch.tensor([0.5, 1.0, 6.0, -6.0])
    assert torch.equal(out[0], (values * 2).bfloat16())
    assert torch.equal(out[1].double(), values.double() * 2.0**-127)
    assert out[2].isnan().all()


def fp8_by_loop(weight, scales, height, width):
    out = torch.empty(weight.shape)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in weight.shape)).tolist():
        *lead, row, column = index
        out[*index] = weight[*index].float() * scales[*lead, row // height, column // width].float()
    return out


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_a_plain_loop(scale_dtype):
    torch.manual_seed(0)
    weight = torch.randn(3, 10, 13).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, 2).to(scale_dtype)
    expected = fp8_by_loop(weight, scales, 4, 8)
    stored, files = Fp8("w", (3, 10, 13), block=(4, 8)), {"w": weight, "w_scale_inv": scales}
    whole = tuple(slice(0, size) for size in weight.shape)
    for part in [whole, (slice(1, 3), slice(3, 9), slice(7, 9)), (slice(0, 1), slice(8, 10), slice(9, 13)),
                 (slice(0, 3), slice(5, 6), slice(0, 8)), (slice(0, 3), slice(5, 5), slice(0, 8))]:
        assert torch.equal(decode(stored, files, part, torch.float32), expected[part])
    # Rounded once, from float32.
    assert torch.equal(decode(stored, files, whole, torch.bfloat16), expected.bfloat16())


def header(**tensors):
    return {name: TensorHeader(dtype, shape, "f", 0) for name, (dtype, shape) in tensors.items()}


F8, F32, U8 = torch.float8_e4m3fn, torch.float32, torch.uint8


def test_stored_forms_are_found():
    assert find_stored(header(w=(F32, (3, 4))), "w", None) == Stored("w", (3, 4), F32)
    assert find_stored({}, "w", None) is None
    found = find_stored(header(w_blocks=(U8, (3, 10, 3, 16)), w_scales=(U8, (3, 10, 3))), "w", None)
    assert found == Mxfp4("w", (3, 10, 96))
    found = find_stored(header(w=(F8, (130, 128)), w_scale_inv=(F32, (2, 1))), "w", (128, 128))
    assert found == Fp8("w", (130, 128), block=(128, 128))


@pytest.mark.parametrize("tensors, block, message", [
    ({"w": (F8, (4, 4))}, (2, 2), "w is .*its scales w_scale_inv are missing"),
    ({"w": (F8, (4, 4)), "w_scale_inv": (F32, (2, 2))}, None, "config.json does not say how"),
    ({"w": (F8, (4, 4)), "w_scale_inv": (F32, (2, 3))}, (2, 2), r"w_scale_inv has shape \(2, 3\); .* \(2, 2\)"),
    ({"w": (F8, (4, 4)), "w_scale_inv": (U8, (2, 2))}, (2, 2), "must be floating-point"),
    ({"w": (torch.float8_e5m2, (4, 4)), "w_scale_inv": (F32, (2, 2))}, (2, 2), "only torch.float8_e4m3fn"),
    ({"w": (F8, (4,)), "w_scale_inv": (F32, (2,))}, (2, 2), "only torch.float8_e4m3fn matrices"),
    ({"w_blocks": (U8, (2, 1, 16))}, None, "w_scales is missing"),
    ({"w_scales": (U8, (2, 1))}, None, "w_blocks is missing"),
    ({"w_blocks": (U8, (2, 1, 8)), "w_scales": (U8, (2, 1))}, None, r"w_blocks is .*it must be torch.uint8"),
    ({"w_blocks": (U8, (2, 1, 16)), "w_scales": (U8, (2, 2))}, None, r"w_scales has shape \(2, 2\)"),
    ({"w_blocks": (U8, (2, 1, 16)), "w_scales": (F32, (2, 1))}, None, "w_scales is .*it must be torch.uint8"),
])
def test_incomplete_forms_are_refused(tensors, block, message):
    with pytest.raises(ValueError, match=message):
        find_stored(header(**tensors), "w", block)


def test_quantization_config():
    assert fp8_block({}) is None
    assert fp8_block({"quantization_config": {"quant_method": "mxfp4"}}) is None
    assert fp8_block({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}}) == (128, 64)
    with pytest.raises(ValueError, match="'gptq' is not supported"):
        fp8_block({"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ValueError, match="must be a JSON object; got 8"):
        fp8_block({"quantization_config": 8})
    with pytest.raises(ValueError, match="weight_block_size"):
        fp8_block({"quantization_config": {"quant_method": "fp8"}})
