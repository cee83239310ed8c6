"""Every configuration of the grouped products as its launcher would start it, for `dualpipe.kernels.compilation`.

`sizes` says what the launcher knows of sizes and strides: "16" multiples of 16, as in every model; "8" multiples of 8;
"odd" nothing, and no consecutive numbers either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dualpipe.kernels.compilation import CompileSpec
from dualpipe.kernels.gemm_configs import GemmConfig, fuses_swiglu, row_configs, weight_configs
from dualpipe.kernels.grouped_gemm import (
    Swiglu,
    _rows_constants,
    _rows_kernel,
    _w_block,
    _weight_constants,
    _weight_kernel,
)

EXPERTS = 128
_EXACT = {"odd": "bf16", "float32": "fp32", "float64": "fp64"}  # shape classes for operands of any size
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def specs(arch: int) -> Iterator[CompileSpec]:
    """All for sm_`arch`."""
    for name, config in row_configs(arch).items():
        yield from _rows_specs(name, config, arch)
    for name, config in weight_configs(arch).items():
        yield from _weight_specs(name, config, arch)


def _rows_specs(name: str, config: GemmConfig, arch: int) -> Iterator[CompileSpec]:
    if name in _EXACT:
        dtype = _EXACT[name]
        for forward in (True, False):
            yield _rows_spec(name, config, dtype, forward, sizes="odd", a=False, w=False)
        yield _rows_spec(name, config, dtype, True, sizes="odd", a=False, w=False, gather=True)
        for swiglu in _fused(arch, name):
            yield _rows_spec(name, config, dtype, True, sizes="odd", a=False, w=False, gather=True, swiglu=swiglu)
        if name == "odd" and arch >= 90:
            for swiglu in (None, *_fused(arch, name)):
                yield _rows_spec(name, config, dtype, True, sizes="odd", a=True, w=False, swiglu=swiglu)
                yield _rows_spec(name, config, dtype, True, sizes="odd", a=False, w=True, swiglu=swiglu)
                yield _rows_spec(name, config, dtype, True, sizes="odd", a=True, w=True, swiglu=swiglu)
        return
    chip = arch >= 90
    for forward in (True, False):
        yield _rows_spec(name, config, "bf16", forward, sizes="16", a=chip, w=chip)
        yield _rows_spec(name, config, "bf16", forward, sizes="8", a=chip, w=chip)
    yield _rows_spec(name, config, "fp16", True, sizes="16", a=chip, w=chip)
    yield _rows_spec(name, config, "bf16", True, sizes="16", a=False, w=chip, gather=True)
    for swiglu in _fused(arch, name):
        yield _rows_spec(name, config, "bf16", True, sizes="16", a=chip, w=chip, swiglu=swiglu)
        yield _rows_spec(name, config, "bf16", True, sizes="8", a=chip, w=chip, swiglu=swiglu)
        yield _rows_spec(name, config, "bf16", True, sizes="16", a=False, w=chip, gather=True, swiglu=swiglu)


def _fused(arch: int, name: str) -> list[Swiglu]:
    forms = (Swiglu(None, False, 1.0, 0.0), Swiglu(None, True, 1.702, 7.0))
    return [swiglu for swiglu in forms if fuses_swiglu(arch, name, swiglu.clamped)]


def _weight_specs(name: str, config: GemmConfig, arch: int) -> Iterator[CompileSpec]:
    if name in _EXACT:
        dtype = _EXACT[name]
        for add in (False, True):
            yield _weight_spec(name, config, dtype, "fp32", add, sizes="odd", dy=False, x=False)
            yield _weight_spec(name, config, dtype, dtype, add, sizes="odd", dy=False, x=False, gather=True)
        return
    chip = arch >= 90
    for out in ("fp32", "bf16"):
        for add in (False, True):
            yield _weight_spec(name, config, "bf16", out, add, sizes="16", dy=chip, x=chip)
            yield _weight_spec(name, config, "bf16", out, add, sizes="16", dy=chip, x=False, gather=True)
    yield _weight_spec(name, config, "bf16", "bf16", True, sizes="8", dy=chip, x=chip)
    if chip:
        yield _weight_spec(name, config, "bf16", "fp32", True, sizes="16", dy=True, x=True, out_descriptor=False)
    yield _weight_spec(name, config, "fp16", "fp32", True, sizes="16", dy=chip, x=chip)


def _rows_spec(
    name: str, config: GemmConfig, dtype: str, forward: bool, *, sizes: str, a: bool, w: bool, gather: bool = False,
    swiglu: Swiglu | None = None,
) -> CompileSpec:
    """`a`, `w`: through a descriptor; `gather`: with bias, and the weight of `swiglu`, too."""
    torch_dtype = _DTYPES[dtype]
    constants = _rows_constants(config, forward, a, w, sizes != "odd", config.depth, EXPERTS, torch_dtype, swiglu)
    ones = () if sizes == "odd" else ("a_d", "w_d" if forward else "w_c")
    numbers = [n for n in ("M", "C", "D", "E", "a_row", "a_d", "w_e", "w_c", "w_d") if n not in ones]
    signature = {
        "a": _argument(dtype, [config.rows, config.depth], a),
        "w": _argument(dtype, _w_block(config, forward, swiglu), w),
        "y": f"*{dtype}",
        "offs": "*i32",
        **({"h": f"*{dtype}"} if swiglu else {}),
        **({"weight": f"*{dtype}"} if swiglu and gather else {}),
        **({"gather": "*i32", "bias": f"*{dtype}"} if gather else {}),
        **dict.fromkeys(numbers, "i32"),
    }
    optional = dict.fromkeys({"h", "weight", "gather", "bias"} - signature.keys())
    kind = ("rows" if forward else "rows_dgrad") if not swiglu else "swiglu_clamped" if swiglu.clamped else "swiglu"
    return CompileSpec(
        name=f"grouped_gemm.{kind}.{name}.{dtype}.{sizes}{'.gather_bias' if gather else ''}{_read('.a', a)}"
        f"{_read('.w', w)}",
        kernel=_rows_kernel,
        signature=signature,
        constexprs={**constants, "EVEN": sizes == "16", **optional, **dict.fromkeys(ones, 1)},
        num_warps=config.warps,
        num_stages=config.stages,
        needs_mma=dtype in ("bf16", "fp16"),
        divisible_by_16=_divisible(signature, numbers, sizes, never=("M", "E")),
    )


def _weight_spec(
    name: str, config: GemmConfig, dtype: str, out: str, add: bool, *, sizes: str, dy: bool, x: bool,
    gather: bool = False, out_descriptor: bool = True,
) -> CompileSpec:
    """`dy`, `x`: through a descriptor; `out`: its dtype, added to through a descriptor where possible and wanted."""
    reduce = out_descriptor and dy and add and out == "fp32"
    ones = () if sizes == "odd" else ("dy_n", "x_h", "out_h")
    constants = _weight_constants(config, add, dy, x, reduce, sizes != "odd", _DTYPES[dtype])
    numbers = [n for n in ("M", "N", "H", "dy_row", "dy_n", "x_row", "x_h", "out_e", "out_n", "out_h") if n not in ones]
    signature = {
        "dy": _argument(dtype, [config.depth, config.rows], dy),
        "x": _argument(dtype, [config.depth, config.cols], x),
        "out": _argument(out, [1, config.rows, config.cols // 2], reduce),
        "offs": "*i32",
        **({"gather": "*i32"} if gather else {}),
        **dict.fromkeys(numbers, "i32"),
    }
    return CompileSpec(
        name=f"grouped_gemm.weight.{name}.{dtype}.{sizes}.{out}_{'add' if add else 'write'}"
        f"{'.gather' if gather else ''}{_read('.dy', dy)}{_read('.x', x)}{_read('.out', reduce)}",
        kernel=_weight_kernel,
        signature=signature,
        constexprs={**constants, **({} if gather else {"gather": None}), **dict.fromkeys(ones, 1)},
        num_warps=config.warps,
        num_stages=config.stages,
        needs_mma=name not in ("float32", "float64"),
        divisible_by_16=_divisible(signature, numbers, sizes, never=("M",)),
    )


def _read(name: str, descriptor: bool) -> str:
    return name if descriptor else ""


def _argument(dtype: str, block: list[int], descriptor: bool) -> str:
    return f"tensordesc<{dtype}{block}>" if descriptor else f"*{dtype}"


def _divisible(signature: dict[str, str], numbers: list[str], sizes: str, never: tuple[str, ...]) -> tuple[str, ...]:
    pointers = [name for name, kind in signature.items() if kind.startswith("*") and (sizes != "odd" or name == "offs")]
    return (*pointers, *(n for n in numbers if sizes == "16" and n not in never))
