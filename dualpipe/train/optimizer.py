"""AdamW over a rank's parameters, and the learning rate as a function of the step.

bf16: parameters are bf16, their `.grad` is fp32 (torch's `grad_dtype`), and the optimizer updates fp32 masters that are
rounded into the parameters after each step. Small updates are not lost that way, and nothing computes under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
        self, modules: Iterable[nn.Module], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """A parameter that appears twice (tied) is updated once."""
        trainable = (p for module in modules for p in module.parameters() if p.requires_grad)
        self.parameters: list[nn.Parameter] = list(dict.fromkeys(trainable))
        self._masters: list[Tensor] = list(self.parameters)
        for index, parameter in enumerate(self.parameters):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                self._masters[index] = parameter.detach().float()
                if not isinstance(parameter, DTensor):  # FSDP2 hands out reduced gradients in the parameter's own dtype
                    parameter.grad_dtype = torch.float32
        matrices = [m for m in self._masters if m.dim() >= 2]
        vectors = [m for m in self._masters if m.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor | None = None) -> None:
        """Update the parameters from their gradients at learning rate `lr`.

        grad_norm: a scalar on their device. Where it is infinite or NaN nothing changes; the host need not know.
        """
        skip = None if grad_norm is None else (~grad_norm.isfinite()).float()
        self._adamw.found_inf = skip  # type: ignore[attr-defined]  # which torch.amp tells it as well
        for group in self._adamw.param_groups:
            group["lr"] = lr
        pairs = [(p, m) for p, m in zip(self.parameters, self._masters) if p is not m]
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self._adamw.step()
        for _, master in pairs:
            master.grad = None
        self.round_parameters()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What a checkpoint holds of each parameter, sharing memory: "master", its values in at least float32, which is
        the parameter itself where that is no narrower, and AdamW's "step", "exp_avg" and "exp_avg_sq".

        What AdamW would make at its first step is made here. After loading into these call `round_parameters`.
        """
        found = {}
        for parameter, master in zip(self.parameters, self._masters):
            state = self._adamw.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            found[parameter] = {"master": master, **state}
        return found

    @torch.no_grad()
    def round_parameters(self) -> None:
        """Give the parameters the values of their masters."""
        for parameter, master in zip(self.parameters, self._masters):
            if parameter is not master:
                parameter.copy_(master)
