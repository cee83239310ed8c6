"""FSDP2 parameters of pipeline stages: gathered once per step, reduced when their stage is complete.

By itself FSDP2 gathers before every forward and reduces in every backward, in a pipeline once for each micro-batch.
Here the units of a stage stay gathered from its first forward to its last weight gradient. Gradients accumulate in
`.grad` of the gathered parameters, in the policy's `reduce_dtype` by torch's `grad_dtype`: autograd, the kernels and
the reduce-scatter share one buffer, and nothing is rounded between micro-batches.

    gather -> wait -> forwards and backwards of all micro-batches -> complete -> finish

Private attributes of FSDP2 are read through `private`, which names the attribute if a torch release has moved it.
Public calls are used if the installed torch has them: `reset_iter_state` from 2.13, `finalize_backward` from 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from dualpipe.nn.accumulators import create_zeros, drop, fold, local, move_to
from dualpipe.parallel.fsdp.private import groups_of, private, state_of
from dualpipe.parallel.fsdp.quantized_gather import PackedGather, attach_all
from dualpipe.parallel.fsdp.unit_records import ParameterPlace as ParameterPlace
from dualpipe.parallel.fsdp.unit_records import (
    casts_inputs_and_outputs,
    frozen_towers,
    keep_hook_on_reduce_stream,
    places_of,
    process_groups,
    units_of,
)
from dualpipe.parallel.fsdp.unit_records import mesh_groups as mesh_groups
from dualpipe.parallel.tied import original_number
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.recorder import RecordedWait, Recorder

_PREPARED = "_dualpipe_version"  # attribute of zeros from `StageParameters.prepare`: torch's count of their changes


class StageParameters:
    """FSDP2 units of a stage, driven through the steps of a pipeline; a stage may have none.

    Raises ValueError for a stage that a pipeline cannot drive: with torch's `replicate`, with several modules in
    one `fully_shard` call but no unit around them, with CPU offload, or with a frozen module whose dtype nothing casts
    to.
    """

    def __init__(self, stage: nn.Module) -> None:
        sharded: list[Any] = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        self._stage = stage
        self._units = units_of(stage)
        inside = {inner for outer in sharded for inner in outer.modules() if inner is not outer}
        self._roots: list[Any] = [module for module in sharded if module not in inside]
        # From torch 2.13 a unit may have several groups of parameters.
        self.several_groups = all(hasattr(state_of(unit), "_fsdp_param_groups") for unit in self._units)
        # Groups of parameters, in the order of a backward.
        self._groups = [group for unit in reversed(self._units) for group in reversed(groups_of(unit))]
        self._is_reduced = False  # the gradients of the current step
        self._gathers: list[Any] = []  # handles of gathers in flight
        # Trained parameters that FSDP2 has reduced in the current step, and True for one without a gradient on this
        # rank, also as a flag on the device.
        self._reduced: list[tuple[Tensor, bool | Tensor]] = []
        self._prepared: list[Tensor] = []  # parameters that `prepare` makes accumulators for
        self._held_hooks: list[tuple[Tensor, Any]] = []  # hooks of reduced parameters, until `run_hooks`
        self._is_checked = False  # `check` was called
        groups = process_groups([stage]) if sharded else ()
        self.ranks = tuple(sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)}))
        """Global numbers of the ranks that the parameters are sharded over; empty for plain parameters."""
        self._check_units()
        self._check_towers()
        for root in self._roots:
            root.set_reshard_after_forward(False)
            if hasattr(root, "set_reduce_scatter_max_input_buffers"):
                # With the default, one buffer, compute waits at each unit until the reduction of the previous one has
                # ended. More buffers cost no memory: each replaces the gradients that were copied into it.
                root.set_reduce_scatter_max_input_buffers(len(self._units))

    def _check_units(self) -> None:
        """Raise ValueError for units that a pipeline cannot drive."""
        for root in self._roots:
            if any(base.__name__ == "ReplicateModule" for base in type(root).__mro__):  # a private class of torch
                raise ValueError("a module was given to torch's replicate, which a pipeline cannot drive; use "
                                 "fully_shard with a mesh of (ranks, 1)")
            if len(private(state_of(root), "_modules")) > 1:
                raise ValueError("fully_shard was given several modules together that are in no larger unit of their "
                                 "stage; call fully_shard on the stage itself as well")
        for group in self._groups:
            if isinstance(private(group, "offload_policy"), CPUOffloadPolicy):
                raise ValueError("FSDP2's CPU offload is not supported under a pipeline, which keeps parameters "
                                 "gathered for a whole step; leave offload_policy out")

    def _check_towers(self) -> None:
        """Raise ValueError for a frozen module in a dtype that no trained parameter has, without casts between them.

        `fully_shard` adds no such casts. `shard` adds them, and disables `cast_forward_inputs`.
        """
        compute_dtypes: dict[nn.Parameter, torch.dtype] = {}
        for fsdp_param in self._fsdp_params():
            policy = private(fsdp_param, "mp_policy")
            if not policy.cast_forward_inputs:
                return
            param = private(fsdp_param, "sharded_param")
            compute_dtypes[param] = policy.param_dtype or param.dtype
        trained = {dtype for param, dtype in compute_dtypes.items() if param.requires_grad}
        for name, tower in frozen_towers(self._stage):
            dtypes = {compute_dtypes.get(p, p.dtype) for p in tower.parameters() if p.is_floating_point()}
            if trained and dtypes and dtypes.isdisjoint(trained) and not casts_inputs_and_outputs(tower):
                frozen_in = " and ".join(sorted(map(short_name, dtypes)))
                trained_in = " and ".join(sorted(map(short_name, trained)))
                raise ValueError(
                    f"{name} ({type(tower).__name__}) is frozen and computes in {frozen_in}, trained modules in "
                    f"{trained_in}, and fully_shard casts nothing between them: cast it first (.to(dtype)), or shard "
                    "the stage by dualpipe.parallel.shard, which adds casts; if the stage's forward casts by itself, "
                    "give fully_shard MixedPrecisionPolicy(..., cast_forward_inputs=False)")

    @property
    def is_sharded(self) -> bool:
        """Return True if FSDP2 shards parameters of the stage."""
        return bool(self._roots)

    def places(self) -> Iterator[ParameterPlace]:
        """Yield the places of the parameters in FSDP2, including those in other stages (`share_parameter`)."""
        for fsdp_param in self._fsdp_params():
            yield from places_of(fsdp_param)

    def originals(self) -> Iterator[tuple[int, ParameterPlace]]:
        """Yield FSDP2's number of the parameter that each trained parameter was made from, with its first place."""
        for fsdp_param in self._fsdp_params():
            number = original_number(fsdp_param)
            if number is not None and private(fsdp_param, "sharded_param").requires_grad:
                yield number, places_of(fsdp_param)[0]

    def borrowers(self, stages: Mapping[int, nn.Module]) -> set[int]:
        """Return the numbers of the other stages that use a parameter of this stage."""
        modules = {module for module, _ in self.places()}.difference(self._stage.modules())
        return {number for number, stage in stages.items() if not modules.isdisjoint(stage.modules())}

    def check(self) -> None:
        """Raise before a step the errors that FSDP2 would raise in it.

        Raises ValueError for a stage sharded too late, and for a parameter that was replaced later: FSDP2 would go on
        with the old one.
        """
        if isinstance(self._stage, FSDPModule) and self._stage not in self._units:
            raise ValueError("a stage was given to fully_shard after the pipeline was built; build the pipeline anew")
        if not self._is_checked:
            self._check_replaced(allowed=(DTensor,))  # in its `_lazy_init` FSDP2 takes other DTensors
            for root in self._roots:
                private(state_of(root), "_lazy_init")()
            self._is_checked = True
        self._check_replaced()

    def _check_replaced(self, allowed: tuple[type, ...] = ()) -> None:
        """Raise ValueError for a parameter that is neither the sharded nor the gathered one of FSDP2's record."""
        for fsdp_param in self._fsdp_params():
            params = (private(fsdp_param, "sharded_param"), getattr(fsdp_param, "_unsharded_param", None))
            for module, name in places_of(fsdp_param):
                current = module._parameters.get(name)
                if all(current is not param for param in params) and not isinstance(current, allowed):
                    raise ValueError(f"the parameter {name} of a {type(module).__name__} was replaced after it was "
                                     "sharded, and the new one would not be trained; copy values into a parameter, or "
                                     "replace it before fully_shard")

    def reshard(self) -> None:
        """Free the parameters that a call of the stage outside of a step has gathered."""
        for unit in self._units:
            unit.reshard()

    def gather(self) -> None:
        """Start to gather all parameters; collective over the data-parallel ranks, like `complete`."""
        for root in self._roots:
            _drive(root, sync=False, by_hand=True)
        self.reshard()  # a unit that is still gathered may be older than the last optimizer step
        self._drop_inference_tensors()
        packed_gathers = (getattr(fsdp_param, "packed_gather", None) for fsdp_param in self._fsdp_params())
        attach_all(gather for gather in packed_gathers if isinstance(gather, PackedGather))
        for unit in self._units:
            keep_hook_on_reduce_stream(unit)
            self._gathers.append(unit.unshard(async_op=True))

    def _drop_inference_tensors(self) -> None:
        """Let FSDP2 make gathered parameters anew if it made them when the stage was called under inference_mode."""
        for fsdp_param in self._fsdp_params():
            param = getattr(fsdp_param, "_unsharded_param", None)
            if param is not None and param.is_inference():
                del fsdp_param._unsharded_param
                private(fsdp_param, "all_gather_outputs").clear()

    def wait(self) -> None:
        """Wait for the gathered parameters; from now on gradients accumulate in `reduce_dtype`."""
        gathers = self._gathers
        self._gathers = []
        for gather in gathers:
            gather.wait()
        if gathers:
            self._cast_accumulators()

    def prepare(self) -> None:
        """Create zero accumulators for parameters whose accumulator has another dtype than the parameter.

        Autograd makes gradients in the parameter's dtype, and so does a deferred weight gradient in the usual form,
        `w.grad = g if w.grad is None else w.grad.add_(g)`. A bfloat16 `g` can be added to a float32 accumulator, but
        torch would refuse it as the new `w.grad`. The layers of `dualpipe.nn` need no zeros: they write the first
        gradient in the accumulator's dtype.
        """
        self._prepared = []
        for module in self._stage.modules():
            if not getattr(type(module), "makes_accumulators", False):  # a lookup on the module itself takes 1 us
                for param in module._parameters.values():  # its own alone; `parameters()` takes 5 times as long
                    if param is None or not param.requires_grad or param.grad_dtype in (None, param.dtype):
                        continue
                    self._prepared.append(param)
                    if param.grad is None:
                        grad = create_zeros(param, param.grad_dtype)
                        setattr(grad, _PREPARED, local(grad)._version)

    def set_idle(self) -> None:
        """Reset the state of all units: FSDP2 would take a forward after a backward for a recomputation."""
        for unit in self._units:
            state = state_of(unit)
            state._training_state = type(private(state, "_training_state")).IDLE

    def complete(self, *, reduce: bool) -> None:
        """Start the reductions of all gradients, if `reduce`, and free the gathered parameters.

        Without `reduce`, gradients stay in their accumulators for a later step to reduce. Every trainable parameter is
        reduced, with zeros if it has no gradient: it may have one on another rank. `drop_unused` drops the zeros, and
        only then `run_hooks` runs the parameters' hooks.
        """
        self.wait()
        self._reduced = []
        if reduce:
            for fsdp_param in self._fsdp_params():
                sharded = private(fsdp_param, "sharded_param")
                if sharded.requires_grad:
                    is_new = sharded.grad is None
                    self._reduced.append((sharded, is_new and _is_unused(fsdp_param)))
                    hooks = sharded._post_accumulate_grad_hooks
                    if hooks:
                        self._held_hooks.append((sharded, hooks))
                        sharded._post_accumulate_grad_hooks = None
            self._cast_accumulators(zeros=True)
            for root in self._roots:
                _drive(root, sync=True, by_hand=True)
            for group in self._groups:
                if private(private(group, "mesh_info"), "mesh").size() == 1:
                    _move_gradients(group)
                private(group, "post_backward")()
        for unit in self._units:
            unit.reshard()
        self._is_reduced = reduce

    def finish(self) -> None:
        """End the step: later work on the device runs after the reductions, and FSDP2 is as before the step.

        Raises RuntimeError if a gradient was lost.
        """
        is_reduced = self._is_reduced
        self._is_reduced = False
        for root in self._roots:
            _drive(root, sync=is_reduced, by_hand=False)
            if hasattr(root, "finalize_backward"):
                root.finalize_backward()
            else:
                private(state_of(root), "_root_post_backward_final_callback")()
            _leave_manual_mode(root)
        self.set_idle()
        if is_reduced:
            self._check_gradients()

    def unused(self) -> list[tuple[Tensor, bool]]:
        """Return parameters of a step that has reduced, with True for one that has no gradient on this rank.

        They are all trained parameters that are sharded, and the others that `prepare` makes accumulators for: the same
        on all data-parallel ranks.
        """
        if not self._reduced and not self._prepared:
            return []
        gathered = {id(param) for param, _ in self._unsharded()}
        plain = {id(param): param for param in self._prepared if id(param) not in gathered}.values()
        found = [*self._reduced, *((param, _is_untouched(param.grad)) for param in plain)]
        return [(param, bool(flag)) for param, flag in found]

    def run_hooks(self, *, run: bool = True) -> None:
        """Give reduced parameters their post-accumulate-grad hooks back, and run those of all that have a gradient."""
        held_hooks = self._held_hooks
        self._held_hooks = []
        for param, hooks in held_hooks:
            param._post_accumulate_grad_hooks = hooks
        for param, hooks in held_hooks if run else ():
            if param.grad is not None:
                for hook in list(hooks.values()):
                    hook(param)

    def _check_gradients(self) -> None:
        """Raise RuntimeError if a trainable parameter has no gradient after the reductions."""
        lost: list[str] = []
        for fsdp_param in self._fsdp_params():
            param = private(fsdp_param, "sharded_param")
            if param.requires_grad and param.grad is None:
                lost.append(private(fsdp_param, "_param_fqn"))
        if lost:
            raise RuntimeError(f"FSDP2 reduced no gradient for {lost}, though every trainable parameter had one")

    def abandon(self) -> None:
        """End a failed step without communication: free the gathered parameters and drop their gradients."""
        self._is_reduced = False
        self._gathers = []
        self._reduced = []
        self.run_hooks(run=False)
        for group in self._groups:
            group._all_gather_result = None  # FSDP2 would wait for it in the next step, and use it there
            # In other states FSDP2 may refuse to reshard.
            group._training_state = type(private(group, "_training_state")).IDLE
        for root in self._roots:
            if hasattr(root, "reset_iter_state"):
                root.reset_iter_state()
            _leave_manual_mode(root)
        for unit in self._units:
            unit.reshard()
        self.set_idle()
        self.discard()

    def discard(self) -> None:
        """Drop gradients that a later step was to reduce."""
        drop(param for param, _ in self._unsharded())
        for fsdp_param in self._fsdp_params():
            if hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed"):  # before torch 2.15, a second accumulator
                fsdp_param.unsharded_accumulated_grad = None

    def _fsdp_params(self) -> Iterator[Any]:
        """Yield FSDP2's records of the parameters, in the order of a backward."""
        for group in self._groups:
            yield from private(group, "fsdp_params")

    def _unsharded(self) -> Iterator[tuple[Tensor, torch.dtype]]:
        """Yield the gathered parameters with the dtype of their accumulators; none before the first gather."""
        for fsdp_param in self._fsdp_params():
            param = getattr(fsdp_param, "_unsharded_param", None)
            if param is not None:
                dtype = getattr(fsdp_param, "unsharded_grad_dtype", None)  # from torch 2.15
                yield param, dtype or private(fsdp_param, "mp_policy").reduce_dtype or param.dtype

    def _cast_accumulators(self, *, zeros: bool = False) -> None:
        """Cast all gradients to `reduce_dtype`, since a reduce-scatter takes one dtype.

        Gradients in other dtypes come from backwards outside of steps, and from code that assigned a gradient in the
        parameter's dtype. Before torch 2.15 FSDP2 may also hold gradients in a second accumulator, which it adds
        itself. zeros: parameters without a gradient get zeros.
        """
        for param, dtype in self._unsharded():
            if not param.requires_grad:
                continue
            fold(param, dtype)
            if zeros and param.grad is None:
                create_zeros(param, dtype)


def _is_unused(fsdp_param: Any) -> bool | Tensor:
    """Return True for a gathered parameter without a gradient; see `_is_untouched`."""
    has_second = hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed")  # before torch 2.15
    if has_second and fsdp_param.unsharded_accumulated_grad is not None:
        return False
    return _is_untouched(private(fsdp_param, "_unsharded_param").grad)


def _is_untouched(grad: Tensor | None) -> bool | Tensor:
    """Return True for no gradient, and for zeros that `StageParameters.prepare` has made and nothing was added to.

    torch counts changes in place. A kernel that writes past torch is seen by its values: the result is then a flag on
    the device.
    """
    if grad is None:
        return True
    values = local(grad)
    return getattr(grad, _PREPARED, None) == values._version and ~values.any()


class ParametersStep:
    """Parameters of one rank's stages during one step.

    borrowers: by stage, the stages that use its parameters. train: the step has backwards. reduce: it reduces gradients
    at the end.

    Collectives run in the order of the rank's program, the same on every data-parallel rank; stages that are not
    sharded have none. A step ends with `finish`, or after an error with `abandon`.
    """

    def __init__(
        self, stages: Mapping[int, StageParameters], borrowers: Mapping[int, set[int]], *, train: bool, reduce: bool
    ) -> None:
        self._stages = stages
        self._sharded = {stage: parameters for stage, parameters in stages.items() if parameters.is_sharded}
        self._borrowers = borrowers
        self._train = train
        self._reduce = reduce
        self._waiting = set(self._sharded).union(*borrowers.values())  # stages for which `wait` is still to be called
        self._open = set(self._sharded)  # sharded stages that are not complete
        self._in_use = set(stages)  # stages with further actions in this step
        self._recorder = Recorder.current()

    def gather(self) -> None:
        """Start to gather all sharded stages, and prepare the accumulators of the others."""
        for stage, parameters in self._stages.items():
            if stage in self._sharded:
                with self._collective("gather", stage):
                    parameters.gather()
            elif self._train and stage not in self._waiting:
                parameters.prepare()

    def must_wait(self, stage: int) -> bool:
        """Return True if `wait` must be called before each forward of this stage. Ask before the first `wait`.

        The stage is sharded, or uses a parameter of a sharded stage, whose accumulator exists once it is gathered.
        """
        return stage in self._waiting

    def wait(self, stage: int) -> None:
        """Wait for the parameters of a stage before it runs a forward."""
        parameters = self._stages[stage]
        if stage in self._waiting:
            self._waiting.remove(stage)
            if stage in self._sharded:
                with self._collective("gather", stage):
                    parameters.wait()
            if self._train:
                parameters.prepare()
        if not parameters.several_groups:  # until torch 2.12
            parameters.set_idle()  # otherwise FSDP2 would take the forward for a recompute, and not cast its inputs

    def complete(self, stages: Iterable[int]) -> None:
        """Reduce or keep the gradients of stages without further actions in this step, and free their parameters.

        Parameters that another stage uses too stay gathered until that stage is complete.
        """
        self._in_use.difference_update(stages)
        complete = [stage for stage in self._open if self._in_use.isdisjoint({stage, *self._borrowers[stage]})]
        for stage in complete:
            self._open.remove(stage)
            with self._collective("reduce", stage):
                self._sharded[stage].complete(reduce=self._reduce)

    def finish(self) -> None:
        """End the step: later work on the device runs after its reductions."""
        for stage, parameters in self._sharded.items():
            with self._collective("reduce", stage):
                parameters.finish()

    def unused(self) -> dict[Tensor, bool]:
        """Return parameters that the step has reduced, with True for one without a gradient on this rank.

        The same parameters on all data-parallel ranks.
        """
        stages = self._stages.values() if self._reduce else ()
        return {param: is_unused for parameters in stages for param, is_unused in parameters.unused()}

    def drop_unused(self, unused: Mapping[Tensor, bool], agree: Callable[[list[bool]], list[bool]]) -> None:
        """Set the gradients of this step to None for parameters that have none on any data-parallel rank.

        Without it they would be zero if they are sharded, and an optimizer would let the parameters decay.

        unused: as `unused` returns them. agree: returns the flags that all data-parallel ranks have set.
        """
        is_unused_everywhere = agree([*unused.values()])
        drop(param for param, is_unused in zip(unused, is_unused_everywhere, strict=True) if is_unused)

    def run_hooks(self) -> None:
        """Run the post-accumulate-grad hooks of all sharded parameters that have a gradient."""
        for parameters in self._sharded.values():
            parameters.run_hooks()

    def abandon(self) -> None:
        """End a failed step without communication; never raises.

        FSDP2 returns to its state before the step, so that a pipeline without other ranks can be used again.
        """
        for parameters in self._sharded.values():
            with suppress(Exception):  # the error that ended the step is reported instead
                parameters.abandon()

    def _collective(self, kind: str, stage: int) -> RecordedWait:
        title = f"the {'parameters' if kind == 'gather' else 'gradients'} of stage {stage}"
        return self._recorder.collective(kind, title, self._sharded[stage].ranks)


def _move_gradients(group: Any) -> None:
    """Turn accumulators into reduced gradients without a copy, for a parameter group sharded over one rank.

    Experts without data-parallel ranks have such groups. FSDP2 would copy the accumulators into memory of another
    stream, and both would be kept: 4 bytes per parameter. Gradients that need more than a move are left to FSDP2: with
    another dtype, a gradient to add to, or a divisor.
    """
    for fsdp_param in private(group, "fsdp_params"):
        param = private(fsdp_param, "_unsharded_param")
        sharded = private(fsdp_param, "sharded_param")
        grad = param.grad
        if (grad is None or grad.dtype is not sharded.dtype or sharded.grad is not None
                or private(group, "gradient_divide_factor") is not None):
            continue
        move_to(sharded, param, partial(_reduce_over_one_rank, group, fsdp_param))


def _reduce_over_one_rank(group: Any, fsdp_param: Any, local_grad: Tensor) -> Tensor:
    """Return the gradient of a sharded parameter from the local accumulator of the gathered one."""
    reduced = local_grad.contiguous()
    hook = private(group, "_all_reduce_hook")
    if hook is not None:
        hook(reduced.view(-1))
    sharded: Tensor = private(fsdp_param, "to_sharded_dtensor")(reduced)
    return sharded


def _drive(root: FSDPModule, *, sync: bool, by_hand: bool) -> None:
    """Configure the backward of the units of `root`.

    sync: reduce the gradients. by_hand: do not reshard and do not run FSDP2's final callback.
    """
    root.set_requires_gradient_sync(sync)
    root.set_reshard_after_backward(not by_hand)
    context = private(state_of(root), "_state_ctx")
    private(context, "post_backward_final_callback_queued")  # raises if a torch release has moved it
    # Marked as queued, so that autograd does not run the callback after each backward, which takes 200 us.
    context.post_backward_final_callback_queued = by_hand
    if by_hand and hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(True)


def _leave_manual_mode(root: FSDPModule) -> None:
    """Let the units of `root` reduce in their backwards, as outside of a step."""
    if hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(False)
    _drive(root, sync=True, by_hand=False)
