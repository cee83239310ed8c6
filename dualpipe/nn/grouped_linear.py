"""Linear layers of experts: one weight per expert for its rows, optionally fused with the SwiGLU that follows.

Weights of the experts are stacked. Inputs have one of two forms: rows sorted by expert (M, H), with the end of each
expert's rows; or tokens (T, H) with `SortedTokens`, which lists the K rows of each token. Tokens are gathered inside
the kernels, so no sorted copy of K times their size is written, read and saved for the backward; the backward sums the
gradients of a token's rows in a fixed order. Weight gradients are deferred like those of `dualpipe.nn.Linear`. See
`dualpipe.nn.quantized_matmul` for the precision of GEMMs with quantized weights.

Dimension letters: T tokens, K experts per token, M rows (T * K at most), E experts (groups), H in_features, N
out_features, I intermediate (N is 2I for gate and up).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.grouped_gemm import (
    WgradOperands,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_swiglu,
    grouped_gemm_wgrad_merged,
)
from dualpipe.kernels.quantize import quantize_rows, swiglu_quantize
from dualpipe.kernels.routing import SortedTokens, combine_tokens
from dualpipe.kernels.swiglu import clamped_swiglu, swiglu, swiglu_backward, swiglu_form
from dualpipe.nn.accumulators import accumulation_dtype, local
from dualpipe.nn.deferral import return_or_defer
from dualpipe.nn.deferred_grad import Gemm
from dualpipe.nn.quantized_matmul import (
    HasGemmPrecision,
    RowsForWeightGrad,
    forward_gemm,
    input_grad,
    quantize_for_weight_grad,
    row_block,
)
from dualpipe.quantized import QuantizedTensor

_SwiGLUForm = tuple[bool, float, float]  # (clamped, alpha, limit): see `dualpipe.kernels.swiglu.swiglu_form`
GemmLibrary = Literal["dualpipe", "grouped_mm"]


class GroupedLinear(HasGemmPrecision, nn.Module):
    """Grouped linear layer: y[m] = W[e] x[m] (+ b[e]) for every row m of expert e.

    Equals `num_groups` times `nn.Linear` on consecutive rows. `weight` is (E, N, H), `bias` (E, N). The backward
    computes the input gradient immediately and defers the others while the active `WeightGradStore` is deferring. An
    expert without rows gets a zero gradient. Differentiable once.

    Attributes:
        form: (clamped, alpha, limit) of the SwiGLU after the GEMM; None: no SwiGLU.
        gemm_precision: precision of the GEMMs with a quantized weight; see `dualpipe.nn.quantized_matmul`.
        fp8_weight_grad: save quantized rows for the weight gradient of a quantized weight.
        gemm_library: computes the forward and the input gradient of a weight that is not quantized. "grouped_mm":
            `torch.nn.functional.grouped_mm`, in bfloat16 (float16 on some devices). It cannot gather rows or fuse the
            activation: tokens are copied in sorted order first, and SwiGLU is a kernel after the GEMM.
        quantizable: True if a dtype plan may quantize the weight.
    """

    makes_accumulators = True  # creates `.grad` in `grad_dtype` itself: the FSDP2 driver need not allocate zeros
    form: _SwiGLUForm | None = None
    quantizable = True
    fp8_weight_grad = False
    gemm_library: GemmLibrary = "dualpipe"

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        shape = (num_groups, out_features)
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize every expert like `nn.Linear`: uniform within 1/sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def forward(
        self, x: Tensor, rows: Tensor | SortedTokens, *, quantized: QuantizedRows | None = None
    ) -> Tensor:
        """Apply every expert to its rows -> (M, N). Rows past the last end are undefined.

        Args:
            x: (M, H) rows sorted by expert, or (T, H) tokens.
            rows: the end of each expert's rows (E,) int32, cumulative; for tokens, their `SortedTokens`.
            quantized: `x`, quantized in blocks of `quantized_matmul.row_block(self, x.dtype)` elements; None: quantize
                `x` if needed.

        Raises:
            ValueError: the operands do not match, or torch.func transforms are active.
        """
        return self._forward(x, rows, None, quantized, None)[0]

    def _forward(
        self, x: Tensor, rows: Tensor | SortedTokens, scale: Tensor | None, quantized: QuantizedRows | None,
        next_layer: nn.Module | None,
    ) -> tuple[Tensor, QuantizedRows | None]:
        """Return the result, and its rows quantized for `next_layer`; None if that layer does not quantize rows."""
        if torch.compiler.is_compiling():
            from dualpipe.nn.uncompiled import run_uncompiled  # not at the top: it imports the compiler

            result = run_uncompiled(GroupedLinear._forward, self, x, rows, scale, quantized, next_layer)
            return cast(tuple[Tensor, QuantizedRows | None], result)
        refuse_transforms("GroupedLinear", x, self.weight, self.bias, scale)
        x, autocast_dtype = _autocast(x)
        options = _GroupedOptions(
            rows=rows, autocast_dtype=autocast_dtype, form=self.form, gemm_library=self.gemm_library,
            block=row_block(self, x.dtype), next_block=None if next_layer is None else row_block(next_layer, x.dtype),
            quantized_x=quantized, fp8_weight_grad=self.fp8_weight_grad,
        )
        adapter = self._modules.get("adapter")  # of `dualpipe.nn.lora`
        if adapter is not None:
            return self._forward_adapted(x, scale, options, adapter)
        y, *quantized_y = _Grouped.apply(x, self.weight, self.bias, scale, options)
        return y, QuantizedRows(*quantized_y) if quantized_y else None

    def _forward_adapted(
        self, x: Tensor, scale: Tensor | None, options: _GroupedOptions, adapter: nn.Module
    ) -> tuple[Tensor, QuantizedRows | None]:
        """Apply the layer with an adapter, whose result is added between the GEMM and the activation."""
        y, *_ = _Grouped.apply(x, self.weight, self.bias, None, options._replace(form=None, next_block=None))
        y = adapter(x, y, options.rows)
        if options.form is not None:
            y = apply_swiglu(y, scale, options.form)
        return y, None if options.next_block is None else quantize_rows(y.detach(), options.next_block)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"


class GroupedSwiGLU(GroupedLinear):
    """First linear layer of every expert, fused with its activation: `GroupedLinear`, then `swiglu`.

    `weight` is (E, 2I, H), `bias` (E, 2I): gate and up are the two halves or, if `clamped` (gpt-oss), interleaved. The
    forward saves the result of the GEMM and the operands only; the backward recomputes the activation.
    """

    def __init__(
        self, num_groups: int, in_features: int, intermediate: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        *, clamped: bool = False, alpha: float = 1.702, limit: float = 7.0,
    ) -> None:
        super().__init__(num_groups, in_features, 2 * intermediate, bias, device, dtype)
        self.form = swiglu_form(clamped, alpha, limit)

    def forward(
        self, x: Tensor, rows: Tensor | SortedTokens, scale: Tensor | None = None, *,
        quantized: QuantizedRows | None = None, next_layer: nn.Module | None = None,
    ) -> Any:
        """Apply every expert to its rows -> (M, I).

        Args:
            x, rows, quantized: see `GroupedLinear.forward`.
            scale: (M,), multiplies the result, such as the routing weights of the sorted rows.
            next_layer: the layer that takes the result.

        Returns the result; with `next_layer` a pair of the result and its rows, quantized for that layer, or None if
        that layer does not quantize rows.
        """
        y, quantized_y = self._forward(x, rows, scale, quantized, next_layer)
        return y if next_layer is None else (y, quantized_y)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, clamped={self.form is not None and self.form[0]}"


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | SortedTokens, *, is_transposed: bool = False,
    form: _SwiGLUForm | None = None, scale: Tensor | None = None,
) -> Tensor:
    """Apply `GroupedLinear`, or with `form` `GroupedSwiGLU`, with parameters that belong to another module.

    Weight gradients have the layout of the parameters, and are deferred while the active `WeightGradStore` is
    deferring.

    Args:
        x, rows: see `GroupedLinear.forward`.
        weight: (E, N, H), or (E, H, N) if `is_transposed`.
        bias: (E, N).
        form: SwiGLU after the GEMM; see `dualpipe.kernels.swiglu.swiglu_form`.
        scale: (M,), with `form` only; see `GroupedSwiGLU.forward`.

    Returns (M, N), or (M, N / 2) with `form`.

    Raises:
        ValueError: the operands do not match.
    """
    if torch.compiler.is_compiling():
        from dualpipe.nn.uncompiled import run_uncompiled  # not at the top: it imports the compiler

        apply = partial(grouped_linear, is_transposed=is_transposed, form=form, scale=scale)
        return cast(Tensor, run_uncompiled(apply, x, weight, bias, rows))
    refuse_transforms("grouped_linear", x, weight, bias, scale)
    x, autocast_dtype = _autocast(x)
    options = _GroupedOptions(rows, autocast_dtype, form, is_transposed=is_transposed)
    y, *_ = _Grouped.apply(x, weight, bias, scale, options)
    return y


def apply_swiglu(gate_up: Tensor, scale: Tensor | None, form: _SwiGLUForm) -> Tensor:
    """Compute a SwiGLU of this form, (M, 2I) -> (M, I), multiplied by `scale` (M,) if there is one."""
    clamped, alpha, limit = form
    return clamped_swiglu(gate_up, scale, alpha, limit) if clamped else swiglu(gate_up, scale)


def refuse_transforms(name: str, *operands: Tensor | None, remedy: str = "experts that are nn.Linear") -> None:
    """Raise ValueError inside of torch.func transforms, and for operands with forward-mode derivatives.

    name: of the layer or function, for the message. remedy: experts that can be differentiated in these ways.
    """
    tensors = [x for x in operands if x is not None]
    is_dual = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if is_dual or torch._C._are_functorch_transforms_active():
        how = "torch.autograd.forward_ad" if is_dual else "torch.func"
        raise ValueError(f"{how} does not go through {name}, whose kernels have a backward for autograd only; use "
                         f"torch.autograd.grad, or {remedy}")


def _autocast(x: Tensor) -> tuple[Tensor, torch.dtype | None]:
    """Return `x` in autocast's dtype, and that dtype; `x` and None without autocast, and for float64."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type) or x.dtype is torch.float64:
        return x, None
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), dtype


class _GroupedOptions(NamedTuple):
    """Arguments of one call of a grouped layer that are not differentiated.

    Attributes:
        rows: the end of each expert's rows, or `SortedTokens`; see `GroupedLinear.forward`.
        autocast_dtype: dtype that the weight and bias are cast to; None: none.
        form: SwiGLU after the GEMM; see `GroupedLinear`.
        gemm_library: see `GroupedLinear`.
        is_transposed: the weight is (E, H, N) instead of (E, N, H).
        block: elements per scale of the rows that the GEMM reads; None: it reads `x`.
        next_block: elements per scale of the result's rows; None: they are not quantized.
        quantized_x: rows of `x` in blocks of `block`; None: quantize `x` if needed.
        fp8_weight_grad: save quantized rows for the weight gradient.
    """

    rows: Tensor | SortedTokens
    autocast_dtype: torch.dtype | None
    form: _SwiGLUForm | None
    gemm_library: GemmLibrary = "dualpipe"
    is_transposed: bool = False
    block: int | None = None
    next_block: int | None = None
    quantized_x: QuantizedRows | None = None
    fp8_weight_grad: bool = False


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, options: _GroupedOptions
    ) -> tuple[Tensor, ...]:
        form = options.form
        ctx.weight = weight  # the parameters themselves: saved tensors may come back as copies
        ctx.bias = bias
        ctx.form = form
        ctx.block = options.block
        ctx.is_transposed = options.is_transposed
        ctx.gemm_library = options.gemm_library
        _set_rows(ctx, x, options.rows)
        weight = local(weight)  # this rank's experts
        bias = None if bias is None else local(bias)
        if options.is_transposed:
            weight = weight.transpose(1, 2)
        if options.autocast_dtype is not None:
            weight = weight if isinstance(weight, QuantizedTensor) else weight.to(options.autocast_dtype)
            bias = None if bias is None else bias.to(options.autocast_dtype)
        quantized_x = None if options.block is None else options.quantized_x or quantize_rows(x, options.block)
        gate_up = None
        quantized_y = None
        if isinstance(weight, QuantizedTensor):
            y = forward_gemm(quantized_x or x, weight, ctx.offs, bias, ctx.gather, x.dtype)
            if form is not None:
                gate_up = y
                y, quantized_y = _swiglu(gate_up, scale, *form, options.next_block)
        elif options.gemm_library == "grouped_mm":
            y = _grouped_mm(x, weight, ctx.offs, bias, ctx.gather)
            if form is not None:
                gate_up = y
                y, quantized_y = _swiglu(gate_up, scale, *form, options.next_block)
        elif form is None:
            y = grouped_gemm(x, weight, ctx.offs, bias=bias, gather=ctx.gather)
        else:
            clamped, alpha, limit = form
            y, gate_up = grouped_gemm_swiglu(x, weight, ctx.offs, bias=bias, gather=ctx.gather, weight=scale,
                                             clamped=clamped, alpha=alpha, limit=limit)
        if options.next_block is not None:
            quantized_y = quantized_y or quantize_rows(y, options.next_block)
            ctx.mark_non_differentiable(*quantized_y)
        need_x, need_weight, *_ = ctx.needs_input_grad
        saved_quantized = quantized_x if need_weight and options.fp8_weight_grad else None
        ctx.save_for_backward(
            x if need_weight and saved_quantized is None else None,
            weight if need_x and not isinstance(weight, QuantizedTensor) else None,  # a quantized one is in ctx.weight
            gate_up, scale, *(saved_quantized or (None, None)),
        )
        return y, *(quantized_y or ())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, used_weight, gate_up, scale, *quantized_x = ctx.saved_tensors
        dx = None
        d_scale = None
        quantized_dy = None
        if ctx.form is not None:
            dy, d_scale = swiglu_backward(dy, gate_up, scale, *ctx.form)
        if ctx.needs_input_grad[0]:
            if used_weight is None:
                dx, quantized_dy = input_grad(dy, local(ctx.weight), ctx.offs, ctx.block)
            elif ctx.gemm_library == "grouped_mm":
                dx = F.grouped_mm(dy.contiguous(), used_weight, offs=ctx.offs)
            else:
                dx = grouped_gemm_dgrad(dy, used_weight, ctx.offs)  # (M, H)
            if ctx.tokens is not None:  # (T, H), the sum of a token's rows
                dx = combine_tokens(dx, None, ctx.tokens, top_k=ctx.top_k)
        if quantized_x[0] is None:
            operands = WgradOperands(dy, x, ctx.offs, ctx.gather)
            dw, db = return_or_defer(ctx, operands, _TRANSPOSED if ctx.is_transposed else _GROUPED)
        else:
            rows = quantize_for_weight_grad(dy, quantized_dy, QuantizedRows(*quantized_x), ctx.block)
            bias_dy = dy if ctx.needs_input_grad[2] else None
            dw, db = return_or_defer(ctx, _QuantizedOperands(rows, bias_dy, ctx.offs, ctx.gather), _QUANTIZED)
        return dx, dw, db, d_scale, None


def _set_rows(ctx: Any, x: Tensor, rows: Tensor | SortedTokens) -> None:
    """Set `tokens`, `offs` and `gather` of `ctx` from the rows of `x`; for tokens also `top_k`."""
    if isinstance(rows, Tensor):
        ctx.tokens = None
        ctx.offs = rows
        ctx.gather = None
        return
    ctx.tokens = rows
    ctx.offs = rows.offs
    ctx.gather = rows.gather
    num_tokens = x.shape[0]
    num_rows = rows.inverse.shape[0]
    ctx.top_k = max(1, num_rows // max(1, num_tokens))
    if num_tokens * ctx.top_k != num_rows:
        raise ValueError(f"x has {num_tokens} rows, expected one for each token, but the number of sorted rows, "
                         f"{num_rows}, is not a multiple of that; pass the tokens that were sorted")


def _grouped_mm(
    x: Tensor, weight_ENH: Tensor, offs_E: Tensor, bias_EN: Tensor | None, gather_M: Tensor | None
) -> Tensor:
    """Compute `grouped_gemm` with torch -> (M, N). Entries of `gather_M` past the last end may hold anything."""
    if gather_M is None:
        rows_MH = x.contiguous()
    elif x.shape[0] == 0:
        rows_MH = x.new_empty(gather_M.shape[0], x.shape[1])
    else:  # rows past the last end copy an arbitrary token: their number stays on the device
        rows_MH = x.index_select(0, gather_M.clamp(0, x.shape[0] - 1))
    y_MN = F.grouped_mm(rows_MH, weight_ENH.transpose(1, 2), offs=offs_E)
    if bias_EN is None:
        return y_MN
    numbers_M = torch.arange(y_MN.shape[0], device=offs_E.device, dtype=offs_E.dtype)
    expert_M = torch.searchsorted(offs_E, numbers_M, right=True).clamp(max=offs_E.shape[0] - 1)
    return y_MN + bias_EN[expert_M]


def _swiglu(
    gate_up: Tensor, scale: Tensor | None, clamped: bool, alpha: float, limit: float, block: int | None
) -> tuple[Tensor, QuantizedRows | None]:
    """Compute the activation of `gate_up`: (M, 2I) -> (M, I), and its quantized rows if `block` is set."""
    if block is not None:
        return swiglu_quantize(gate_up, scale, block=block, clamped=clamped, alpha=alpha, limit=limit)
    if clamped:
        return clamped_swiglu(gate_up, scale, alpha, limit), None
    return swiglu(gate_up, scale), None


def _grouped_weight_grad(weight: Tensor, operands: Sequence[WgradOperands], out: Tensor | None) -> Tensor:
    """Return the gradient of this rank's experts in the dtype of its accumulator; added to `out` if any."""
    dw_ENH = _new_weight_grad(weight, operands[0].dy) if out is None else out
    grouped_gemm_wgrad_merged(operands, out=dw_ENH, accumulate=out is not None)
    return dw_ENH


def _transposed_weight_grad(weight: Tensor, operands: Sequence[WgradOperands], out: Tensor | None) -> Tensor:
    """Return the gradient of a weight (E, H, N); see `_grouped_weight_grad`."""
    dw_EHN = _new_weight_grad(weight, operands[0].dy) if out is None else out
    grouped_gemm_wgrad_merged(operands, out=dw_EHN.transpose(1, 2), accumulate=out is not None)
    return dw_EHN


def _new_weight_grad(weight: Tensor, dy: Tensor) -> Tensor:
    """Return an uninitialized gradient of this rank's experts."""
    return dy.new_empty(local(weight.detach()).shape, dtype=accumulation_dtype(weight, weight.dtype))


def _bias_grad(bias: Tensor, operands: WgradOperands | _QuantizedOperands) -> Tensor:
    """Return the gradient of a bias (E, N)."""
    assert operands.dy is not None, "kept if the bias needs a gradient"
    return grouped_bias_grad(bias, operands.dy, operands.offs)


def _num_rows(operands: WgradOperands) -> int:
    """Return the number of rows of a micro-batch."""
    return operands.dy.shape[0]


_GROUPED = Gemm(_grouped_weight_grad, _num_rows, _bias_grad, merges=True)
_TRANSPOSED = Gemm(_transposed_weight_grad, _num_rows, _bias_grad, merges=True)


class _QuantizedOperands(NamedTuple):
    """`WgradOperands` as quantized rows, and the gradient of the output; None if the bias needs no gradient."""

    rows: RowsForWeightGrad
    dy: Tensor | None
    offs: Tensor
    gather: Tensor | None


def _quantized_weight_grad(weight: Tensor, operands: Sequence[_QuantizedOperands], out: Tensor | None) -> Tensor:
    """Return the gradient of this rank's experts from dequantized rows; see `_grouped_weight_grad`."""
    ((rows, _, offs, gather),) = operands
    return _grouped_weight_grad(weight, [WgradOperands(*rows.dequantize(), offs, gather)], out)


def _num_quantized_rows(operands: _QuantizedOperands) -> int:
    """Return the number of rows of a micro-batch."""
    return operands.rows.num_rows


_QUANTIZED = Gemm(_quantized_weight_grad, _num_quantized_rows, _bias_grad)


def grouped_bias_grad(bias: Tensor, dy: Tensor, offs: Tensor) -> Tensor:
    """Sum each expert's rows of `dy`: (M, N) -> (E, N); half precision is summed in float32.

    Sizes stay on the device: the host does not wait.
    """
    dtype = accumulation_dtype(bias, dy.dtype)
    offsets = torch.cat([offs.new_zeros(1), offs]).long()
    wide_dy = dy.to(torch.promote_types(torch.promote_types(dy.dtype, dtype), torch.float32))
    return torch.segment_reduce(wide_dy, "sum", offsets=offsets, axis=0, unsafe=True).to(dtype)
