"""AdamW over a rank's parameters, and the learning rate as a function of the step.

bf16: parameters are bf16, their `.grad` is fp32 (torch's `grad_dtype`), and the optimizer updates fp32 masters that are
rounded into the parameters after each step. Small updates are not lost that way, and nothing computes under autocast.
Quantized parameters bring their masters along, and are quantized anew from them.

Moments in bf16, as DeepSeek-V3 keeps them (arXiv:2412.19437, section 3.3.3), take 4 bytes of a parameter less. They are
widened, updated as ever and rounded to the nearest. Where 1 - beta is above 2^-8, half the largest step of bf16, a
gradient of zero still makes them smaller; with a beta of 0.999 they would never decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from dualpipe.nn.deferral import local
from dualpipe.quantized import requantize
from dualpipe.quantized.weights import placed_as, quantized_part, untrained

MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch calls them


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0,
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine", min_ratio: float = 0.1,
    decay_fraction: float = 0.2,
) -> float:
    """The learning rate of `step`, counted from 0.

    Linear warm-up that reaches `peak` at step `warmup_steps`, then "cosine": half a cosine; "linear"; or "wsd":
    constant, then linear over the last `decay_fraction` of all steps. These reach `min_ratio * peak` at the last step;
    "constant" stays at `peak`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    decay_steps, last = round(decay_fraction * total_steps) if schedule == "wsd" else total_steps, total_steps - 1
    start = max(warmup_steps, last - decay_steps)
    progress = min(1.0, max(0.0, (step - start) / (last - start))) if last > start else float(step > last)
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return peak * (min_ratio + (1.0 - min_ratio) * share)


class Optimizer:
    """AdamW that does not decay vectors, with fp32 masters for parameters of a lower precision."""

    def __init__(
        self, modules: Iterable[nn.Module], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        moments: torch.dtype = torch.float32,
    ) -> None:
        """A parameter that appears twice (tied) is updated once. moments: bfloat16, or float32 for the dtype of what is
        updated; ValueError for others, and for a quantized parameter that is trained without a master."""
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments = {moments!r}: give torch.float32 or torch.bfloat16")
        self._narrow = moments is torch.bfloat16
        trainable = (p for module in modules for p in module.parameters() if p.requires_grad)
        self.parameters: list[nn.Parameter] = list(dict.fromkeys(trainable))
        self._masters: list[Tensor] = list(self.parameters)
        for index, parameter in enumerate(self.parameters):
            if (part := quantized_part(parameter)) is not None:
                if part.master is None:
                    raise ValueError(untrained(f"a parameter of shape {tuple(parameter.shape)}", part))
                self._masters[index] = placed_as(parameter, part.master)
                if not isinstance(parameter, DTensor):
                    parameter.grad_dtype = torch.float32
            elif parameter.dtype in (torch.bfloat16, torch.float16):
                self._masters[index] = parameter.detach().float()
                if not isinstance(parameter, DTensor):  # FSDP2 hands out reduced gradients in the parameter's own dtype
                    parameter.grad_dtype = torch.float32
        matrices = [m for m in self._masters if m.dim() >= 2]
        vectors = [m for m in self._masters if m.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        for master in self._masters:  # what AdamW would make at its first step
            state = self._adamw.state[master]
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state |= {name: torch.zeros_like(master, dtype=moments if self._narrow else None) for name in MOMENTS}

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor | None = None) -> None:
        """Update the parameters from their gradients at learning rate `lr`.

        grad_norm: a scalar on their device. Where it is infinite or NaN nothing changes; the host need not know.
        """
        self._follow()
        skip = None if grad_norm is None else (~grad_norm.isfinite()).float()
        self._adamw.found_inf = skip  # type: ignore[attr-defined]  # which torch.amp tells it as well
        for group in self._adamw.param_groups:
            group["lr"] = lr
        pairs = [(p, m) for p, m in zip(self.parameters, self._masters) if p is not m]
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        if self._narrow:
            self._step_one_by_one(skip)
        else:
            self._adamw.step()
        for _, master in pairs:
            master.grad = None
        self.round_parameters()

    def _step_one_by_one(self, skip: Tensor | None) -> None:
        """As AdamW's, with wide moments of one parameter at a time. skip: as its `found_inf`."""
        for group in self._adamw.param_groups:
            (beta1, beta2), same = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
            for master in (each for each in group["params"] if each.grad is not None):
                state = self._adamw.state[master]
                kept = [local(state[name]) for name in MOMENTS]
                wide = [moment.to(master.dtype) for moment in kept]
                own, grad, first, second = local(master.detach()), local(master.grad), *wide
                adamw([own], [grad], [first], [second], [], [state["step"]], fused=True, amsgrad=False, maximize=False,
                      beta1=beta1, beta2=beta2, found_inf=skip, **same)
                torch._foreach_copy_(kept, wide)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What a checkpoint holds of each parameter, sharing memory: "master", its values in at least float32, which is
        the parameter itself where that is no narrower, and AdamW's "step", "exp_avg" and "exp_avg_sq".

        After loading into these call `round_parameters`.
        """
        self._follow()
        return {parameter: {"master": master, **self._adamw.state[master]}
                for parameter, master in zip(self.parameters, self._masters)}

    @torch.no_grad()
    def round_parameters(self) -> None:
        """Give the parameters the values of their masters. Collective, as `requantize` is, over the ranks that share a
        quantized matrix."""
        for parameter, master in zip(self.parameters, self._masters):
            if parameter is not master and quantized_part(parameter) is None:
                parameter.copy_(master)
        requantize(self.parameters)

    def _follow(self) -> None:
        """Update the masters that quantized parameters have now: FSDP2 pads shards, into other memory, at its first
        forward."""
        for parameter, master in zip(self.parameters, self._masters):
            if (part := quantized_part(parameter)) is not None and isinstance(master, DTensor):
                master._local_tensor = cast(Tensor, part.master)
