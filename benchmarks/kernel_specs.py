"""List every kernel in every configuration that its launcher can start, for `compile_kernels.py`.

For the grouped GEMMs, `sizes` is the launcher's knowledge of sizes and strides: "16" multiples of 16, as in every
model; "8" multiples of 8; "odd" nothing, and no unit stride either. For the other kernels, "odd" means no alignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import Any

import torch

from dualpipe.kernels.common import tl, triton
from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.kernels.grouped_gemm_tiles import (
    MOST_MERGED,
    GemmConfig,
    dequantize_configs,
    fp8_configs,
    fuses_swiglu,
    most_merged,
    row_configs,
    rows_constants,
    w_block,
    weight_configs,
    weight_constants,
)

# Functions of the same names hide some of the modules.
GEMM, GEMM_QUANTIZED, SWIGLU, ROUTING, CROSS_ENTROPY, NORM, ROTARY, TOP_K, QUANTIZE = (
    import_module(f"dualpipe.kernels.{name}")
    for name in (
        "grouped_gemm", "grouped_gemm_quantized", "swiglu", "routing", "cross_entropy", "norm", "rotary", "top_k",
        "quantize",
    )
)
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
EXPERTS = 128
_EXACT = {"odd": "bf16", "float32": "fp32", "float64": "fp64"}  # shape classes for operands of any size
# Prefixes of the stride arguments of the GEMMs with quantized weights.
_STRIDES = ("a_row", "a_d", "a_scales_", "w_e", "w_block_row", "w_row", "w_scales_", "matrix_scales_")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class CompileSpec:
    """One kernel in one configuration.

    signature: Triton's type by argument name ("*bf16", "i32", "fp32"), in the kernel's order, without constexprs;
    constexprs: their values; divisible_by_16: arguments that the launcher guarantees to be multiples of 16; mma_kind: a
    pattern for the rest of its matrix instructions' names.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    needs_mma: bool
    divisible_by_16: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    mma_kind: str = ""


def all_specs(arch: int) -> Iterator[CompileSpec]:
    """Yield the configurations of every kernel for sm_`arch`."""
    for name, config in row_configs(arch).items():
        yield from row_specs(name, config, arch)
    for name, config in weight_configs(arch).items():
        yield from weight_specs(name, config, arch)
    if arch >= 90:
        yield from _gemm_quantized_specs(arch)
    yield from _swiglu_specs()
    yield from _routing_specs()
    yield from _cross_entropy_specs()
    yield from _norm_specs()
    yield from _rotary_specs()
    yield from _top_k_specs()
    yield from _quantize_specs()


def row_specs(name: str, config: GemmConfig, arch: int) -> Iterator[CompileSpec]:
    """Yield every configuration of the row GEMMs in shape class `name`, with the tiles of `config`."""
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


def _fused(arch: int, name: str) -> list[Any]:
    forms = (SWIGLU.Activation(None, False, 1.0, 0.0), SWIGLU.Activation(None, True, 1.702, 7.0))
    return [swiglu for swiglu in forms if fuses_swiglu(arch, name, swiglu.clamped)]


def weight_specs(name: str, config: GemmConfig, arch: int) -> Iterator[CompileSpec]:
    """Yield every configuration of the weight gradients in shape class `name`, with the tiles of `config`."""
    if name in _EXACT:
        dtype = _EXACT[name]
        for add in (False, True):
            yield _weight_spec(name, config, dtype, "fp32", add, sizes="odd", dy=False, x=False)
            yield _weight_spec(name, config, dtype, dtype, add, sizes="odd", dy=False, x=False, gather=True)
        most = most_merged(arch)
        yield _weight_spec(name, config, dtype, "fp32", True, sizes="odd", dy=False, x=False, merged=2)
        yield _weight_spec(name, config, dtype, dtype, True, sizes="odd", dy=False, x=False, gather=True, merged=most)
        return
    chip = arch >= 90
    gather = name.endswith("_gathered")
    x = chip and not gather
    for out in ("fp32", "bf16"):
        for add in (False, True):
            yield _weight_spec(name, config, "bf16", out, add, sizes="16", dy=chip, x=x, gather=gather)
    yield _weight_spec(name, config, "bf16", "bf16", True, sizes="8", dy=chip, x=x, gather=gather)
    if chip:
        yield _weight_spec(
            name, config, "bf16", "fp32", True, sizes="16", dy=True, x=x, gather=gather, out_descriptor=False)
    yield _weight_spec(name, config, "fp16", "fp32", True, sizes="16", dy=chip, x=x, gather=gather)
    most = most_merged(arch)
    for merged in range(2, most + 1):
        yield _weight_spec(name, config, "bf16", "fp32", True, sizes="16", dy=chip, x=x, gather=gather, merged=merged)
    yield _weight_spec(name, config, "bf16", "fp32", False, sizes="16", dy=chip, x=x, gather=gather, merged=most)
    yield _weight_spec(name, config, "bf16", "bf16", True, sizes="8", dy=chip, x=x, gather=gather, merged=most)


def _gemm_quantized_specs(arch: int) -> Iterator[CompileSpec]:
    """Yield GEMMs with weights of every format, with and without partial tiles; fp8_block_pow2 is fp8_block."""
    for name, even in product(("mxfp8", "fp8_block"), (True, False)):
        yield _fp8_spec(FORMATS[name], arch, even, a=True, w=True)
        yield _fp8_spec(FORMATS[name], arch, even, a=False, w=True, gather=True)
        yield _fp8_spec(FORMATS[name], arch, even, a=False, w=False, gather=True)
    for name, forward in product([name for name in FORMATS if name != "fp8_block_pow2"], (True, False)):
        for shape, dtype, even, a in (
            ("half", "bf16", True, True), ("half", "bf16", False, True), ("half", "bf16", True, False),
            ("half", "bf16", False, False), ("half", "fp16", True, True), ("odd", "bf16", False, False),
            ("float32", "fp32", False, False),
        ):
            yield _dequantize_spec(FORMATS[name], shape, dtype, forward, even, a=a)


def _fp8_spec(format: Format, arch: int, even: bool, *, a: bool, w: bool, gather: bool = False) -> CompileSpec:
    """Return the spec of an FP8 GEMM. even: no step through K is partial; the other arguments as in `_rows_spec`."""
    blocks, kernel = format.block[0] > 1, GEMM_QUANTIZED._fp8_kernel
    config = fp8_configs(arch)["block" if blocks else "mx"]
    constants = GEMM_QUANTIZED.fp8_constants(config, format, a, w, config.depth + 16 * (not even), EXPERTS)
    w_tile = [1, 1, config.cols, config.depth] if blocks else [1, config.cols, 1, config.depth]
    scale = "*fp32" if blocks else "*u8"
    signature = {
        "a": _argument("fp8e4nv", [config.rows, config.depth], a),
        "w": _argument("fp8e4nv", w_tile, w),
        "a_scales": scale, "w_scales": scale, "y": "*bf16", "offs": "*i32",
        **({"gather": "*i32", "bias": "*bf16"} if gather else {}),
        **dict.fromkeys(("M", "N", "K", "E", *(name for name in kernel.arg_names if name.startswith(_STRIDES))), "i32"),
    }
    kind = "e4m3\\.e4m3" if arch < 100 else "kind::f8f6f4" if blocks else "kind::mxf8f6f4\\.block_scale"
    return CompileSpec(
        name=f"grouped_gemm_fp8.{format}{'' if even else '.border'}{'.gather_bias' if gather else ''}{_read('.a', a)}"
        f"{_read('.w', w)}",
        kernel=kernel,
        signature=signature,
        constexprs=constants | ({} if gather else {"gather": None, "bias": None}),
        num_warps=config.warps,
        num_stages=config.stages,
        needs_mma=True,
        divisible_by_16=_divisible(signature, ["N", "K", "a_row", "w_e", "w_block_row", "w_row"], "16", never=()),
        mma_kind=r"\S*" + kind,
    )


def _dequantize_spec(
    format: Format, name: str, dtype: str, forward: bool, even: bool, *, a: bool
) -> CompileSpec:
    """Return the spec of a GEMM that dequantizes weights. a: by a descriptor; if False, with `gather` and bias."""
    config, kernel, odd = dequantize_configs()[name], GEMM_QUANTIZED._dequantize_kernel, name in _EXACT
    constants = GEMM_QUANTIZED.dequantize_constants(
        config, format, forward, a, config.depth + 8 * (not even), EXPERTS, _DTYPES[dtype]
    )
    scales = {torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e8m0fnu: "*u8"}
    signature = {
        "a": _argument(dtype, [config.rows, config.depth], a),
        "w": "*u8" if format.bits == 4 else "*fp8e4nv", "y": f"*{dtype}",
        "offs": "*i32", **({"matrix_scales": "*fp32"} if format.matrix_scale else {}),
        "w_scales": scales[format.scale],
        **({} if a else {"gather": "*i32", "bias": f"*{dtype}"}),
        **dict.fromkeys(("M", "N", "K", "E", *(name for name in kernel.arg_names if name.startswith(_STRIDES))), "i32"),
    }
    if not odd:
        del signature["a_d"]
    return CompileSpec(
        name=f"grouped_gemm_dequantize.{format}.{'rows' if forward else 'rows_dgrad'}.{name}.{dtype}"
        f"{'' if even else '.border'}{_read('.a', a) or '.gather_bias'}",
        kernel=kernel,
        signature=signature,
        constexprs=constants | dict.fromkeys({"matrix_scales", "gather", "bias"} - signature.keys())
        | ({} if odd else {"a_d": 1}),
        num_warps=config.warps,
        num_stages=config.stages,
        needs_mma=dtype in ("bf16", "fp16"),
        divisible_by_16=_divisible(
            signature, ["N", "K", "a_row", "w_e", "w_block_row", "w_row"], "odd" if odd else "16", never=()
        ),
    )


def _rows_spec(
    name: str, config: GemmConfig, dtype: str, forward: bool, *, sizes: str, a: bool, w: bool, gather: bool = False,
    swiglu: Any = None,
) -> CompileSpec:
    """Return the spec of a row GEMM. a, w: by a descriptor; gather: also with bias, and with the weight of `swiglu`."""
    torch_dtype = _DTYPES[dtype]
    constants = rows_constants(config, forward, a, w, sizes != "odd", config.depth, EXPERTS, torch_dtype, swiglu)
    ones = () if sizes == "odd" else ("a_d", "w_d" if forward else "w_c")
    numbers = [n for n in ("M", "C", "D", "E", "a_row", "a_d", "w_e", "w_c", "w_d") if n not in ones]
    signature = {
        "a": _argument(dtype, [config.rows, config.depth], a),
        "w": _argument(dtype, w_block(config, forward, swiglu), w),
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
        kernel=GEMM._rows_kernel,
        signature=signature,
        constexprs={**constants, "EVEN": sizes == "16", **optional, **dict.fromkeys(ones, 1)},
        num_warps=config.warps,
        num_stages=config.stages,
        needs_mma=dtype in ("bf16", "fp16"),
        divisible_by_16=_divisible(signature, numbers, sizes, never=("M", "E")),
    )


def _weight_spec(
    name: str, config: GemmConfig, dtype: str, out: str, add: bool, *, sizes: str, dy: bool, x: bool,
    gather: bool = False, out_descriptor: bool = True, merged: int = 1,
) -> CompileSpec:
    """Return the spec of a weight gradient.

    dy, x: read by a descriptor; out: its dtype; out_descriptor: add to out by a descriptor where possible; merged: the
    number of micro-batches in one launch.
    """
    reduce = out_descriptor and dy and add and out == "fp32"
    ones = () if sizes == "odd" else ("dy_n", "x_h", "out_h")
    constants = weight_constants(config, add, dy, x, reduce, sizes != "odd", _DTYPES[dtype])
    rows = [f"M{i}" for i in range(MOST_MERGED)] if merged > 1 else ["M"]
    strides = [n for n in ("dy_row", "dy_n", "x_row", "x_h", "out_e", "out_n", "out_h") if n not in ones]
    of_microbatch = {
        "dy": _argument(dtype, [config.depth, config.rows], dy),
        "x": _argument(dtype, [config.depth, config.cols], x),
        "offs": "*i32",
        **({"gather": "*i32"} if gather else {}),
    }
    if merged > 1:
        of_microbatch = {f"{key}{i}": kind for key, kind in of_microbatch.items() for i in range(merged)}
    numbers = [*rows, "N", "H", *strides]
    signature = {
        **of_microbatch,
        "out": _argument(out, [1, config.rows, config.cols // 2], reduce),
        **dict.fromkeys(numbers, "i32"),
    }
    kernel = GEMM._merged_weight_kernel if merged > 1 else GEMM._weight_kernel
    absent = [n for n in kernel.arg_names if n.startswith(("dy", "x", "offs", "gather")) and "_" not in n]
    return CompileSpec(
        name=f"grouped_gemm.weight.{name}.{dtype}.{sizes}.{out}_{'add' if add else 'write'}"
        f"{f'.merged{merged}' if merged > 1 else ''}{'.gather' if gather else ''}{_read('.dy', dy)}{_read('.x', x)}"
        f"{_read('.out', reduce)}",
        kernel=kernel,
        signature=signature,
        constexprs={**constants, **dict.fromkeys(set(absent) - signature.keys()), **dict.fromkeys(ones, 1)},
        num_warps=config.warps,
        num_stages=config.stages,
        needs_mma=name not in ("float32", "float64"),
        divisible_by_16=_divisible(signature, numbers, sizes, never=rows),
    )


def _read(name: str, descriptor: bool) -> str:
    return name if descriptor else ""


def _argument(dtype: str, block: list[int], descriptor: bool) -> str:
    return f"tensordesc<{dtype}{block}>" if descriptor else f"*{dtype}"


def _divisible(
    signature: dict[str, str], numbers: list[str], sizes: str, never: Sequence[str]
) -> tuple[str, ...]:
    pointers = [name for name, kind in signature.items()
                if kind.startswith("*") and (sizes != "odd" or name.startswith("offs"))]
    return (*pointers, *(n for n in numbers if sizes == "16" and n not in never))


def _swiglu_specs() -> Iterator[CompileSpec]:
    for dtype, shape, odd, clamped, weighted, kernel in product(
        ("bf16", "fp32"), SWIGLU._TILES, (False, True), (False, True), (False, True),
        (SWIGLU._forward_kernel, SWIGLU._backward_kernel),
    ):
        tile = SWIGLU._TILES[shape].scaled_for(_DTYPES[dtype])
        names = [name for name in kernel.arg_names if name == "M" or not name.isupper()]
        words = ["swiglu", "forward" if kernel is SWIGLU._forward_kernel else "backward", dtype, shape]
        words += [word for word, said in (("clamped", clamped), ("weighted", weighted), ("odd", odd)) if said]
        yield CompileSpec(
            ".".join(words),
            kernel,
            {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in names},
            {"CLAMPED": clamped, "ALPHA": 1.702, "LIMIT": 7.0, "HAS_WEIGHT": weighted, "COMPUTE": tl.float32,
             "BLOCK_M": tile.rows, "BLOCK_I": tile.cols},
            tile.warps,
            num_stages=1,
            needs_mma=False,
            divisible_by_16=tuple(name for name in names if name.endswith("_ptr") or not (odd or name == "M")),
        )


def _routing_specs() -> Iterator[CompileSpec]:
    """Yield the routing kernels; the number of experts goes in steps of the counting kernel's bins."""
    rows, chunk = ROUTING._SORT_ROWS, ROUTING._SORT_CHUNK
    for bins in (64, 128, 256, 512, 1024):
        yield _routing_spec(f"routing.count.{bins}", ROUTING._count_kernel, "bf16", {"ROWS": rows, "BINS": bins}, 4)
    yield _routing_spec("routing.place", ROUTING._place_kernel, "bf16", {"ROWS": rows, "CHUNK": chunk}, 4)
    for dtype, shape, weighted, odd, kernel in product(
        ("bf16", "fp32"), ROUTING._TILES, (False, True), (False, True),
        (ROUTING._sum_kernel, ROUTING._spread_kernel),
    ):
        tile = ROUTING._TILES[shape].scaled_for(_DTYPES[dtype])
        words = ["routing", "sum" if kernel is ROUTING._sum_kernel else "spread", dtype, shape]
        words += [word for word, said in (("weighted", weighted), ("odd", odd)) if said]
        constexprs = {"HAS_WEIGHTS": weighted, "COMPUTE": tl.float32, "BLOCK_T": tile.rows, "BLOCK_H": tile.cols}
        if kernel is ROUTING._sum_kernel:
            constexprs["UNROLL"] = tile.unroll
        aligned = () if odd else ("H", "stride", "row_stride")
        yield _routing_spec(".".join(words), kernel, dtype, constexprs, tile.warps, aligned)
    for top_k, ranks in product((1, 6, 8), (2, 8, 64, 320)):
        name = f"routing.destinations.{top_k}.{ranks}"
        yield _routing_spec(name, ROUTING._destinations_kernel, "bf16", ROUTING.destination_constants(top_k, ranks), 4)
    for dtype, top_k in product(("bf16", "fp32"), (6, 8)):
        constexprs = {"K": top_k, "D": top_k, "BLOCK": ROUTING._COLLECT_CHOICES}
        yield _routing_spec(f"routing.collect.{dtype}.{top_k}", ROUTING._collect_kernel, dtype, constexprs, 4)


def _routing_spec(
    name: str, kernel: Any, dtype: str, constexprs: dict[str, Any], warps: int, aligned: tuple[str, ...] = ()
) -> CompileSpec:
    integers = ("counts_ptr", "ends_ptr", "order_ptr", "inverse_ptr", "gather_ptr", "offs_ptr", "ranks_ptr",
                "local_ptr", "places_ptr")
    wide = ("copies_ptr", "d_copies_ptr")
    types = {"experts_ptr": "*i64"} | dict.fromkeys(integers, "*i32") | dict.fromkeys(wide, "*fp32")
    names = [name for name in kernel.arg_names if name not in constexprs]
    return CompileSpec(
        name,
        kernel,
        {name: types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32") for name in names},
        constexprs,
        warps,
        num_stages=1,
        needs_mma=False,
        divisible_by_16=tuple(name for name in names if name.endswith("_ptr") or name in aligned),
    )


def _cross_entropy_specs() -> Iterator[CompileSpec]:
    for dtype, (shape, tile), odd, kernel in product(
        ("bf16", "fp32"), CROSS_ENTROPY._TILES.items(), (False, True),
        (CROSS_ENTROPY._forward_kernel, CROSS_ENTROPY._backward_kernel),
    ):
        types = {"labels_ptr": "*i64"} | dict.fromkeys(("loss_ptr", "stats_ptr", "scale_ptr"), "*fp32")
        types |= dict.fromkeys(("logits_ptr", "grad_ptr"), f"*{dtype}")
        names = [name for name in kernel.arg_names if name not in ("COMPUTE", "BLOCK_V")]
        direction = "forward" if kernel is CROSS_ENTROPY._forward_kernel else "backward"
        aligned = [name for name in names if name.endswith("_ptr") or (not odd and name != "ignore_index")]
        yield CompileSpec(
            f"cross_entropy.{direction}.{dtype}.{shape}{'.odd' if odd else ''}",
            kernel,
            {name: types.get(name, "i32") for name in names},
            {"COMPUTE": tl.float32, "BLOCK_V": tile.cols},
            tile.warps,
            num_stages=1,
            needs_mma=False,
            divisible_by_16=tuple(aligned),
        )


def _norm_specs() -> Iterator[CompileSpec]:
    """Yield the norm kernels for widths of a head, of a latent, and up to the widest; with and without an addition."""
    for dtype, width, added, odd, kernel in product(
        ("bf16", "fp32"), (128, 1536, 2048, 4096, NORM._MAX_COLUMNS), (False, True), (False, True),
        (NORM._forward_kernel, NORM._backward_kernel),
    ):
        tile, forward = NORM.tile_of(width), kernel is NORM._forward_kernel
        constexprs = {"COMPUTE": tl.float32, "BLOCK_T": tile.rows, "BLOCK_H": tile.cols}
        constexprs |= {"HAS_RESIDUAL": added, "EPS": 1e-6} if forward else {"HAS_D_SUM": added}
        words = ["norm", "forward" if forward else "backward", dtype, str(width)]
        words += [word for word, said in (("added", added), ("odd", odd)) if said]
        name = ".".join(words)
        if name == "norm.backward.fp32.4096.added.odd" and _TRITON < (3, 7):
            continue  # no model needs it, and 8 bytes spill on sm_90
        aligned = () if odd else ("H", "stride", "residual_stride", "stride_dy", "stride_d_sum", "span")
        yield _rows_spec_of(name, kernel, dtype, constexprs, tile.warps, aligned)


def _rotary_specs() -> Iterator[CompileSpec]:
    for dtype, dim, interleaved, norm, odd, kernel in product(
        ("bf16", "fp32"), (64, 128), (False, True), (False, True), (False, True),
        (ROTARY._forward_kernel, ROTARY._backward_kernel),
    ):
        if interleaved and norm and dtype == "fp32":
            continue  # no model needs it, and 8 bytes spill on sm_80
        constexprs = ROTARY.constants(dim, interleaved, norm, _DTYPES[dtype], torch.float32)
        warps, forward = constexprs.pop("num_warps"), kernel is ROTARY._forward_kernel
        words = ["rotary", "forward" if forward else "backward", dtype, str(dim)]
        words += [word for word, said in (("interleaved", interleaved), ("norm", norm), ("odd", odd)) if said]
        aligned = () if odd else ("A", "R", *(name for name in kernel.arg_names if name.endswith(("_token", "_head"))))
        yield _rows_spec_of(".".join(words), kernel, dtype, constexprs | ({"EPS": 1e-6} if forward else {}), warps,
                             aligned)


def _top_k_specs() -> Iterator[CompileSpec]:
    """Yield the top-k kernels for the experts and top_k of Mixtral, gpt-oss, Qwen3, DeepSeek-V2 and Qwen3-Next."""
    for dtype, (experts, top_k), norm, balanced in product(
        ("bf16", "fp32"), ((8, 2), (32, 4), (128, 8), (160, 6), (512, 10)), (False, True), (False, True),
    ):
        constexprs = TOP_K.constants(experts, top_k, norm, 1.0, torch.float32)
        warps = constexprs.pop("num_warps")
        name = f"{dtype}.{experts}.{top_k}{'.norm' if norm else ''}"
        if not balanced:
            yield _rows_spec_of(f"top_k.forward.{name}", TOP_K._forward_kernel, dtype,
                                constexprs | {"BLOCK_K": TOP_K.block_k(top_k)}, warps, ("E", "stride"))
        yield _rows_spec_of(f"top_k.backward.{name}{'.balanced' if balanced else ''}", TOP_K._backward_kernel, dtype,
                            constexprs | {"HAS_D_PROBS": balanced}, warps, ("E",))


def _quantize_specs() -> Iterator[CompileSpec]:
    formats, rows = QUANTIZE.FORMATS, {f"rows.{block}": how for block, how in QUANTIZE.ROW_FORMATS.items()}
    for dtype, (name, how), odd in product(("bf16", "fp32"), (formats | rows).items(), (False, True)):
        constants = QUANTIZE.constants(how, QUANTIZE.tile_of(how, _DTYPES[dtype]))
        matrix_scale, end = {"MATRIX_SCALE": how.matrix_scale}, f"{name}.{dtype}{'.odd' if odd else ''}"
        own = {"TAIL": name in formats, "POWER_OF_TWO": how.power_of_two, **matrix_scale}
        yield _quantize_spec(f"quantize.{end}", QUANTIZE._quantize_kernel, how, dtype, constants | own, odd)
        constants = QUANTIZE.constants(how, QUANTIZE.tile_of(rows["rows.32"], torch.bfloat16))
        constants |= matrix_scale
        yield _quantize_spec(f"dequantize.{end}", QUANTIZE._dequantize_kernel, how, dtype, constants, odd)
        if how.matrix_scale:
            tile = QUANTIZE.tile_of(formats["mxfp8"], _DTYPES[dtype])
            constants = {"ROWS": tile.rows, "COLS": tile.cols, "BLOCK": how.block[1], "num_warps": tile.warps}
            yield _quantize_spec(f"amax.{end}", QUANTIZE._amax_kernel, how, dtype, constants, odd)
        if how.block[0] == how.block[1] and dtype == "bf16":
            constants = {"BLOCK": how.block[0], "num_warps": 8}
            yield _quantize_spec(f"transpose.{end}", QUANTIZE._transpose_kernel, how, dtype, constants, odd)
    for dtype, (name, how), clamped, weighted, odd in product(
        ("bf16", "fp32"), rows.items(), (False, True), (False, True), (False, True),
    ):
        constants = QUANTIZE.constants(how, QUANTIZE.tile_of(how, _DTYPES[dtype])) | {
            "CLAMPED": clamped, "ALPHA": 1.702, "LIMIT": 7.0, "HAS_WEIGHT": weighted, "COMPUTE": tl.float32}
        words = ["swiglu_quantize", name, dtype]
        words += [word for word, said in (("clamped", clamped), ("weighted", weighted), ("odd", odd)) if said]
        yield _quantize_spec(".".join(words), QUANTIZE._swiglu_quantize_kernel, how, dtype, constants, odd)


def _quantize_spec(
    name: str, kernel: Any, how: Any, dtype: str, constants: dict[str, Any], odd: bool
) -> CompileSpec:
    """Return the spec of a quantization kernel. odd: nothing is aligned but block rows, to multiples of 16 bytes."""
    scales = "*i32" if how.scale is torch.float32 else "*u8"
    types = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "elements_ptr": "*u8", "scales_ptr": scales}
    types |= dict.fromkeys(("amax_ptr", "matrix_scales_ptr"), "*fp32")
    types |= dict.fromkeys(("gate_up_ptr", "weight_ptr", "h_ptr"), f"*{dtype}")
    if kernel is QUANTIZE._transpose_kernel:
        types |= {"x_ptr": "*u8", "y_ptr": "*u8", "x_scales_ptr": "*i32", "y_scales_ptr": "*i32"}
    elif kernel is QUANTIZE._amax_kernel:
        types["amax_ptr"] = "*i32"
    warps = constants.pop("num_warps")
    names = [name for name in kernel.arg_names if name not in constants]
    aligned = {"elements_matrix", "elements_block_row", "row_bytes"}
    if not odd:
        aligned |= {name for name in names if name not in ("N", "M", "used")}
    return CompileSpec(
        name, kernel, {name: types.get(name, "i32") for name in names}, constants, warps,
        num_stages=1, needs_mma=False, divisible_by_16=tuple(name for name in names if name in aligned),
    )


def _rows_spec_of(
    name: str, kernel: Any, dtype: str, constexprs: dict[str, Any], warps: int, aligned: tuple[str, ...]
) -> CompileSpec:
    wide = ("scale_ptr", "parts_ptr", "cos_ptr", "sin_ptr", "probs_ptr")
    names = [name for name in kernel.arg_names if name not in constexprs]
    types = {name: f"*{'fp32' if name.endswith(wide) else dtype}" for name in names if name.endswith("_ptr")}
    types |= {"experts_ptr": "*i64"} if "experts_ptr" in names else {}
    return CompileSpec(
        name, kernel, {name: types.get(name, "i32") for name in names}, constexprs, warps, num_stages=1,
        needs_mma=False, divisible_by_16=tuple(name for name in names if name in types or name in aligned),
    )
