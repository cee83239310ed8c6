"""AdamW over a rank's parameters, or Muon, or one that a user brings.

bf16: parameters are bf16, their `.grad` is fp32 (torch's `grad_dtype`), and the optimizer updates fp32 masters that are
rounded into the parameters after each step. Small updates are not lost that way, and nothing computes under autocast.
Quantized parameters bring their masters along, and are quantized anew from them.

Moments in bf16, as DeepSeek-V3 keeps them (arXiv:2412.19437, section 3.3.3), take 4 bytes of a parameter less. They are
widened, updated as ever and rounded to the nearest. Where 1 - beta is above 2^-8, half the largest step of bf16, a
gradient of zero still makes them smaller; with a beta of 0.999 they would never decay.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from dualpipe.checkpoint.optimizer_state import ParameterState
from dualpipe.nn.deferral import local
from dualpipe.nn.init import local_part
from dualpipe.quantized import requantize
from dualpipe.quantized.quantize_model import placed_as, quantized_part, untrained
from dualpipe.train.config.schema import ALGORITHMS
from dualpipe.train.optim.groups import Group, parameter_places, update_of
from dualpipe.train.optim.muon import Muon

MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch calls them


class Optimizer:
    """AdamW that decays matrices alone, or Muon, or another; with fp32 masters for parameters of a lower precision."""

    def __init__(
        self, modules: Iterable[nn.Module], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        moments: torch.dtype = torch.float32, name: str = "adamw", options: Mapping[str, Any] | None = None,
        groups: Sequence[Group] = (), masters: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """A parameter that appears twice (tied) is updated once. moments: bfloat16, or float32 for the dtype of what is
        updated.

        name: "adamw"; "muon", for what `takes_muon` says, and AdamW for the rest; or the path to import a class of
            another `torch.optim.Optimizer` by, such as torch.optim.NAdam, for which the host waits for the norm.
        options: of Muon, or of that class, besides rate and decay. groups: for parameters by name; where several match,
            the last that says something holds.
        masters: float32 values of parameters in half precision, which become theirs; others are made from the
            parameters.

        Raises ValueError for other moments, for a quantized parameter that is trained without a master, and for a class
        that there is not, or that does not take its options.
        """
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments = {moments!r}: give torch.float32 or torch.bfloat16")
        self._narrow = moments is torch.bfloat16
        places = parameter_places(modules)
        self.parameters: list[nn.Parameter] = list(places)
        self._masters: dict[nn.Parameter, Tensor] = {
            parameter: _master_of(parameter, (masters or {}).get(parameter)) for parameter in places}
        found: dict[str, dict[tuple[float, float], list[Tensor]]] = {}  # by algorithm, then share of the rate and decay
        for (place, owner), master in zip(places.values(), self._masters.values()):
            update = update_of(place, owner, master, optimizer=name, lr=lr, weight_decay=weight_decay, groups=groups)
            of_algorithm = found.setdefault(update.algorithm, {})
            of_algorithm.setdefault((update.lr_share, update.weight_decay), []).append(master)

        def made(algorithm: str, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
            given = options or {}
            if algorithm == "adamw":
                return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, fused=True)
            if algorithm == "muon":
                return Muon(params, lr=lr, moments=moments if self._narrow else None, **given)
            return _imported(algorithm, params, {"lr": lr, **given})

        self._inner = {
            algorithm: made(algorithm, [{"params": params, "weight_decay": decay, "share": share}
                                        for (share, decay), params in each.items()])
            for algorithm, each in found.items()}
        self._groups = {master: (algorithm, group) for algorithm, inner in self._inner.items()
                        for group in inner.param_groups for master in group["params"]}
        for master in (each for each, (algorithm, _) in self._groups.items() if algorithm == "adamw"):
            state = self._inner["adamw"].state[master]  # what AdamW would make at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state |= {name: torch.zeros_like(master, dtype=moments if self._narrow else None) for name in MOMENTS}

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor | None = None) -> None:
        """Update the parameters from their gradients at learning rate `lr`. Collective, as Muon's is, over the ranks
        that share matrices.

        grad_norm: a scalar on their device. Where it is infinite or NaN nothing changes; the host need not know.
        """
        self._follow()
        skip = None if grad_norm is None else (~grad_norm.isfinite()).float()
        if skip is not None and self._inner.keys() - {*ALGORITHMS}:
            if skip.item():
                return
            skip = None  # which only fused optimizers of torch's take
        pairs = [(p, m) for p, m in self._masters.items() if p is not m]
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        for algorithm, inner in self._inner.items():
            inner.found_inf = skip  # type: ignore[attr-defined]  # which torch.amp tells it as well
            for group in inner.param_groups:
                group["lr"] = lr * group["share"]
            if algorithm == "adamw" and self._narrow:
                self._step_one_by_one(inner, skip)
            else:
                inner.step()
        for _, master in pairs:
            master.grad = None
        self.round_parameters()

    def _step_one_by_one(self, inner: torch.optim.Optimizer, skip: Tensor | None) -> None:
        """As AdamW's, with wide moments of one parameter at a time. skip: as its `found_inf`."""
        for group in inner.param_groups:
            (beta1, beta2), same = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
            for master in (each for each in group["params"] if each.grad is not None):
                state = inner.state[master]
                kept = [local(state[name]) for name in MOMENTS]
                wide = [moment.to(master.dtype) for moment in kept]
                own, grad, first, second = local(master.detach()), local(master.grad), *wide
                adamw([own], [grad], [first], [second], [], [state["step"]], fused=True, amsgrad=False, maximize=False,
                      beta1=beta1, beta2=beta2, found_inf=skip, **same)
                torch._foreach_copy_(kept, wide)

    @torch.no_grad()
    def scale_rows(self, rows: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Multiply the rows of parameters by numbers, (rows,) each of the whole parameter. Collective as
        `round_parameters` is."""
        scaled = dict(rows)
        for parameter, factors in scaled.items():
            _, (own, *rest) = local_part(parameter)
            master = local(self._masters[parameter].detach())
            master.mul_(factors[own].to(master.dtype).view(-1, *[1] * len(rest)))
        self.round_parameters(scaled)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[nn.Parameter, dict[str, Tensor | ParameterState]]:
        """What a checkpoint holds of each parameter, sharing memory: "master", its values in at least float32, which is
        the parameter itself where that is no narrower, and AdamW's "step", "exp_avg" and "exp_avg_sq", or Muon's
        "momentum_buffer". What a user's optimizer keeps is one `ParameterState`, by the key "".

        After loading into these call `round_parameters`.
        """
        self._follow()
        configured = {algorithm: {"lr", "share", "weight_decay", *inspect.signature(type(inner)).parameters}
                      for algorithm, inner in self._inner.items() if algorithm not in ALGORITHMS}  # by a run
        found: dict[nn.Parameter, dict[str, Tensor | ParameterState]] = {}
        for parameter, master in self._masters.items():
            algorithm, group = self._groups[master]
            inner = self._inner[algorithm]
            kept = inner.state[master] if algorithm in ALGORITHMS else {
                "": ParameterState(inner, group, master, configured[algorithm])}
            found[parameter] = {"master": master, **kept}
        return found

    @torch.no_grad()
    def round_parameters(self, only: Iterable[nn.Parameter] | None = None) -> None:
        """Give the parameters the values of their masters; all of them, or `only` some. Collective, as `requantize` is,
        over the ranks that share a quantized matrix."""
        wanted = self.parameters if only is None else list(only)
        for parameter in wanted:
            master = self._masters[parameter]
            if parameter is not master and quantized_part(parameter) is None:
                parameter.copy_(master)
        requantize(wanted)

    def _follow(self) -> None:
        """Update the masters that quantized parameters have now: FSDP2 pads shards, into other memory, at its first
        forward."""
        for parameter, master in self._masters.items():
            if (part := quantized_part(parameter)) is not None and isinstance(master, DTensor):
                master._local_tensor = cast(Tensor, part.master)


def _master_of(parameter: nn.Parameter, values: Tensor | None = None) -> Tensor:
    """What is updated of a parameter, in at least float32; its gradient is in float32. values: those of the master."""
    if (part := quantized_part(parameter)) is not None:
        if part.master is None:
            raise ValueError(untrained(f"a parameter of shape {tuple(parameter.shape)}", part))
        master: Tensor = placed_as(parameter, part.master)
    elif parameter.dtype in (torch.bfloat16, torch.float16):
        assert values is None or values.dtype is torch.float32, f"a master in {values.dtype} would lose small updates"
        master = parameter.detach().float() if values is None else values
    else:
        return parameter
    if not isinstance(parameter, DTensor):  # FSDP2 hands out reduced gradients in the parameter's own dtype
        parameter.grad_dtype = torch.float32
    return master


def _imported(path: str, params: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of a user's class."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
        if not issubclass(kind, torch.optim.Optimizer):
            raise TypeError(f"{path} is no torch.optim.Optimizer")
        made = kind(params, **options)
        if "weight_decay" not in made.defaults and any(group["weight_decay"] for group in params):
            raise ValueError("it has no weight_decay: set optimizer.weight_decay = 0")
        return made
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"optimizer.name = {path!r}: {error}; give adamw, muon, or the path to import a class of "
                         f"torch.optim.Optimizer by, and optimizer.options that it takes besides {dict(options)}"
                         ) from error
