"""The optimizer of a rank's parameters: AdamW, Muon or a custom class, with fp32 masters.

Parameters in bf16 have gradients in fp32 (torch's `grad_dtype`), and fp32 masters that the optimizer updates and rounds
into the parameters after each step. No small update is lost that way, and no operator runs under autocast. Quantized
parameters bring their own masters and are quantized from them.

Moments in bf16, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.3), save 4 bytes per parameter. They are converted to
fp32, updated, and rounded to nearest. If 1 - beta is above 2^-8, half the largest step of bf16, a gradient of zero
still decays them; with a beta of 0.999 they would never decay.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from dualpipe.checkpoint.optimizer_state import ParameterState
from dualpipe.models import HubConfig
from dualpipe.models.decoder import Attention
from dualpipe.nn.accumulators import copy_to_master, drop, local
from dualpipe.nn.init import local_part
from dualpipe.parallel.precision.dtype_plan import matches
from dualpipe.quantized import requantize
from dualpipe.quantized.quantize_model import distribute_like, missing_master_message, quantized_part
from dualpipe.runtime.errors import nearest
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import ALGORITHMS, NO_ADAPTERS, LoRAConfig, OptimizerConfig, OptimizerGroup
from dualpipe.train.optim.groups import UpdateRule, choose_update, find_trainable_parameters, layer_decay_groups
from dualpipe.train.optim.muon import Muon
from dualpipe.train.optim.offload import HostMoments

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names


class Optimizer:
    """AdamW, Muon or a custom optimizer over the parameters of modules. Decays matrices only.

    Attributes:
        parameters: the trainable parameters; a tied one appears once.

    Args:
        modules: the modules.
        lr: peak learning rate, which the learning rates of groups are relative to.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of matrices.
        moments: torch.bfloat16, or torch.float32 for the dtype of the masters.
        offload: keep the moments of AdamW in pinned host memory.
        name: "adamw"; "muon", for matrices that `is_hidden_matrix` selects, with AdamW for the rest; or the import path
            of a subclass of `torch.optim.Optimizer`, such as torch.optim.NAdam. For a custom class the host waits for
            the gradient norm.
        options: arguments of Muon or of the custom class, besides learning rate and weight decay.
        groups: exceptions by name. Of several matching groups that set a field, the last one wins.
        masters: fp32 values of parameters in half precision, which become their masters. Others get masters with the
            values of the parameters.

    Raises:
        ValueError: `moments` is another dtype, a quantized parameter has no master, the custom class cannot be imported
            or does not take its options, a group selects Muon for a parameter that is not a matrix, or moments are to
            be in host memory and another algorithm than AdamW updates a parameter.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        moments: torch.dtype = torch.float32, offload: bool = False, name: str = "adamw",
        options: Mapping[str, Any] | None = None, groups: Sequence[OptimizerGroup] = (),
        masters: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments = {moments!r}: give torch.float32 or torch.bfloat16")
        self._moment_dtype = torch.bfloat16 if moments is torch.bfloat16 else None  # None: that of the master
        named_parameters = find_trainable_parameters(modules)
        self.parameters: list[nn.Parameter] = list(named_parameters)
        self._masters: dict[nn.Parameter, Tensor] = {
            parameter: _make_master(parameter, (masters or {}).get(parameter)) for parameter in named_parameters}
        masters_by_rule: dict[UpdateRule, list[Tensor]] = {}
        for (parameter_name, owner), master in zip(named_parameters.values(), self._masters.values()):
            rule = choose_update(
                parameter_name, owner, master, optimizer=name, lr=lr, weight_decay=weight_decay, groups=groups)
            masters_by_rule.setdefault(rule, []).append(master)
        algorithms = list(dict.fromkeys(rule.algorithm for rule in masters_by_rule))  # without repetitions, in order
        if offload and set(algorithms) - {"adamw"}:
            raise ValueError(f"moments on the host: got parameters for {', '.join(sorted(algorithms))}, but only the "
                             "moments of adamw can be there; give all parameters to adamw, or keep them on the device")

        def build(algorithm: str) -> torch.optim.Optimizer:
            params = [{"params": group_masters, "weight_decay": rule.weight_decay, "lr_factor": rule.lr_factor}
                      for rule, group_masters in masters_by_rule.items() if rule.algorithm == algorithm]
            if algorithm == "adamw":
                return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, fused=True)
            if algorithm == "muon":
                return Muon(params, lr=lr, moments=self._moment_dtype, **(options or {}))
            return _build_custom(algorithm, params, {"lr": lr, **(options or {})})

        self._inner = {algorithm: build(algorithm) for algorithm in algorithms}
        self._groups = {master: (algorithm, group) for algorithm, inner in self._inner.items()
                        for group in inner.param_groups for master in group["params"]}
        self._host_moments: HostMoments | None = None  # None: the moments are on the device
        if offload:
            self._host_moments = HostMoments(self._groups, dtype=self._moment_dtype, num_moments=len(MOMENTS))
        self._init_adamw_state()

    def _init_adamw_state(self) -> None:
        """Make the state that AdamW would make at its first step, so that a checkpoint can be loaded before it."""
        on_host = {} if self._host_moments is None else dict(self._host_moments.moments())
        for master, (algorithm, _) in self._groups.items():
            if algorithm != "adamw":
                continue
            state = self._inner["adamw"].state[master]
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            moments = on_host.get(master) or [torch.zeros_like(master, dtype=self._moment_dtype) for _ in MOMENTS]
            state.update(zip(MOMENTS, moments))

    @torch.no_grad()
    def step(self, lr: float, grad_norm: Tensor | None = None) -> None:
        """Update the parameters from their gradients. Collective, as Muon's step is, over ranks that share matrices.

        Args:
            lr: learning rate, before the factors of groups.
            grad_norm: a scalar on the parameters' device. If it is infinite or NaN, nothing changes. The host does not
                wait for it, except for a custom optimizer.
        """
        self._refresh_masters()
        found_inf = None if grad_norm is None else (~grad_norm.isfinite()).float()
        if found_inf is not None and self._inner.keys() - {*ALGORITHMS}:
            if found_inf.item():
                return
            found_inf = None  # only torch's fused optimizers take it
        pairs = [(parameter, master) for parameter, master in self._masters.items() if parameter is not master]
        for parameter, master in pairs:
            copy_to_master(master, parameter)
        for algorithm, inner in self._inner.items():
            inner.found_inf = found_inf  # type: ignore[attr-defined]  # set in this way by torch.amp too
            for group in inner.param_groups:
                group["lr"] = lr * group["lr_factor"]
            if algorithm == "adamw" and self._host_moments is not None:
                self._host_moments.update(partial(self._update_adamw, found_inf))
            elif algorithm == "adamw" and self._moment_dtype is not None:
                for master in inner.state:
                    self._update_adamw(found_inf, master, [local(inner.state[master][name]) for name in MOMENTS])
            else:
                inner.step()
        drop(master for _, master in pairs)
        self.round_parameters()

    def _update_adamw(self, found_inf: Tensor | None, master: Tensor, moments: list[Tensor]) -> None:
        """Run AdamW's step for one parameter, with its moments in the dtype of its master.

        Args:
            found_inf: 1 to change nothing.
            master: of the parameter.
            moments: on the device of the master, in the order of `MOMENTS`; updated in place.
        """
        if master.grad is None:
            return
        algorithm, group = self._groups[master]
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = wide = [moment.to(master.dtype) for moment in moments]
        adamw([local(master.detach())], [local(master.grad)], [exp_avg], [exp_avg_sq], [],
              [self._inner[algorithm].state[master]["step"]], fused=True, amsgrad=False, maximize=False, beta1=beta1,
              beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], found_inf=found_inf)
        if self._moment_dtype is not None:
            torch._foreach_copy_(moments, wide)

    @torch.no_grad()
    def scale_rows(self, factors_by_parameter: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Multiply the rows of parameters by factors. Collective as `round_parameters` is.

        Args:
            factors_by_parameter: parameters, each with (rows,) factors for all rows of the unsharded parameter.
        """
        scaled = dict(factors_by_parameter)
        for parameter, factors in scaled.items():
            _, (rows, *other_dims) = local_part(parameter)
            master = local(self._masters[parameter].detach())
            master.mul_(factors[rows].to(master.dtype).view(-1, *[1] * len(other_dims)))
        self.round_parameters(scaled)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        drop(self.parameters)

    def state_tensors(self) -> dict[nn.Parameter, dict[str, Tensor | ParameterState]]:
        """Return the tensors to save in a checkpoint, by parameter and name, sharing memory.

        "master" has the values in at least fp32; it is the parameter itself if that is no narrower. AdamW adds "step",
        "exp_avg" and "exp_avg_sq", Muon "momentum_buffer". The state of a custom optimizer is one `ParameterState`
        under the key "".

        After loading into the tensors, call `round_parameters`. Moments in host memory are up to date until the next
        step: the host waits for their copies.
        """
        self._refresh_masters()
        if self._host_moments is not None:
            self._host_moments.wait()
        tensors: dict[nn.Parameter, dict[str, Tensor | ParameterState]] = {}
        for parameter, master in self._masters.items():
            algorithm, group = self._groups[master]
            inner = self._inner[algorithm]
            tensors[parameter] = {"master": master}
            if algorithm in ALGORITHMS:
                tensors[parameter] |= inner.state[master]
            else:
                configured = {"lr", "lr_factor", "weight_decay", *inspect.signature(type(inner)).parameters}
                tensors[parameter][""] = ParameterState(inner, group, master, configured)
        return tensors

    @torch.no_grad()
    def round_parameters(self, only: Iterable[nn.Parameter] | None = None) -> None:
        """Round the masters into the parameters.

        Collective, as `requantize` is, over ranks that share a quantized matrix.

        Args:
            only: the parameters to update. None: all.
        """
        parameters = self.parameters if only is None else list(only)
        for parameter in parameters:
            master = self._masters[parameter]
            if parameter is not master and quantized_part(parameter) is None:
                parameter.copy_(master)
        requantize(parameters)

    def _refresh_masters(self) -> None:
        """Point masters of quantized parameters to their current memory: FSDP2 moves shards at its first forward."""
        for parameter, master in self._masters.items():
            quantized = quantized_part(parameter)
            if quantized is not None and isinstance(master, DTensor):
                master._local_tensor = cast(Tensor, quantized.master)


def _make_master(parameter: nn.Parameter, values: Tensor | None = None) -> Tensor:
    """Return the tensor that the optimizer updates, in at least fp32, and set the gradient's dtype to fp32.

    Args:
        parameter: returned itself if its dtype is wide enough.
        values: fp32 values of a parameter in half precision. None: its own.

    Raises:
        ValueError: a quantized parameter has no master.
    """
    quantized = quantized_part(parameter)
    if quantized is not None:
        if quantized.master is None:
            raise ValueError(missing_master_message(f"a parameter of shape {tuple(parameter.shape)}", quantized))
        master: Tensor = distribute_like(parameter, quantized.master)
    elif parameter.dtype in (torch.bfloat16, torch.float16):
        assert values is None or values.dtype is torch.float32, f"a master in {values.dtype} would lose small updates"
        master = parameter.detach().float() if values is None else values
    else:
        return parameter
    if not isinstance(parameter, DTensor):  # FSDP2 hands out reduced gradients in the parameter's own dtype
        parameter.grad_dtype = torch.float32
    return master


def _build_custom(path: str, params: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the class with the import path `path`. Raises ValueError if that fails."""
    module, _, name = path.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module), name)
        if not issubclass(optimizer_class, torch.optim.Optimizer):
            raise TypeError(f"{path} is not a torch.optim.Optimizer")
        optimizer = optimizer_class(params, **options)
        if "weight_decay" not in optimizer.defaults and any(group["weight_decay"] for group in params):
            raise ValueError("it has no weight_decay: set optimizer.weight_decay = 0")
        return optimizer
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"optimizer.name = {path!r}: {error}; give adamw, muon, or the import path of a subclass of "
                         f"torch.optim.Optimizer, and optimizer.options that it takes besides {dict(options)}"
                         ) from error


def build_optimizer(
    settings: OptimizerConfig, model: TrainedModel, stages: Iterable[nn.Module], *, moments: torch.dtype,
    masters: Mapping[nn.Parameter, Tensor], lora: LoRAConfig = NO_ADAPTERS,
) -> Optimizer:
    """Return the optimizer for the stages of this rank.

    Args:
        settings: the table [optimizer].
        model: the whole model.
        stages: the stages of this rank.
        moments: dtype of the moments.
        masters: as in `Optimizer`.
        lora: adapters of the model.

    Raises:
        ValueError: as `check_optimizer` and `Optimizer` do.
    """
    check_optimizer(settings, model, lora)
    if settings.name in ALGORITHMS:  # a group may select Muon with either
        options = {
            "momentum": settings.momentum, "nesterov": settings.nesterov, "coefficients": settings.coefficients,
        }
    else:
        options = json.loads(settings.options) if settings.options else {}
    groups = list(settings.groups)
    if settings.layer_decay < 1:
        prefix = "" if isinstance(model, HubConfig) else model.name_prefix
        groups = layer_decay_groups(settings.lr, settings.layer_decay, model.num_hidden_layers, prefix) + groups
    return Optimizer(
        stages, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
        moments=moments, offload=settings.offload, name=settings.name, options=options, groups=groups, masters=masters,
    )


def check_optimizer(settings: OptimizerConfig, model: TrainedModel, lora: LoRAConfig = NO_ADAPTERS) -> None:
    """Check the groups of the table [optimizer] on the whole model, whatever stages a rank has.

    Raises:
        ValueError: a group matches no parameter, or selects Muon for one that is not a matrix.
    """
    if not settings.groups:
        return
    whole_model = find_trainable_parameters(stages_on_meta(model, lora=lora))
    names = [name for name, _ in whole_model.values()]
    for group in settings.groups:
        if not any(matches(group.pattern, name) for name in names):
            nearest_names = ", ".join(nearest(group.pattern, names, 3, cutoff=0.0))
            raise ValueError(
                f"optimizer.groups: no trained parameter matches {group.pattern!r}; nearest: {nearest_names}")
    for parameter, (name, owner) in whole_model.items():
        choose_update(name, owner, parameter, optimizer=settings.name, lr=settings.lr,
                      weight_decay=settings.weight_decay, groups=settings.groups)


class QKClip:
    """Scale back the query and key weights of attention heads whose largest logit in a step exceeds a limit.

        factor_h = min(1, limit / largest logit of head h in the step's micro-batches, on all ranks)

    With Muon, logits grow where they do not with AdamW, until the softmax attends to one key only. In contrast to a cap
    on the logits, QK-clip changes no forward pass, and leaves heads below the limit alone (Kimi K2, arXiv:2507.20534,
    section 2.1). Making a QKClip makes the layers record their largest logits, (A,) for A attention heads.

    Args:
        stages: the stages of this rank.
        limit: largest attention logit.
        group: the ranks with the same stages. None: this rank only.
        device: of the stages.

    Raises:
        ValueError: the limit is not positive, or queries and keys are normalized.
    """

    def __init__(
        self, stages: Iterable[nn.Module], limit: float, *, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        if limit <= 0:
            raise ValueError(f"the limit of attention logits must be positive; got {limit}")
        self._layers = [module for stage in stages for module in stage.modules() if isinstance(module, Attention)]
        self._limit = limit
        self._group = group
        for layer in self._layers:
            layer.max_logits_A = torch.full((layer.num_heads,), -torch.inf, dtype=torch.float32, device=device)
            layer.logit_row_scales(layer.max_logits_A)  # raises ValueError for norms

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, grad_norm: Tensor) -> Tensor:
        """Scale weights after a step of the optimizer, and return the largest logit of the step.

        Collective over the group. The host does not wait for the device.

        Args:
            optimizer: owns the weights.
            grad_norm: of the step, a scalar on the device. If it is infinite or NaN, no weight is scaled.

        Returns:
            A scalar on the device.
        """
        if not self._layers:
            return grad_norm.new_full((), -torch.inf)
        recorder = Recorder.current()
        max_logits = torch.cat([layer.max_logits_A for layer in self._layers if layer.max_logits_A is not None])
        if self._group is not None and self._group.size() > 1:
            with recorder.collective("qk_clip", "the largest attention logits", recorder.members(self._group)):
                dist.all_reduce(max_logits, dist.ReduceOp.MAX, group=self._group)
        exceeds = (max_logits > self._limit) & max_logits.isfinite() & grad_norm.isfinite()
        factors = torch.where(exceeds, self._limit / max_logits, 1.0)
        factors_by_layer = factors.split([layer.num_heads for layer in self._layers])
        optimizer.scale_rows(
            parameter_and_factors for layer, factors_A in zip(self._layers, factors_by_layer)
            for parameter_and_factors in layer.logit_row_scales(factors_A))
        self.reset()
        return max_logits.max()

    def reset(self) -> None:
        """Discard the logits recorded since the last step, for example those of a micro-batch that updates nothing."""
        for layer in self._layers:
            if layer.max_logits_A is not None:
                layer.max_logits_A.fill_(-torch.inf)
