"""Names of dtypes: in settings and messages ("bf16"), in torch ("bfloat16") and in safetensors files ("BF16")."""

from __future__ import annotations

import torch

SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS.items()}

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_LONG = {short: long for long, short in _SHORT.items()}


def long_name(dtype: object) -> str:
    """Return torch's name of a dtype: torch.bfloat16 -> 'bfloat16'; for other objects, such as formats, their `str`."""
    return str(dtype).removeprefix("torch.")


def short_name(dtype: object) -> str:
    """Return the short name of a dtype: torch.bfloat16 -> 'bf16'; `long_name` if it has none."""
    name = long_name(dtype)
    return _SHORT.get(name, name)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a short or long name: 'bf16' or 'bfloat16' -> torch.bfloat16.

    Raises ValueError for a name that torch does not have.
    """
    dtype = getattr(torch, _LONG.get(name, str(name)), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}; give a name such as bf16 or bfloat16")
    return dtype


def dtype_of_code(code: str, name: str) -> torch.dtype:
    """Return the dtype of a safetensors code such as "BF16". Raises ValueError, naming the tensor, for an unknown code.

    name: of the tensor.
    """
    if code not in SAFETENSORS:
        raise ValueError(f"{name} is stored as {code}, which is none of {', '.join(SAFETENSORS)}; convert it to one")
    return SAFETENSORS[code]
