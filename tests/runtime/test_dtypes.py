"""Names of dtypes in settings, in torch and in safetensors files."""

import json

import pytest
import torch
from safetensors.torch import save

from dualpipe.runtime.dtypes import SAFETENSORS, SAFETENSORS_CODES, dtype_of, dtype_of_code, long_name, short_name


@pytest.mark.parametrize(("short", "long"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"),
                                             ("fp64", "float64")])
def test_short_and_long_names_are_one_dtype(short, long):
    dtype = getattr(torch, long)
    assert dtype_of(short) is dtype_of(long) is dtype
    assert (short_name(dtype), long_name(dtype)) == (short, long)


def test_names_without_a_short_form_stay():
    assert short_name(torch.float8_e4m3fn) == long_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert short_name("mxfp8") == long_name("mxfp8") == "mxfp8"


@pytest.mark.parametrize("name", ["fp17", "nn", "", "Tensor"])
def test_a_name_of_no_dtype_is_refused(name):
    with pytest.raises(ValueError, match=f"torch has no dtype '{name}'"):
        dtype_of(name)


@pytest.mark.parametrize("code", sorted({*SAFETENSORS} - {"F8_E8M0", "C64"}))  # which not every release of it writes
def test_codes_are_those_that_safetensors_writes(code):
    file = save({"w": torch.zeros(2, dtype=torch.uint8).to(SAFETENSORS[code])})
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    assert header["w"]["dtype"] == code == SAFETENSORS_CODES[SAFETENSORS[code]]
    assert dtype_of_code(code, "w") is SAFETENSORS[code]


def test_an_unknown_code_is_refused_with_the_name_of_its_tensor():
    with pytest.raises(ValueError, match="w is stored as F4, which is none of F64, F32, "):
        dtype_of_code("F4", "w")
