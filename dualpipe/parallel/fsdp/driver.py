"""FSDP2 parameters of pipeline stages: gathered once per step, reduced when their stage is complete.

By itself FSDP2 gathers before every forward and reduces in every backward, in a pipeline once for each micro-batch.
Here the units of a stage stay gathered from its first forward to its last weight gradient. Gradients accumulate in
`.grad` of the gathered parameters, in the policy's `reduce_dtype` by torch's `grad_dtype`: autograd, the kernels and
the reduce-scatter share one buffer, and nothing is rounded between micro-batches.

    gather -> wait -> forwards and backwards of all micro-batches -> complete -> finish

All writes to gradients are in `dualpipe.nn.accumulators`; what differs between torch releases is in
`dualpipe.parallel.fsdp.private`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dualpipe.nn.accumulators import create_zeros, drop, fold, local, move_to
from dualpipe.parallel.fsdp.private import (
    finalize_backward,
    forget_gathered,
    forget_gathers,
    gathered,
    private,
    second_accumulator,
    set_final_callback,
    set_manual_mode,
    start_reduce_scatter,
)
from dualpipe.parallel.fsdp.quantized_gather import PackedGather, attach_all
from dualpipe.parallel.fsdp.stage_parameters import StageParameters, modules_of
from dualpipe.parallel.fsdp.unit_records import keep_hook_on_reduce_stream
from dualpipe.runtime.recorder import RecordedWait, Recorder

_PREPARED = "_dualpipe_version"  # attribute of zeros from `StageStep.prepare`: torch's count of their changes


class StageStep:
    """Parameters of one stage during one step: gathered, used, and reduced or kept for a later step.

    A step that has failed ends with `abandon` instead of `complete` and `finish`.
    """

    def __init__(self, parameters: StageParameters) -> None:
        self._parameters = parameters
        self._is_reduced = False
        self._gathers: list[Any] = []  # handles of gathers in flight
        # Trained parameters that FSDP2 has reduced, and True for one without a gradient on this rank, also as a flag on
        # the device.
        self._reduced: list[tuple[Tensor, bool | Tensor]] = []
        self._prepared: list[Tensor] = []  # parameters that `prepare` makes accumulators for
        self._held_hooks: list[tuple[Tensor, Any]] = []  # hooks of reduced parameters, until `run_hooks`

    def gather(self) -> None:
        """Start to gather all parameters; collective over the data-parallel ranks, like `complete`."""
        for root in self._parameters.roots:
            _drive(root, sync=False, by_hand=True)
        self._parameters.reshard()  # a unit that is still gathered may be older than the last optimizer step
        self._drop_inference_tensors()
        packed_gathers = (getattr(fsdp_param, "packed_gather", None) for fsdp_param in self._parameters.fsdp_params())
        attach_all(gather for gather in packed_gathers if isinstance(gather, PackedGather))
        for unit in self._parameters.units:
            keep_hook_on_reduce_stream(unit)
            self._gathers.append(unit.unshard(async_op=True))

    def _drop_inference_tensors(self) -> None:
        """Let FSDP2 make gathered parameters anew if it made them when the stage was called under inference_mode."""
        for fsdp_param in self._parameters.fsdp_params():
            param = gathered(fsdp_param)
            if param is not None and param.is_inference():
                forget_gathered(fsdp_param)

    def wait(self) -> None:
        """Wait for the gathered parameters; from now on gradients accumulate in `reduce_dtype`."""
        gathers = self._gathers
        self._gathers = []
        for gather in gathers:
            gather.wait()
        if gathers:
            self._fold_gradients()

    def prepare(self) -> None:
        """Create zero accumulators for parameters whose accumulator has another dtype than the parameter.

        Autograd makes gradients in the parameter's dtype, and so does a deferred weight gradient in the usual form,
        `w.grad = g if w.grad is None else w.grad.add_(g)`. A bfloat16 `g` can be added to a float32 accumulator, but
        torch would refuse it as the new `w.grad`. The layers of `dualpipe.nn` need no zeros: they write the first
        gradient in the accumulator's dtype.
        """
        for param in parameters_without_accumulators(self._parameters.stage):
            if not param.requires_grad or param.grad_dtype in (None, param.dtype):
                continue
            self._prepared.append(param)
            if param.grad is None:
                grad = create_zeros(param, param.grad_dtype)
                setattr(grad, _PREPARED, local(grad)._version)

    def complete(self, *, reduce: bool) -> None:
        """Start the reductions of all gradients, if `reduce`, and free the gathered parameters.

        Without `reduce`, gradients stay in their accumulators for a later step to reduce. Every trainable parameter is
        reduced, with zeros if it has no gradient: it may have one on another rank. `drop_unused` drops the zeros, and
        only then `run_hooks` runs the parameters' hooks.
        """
        self.wait()
        if reduce:
            for fsdp_param in self._parameters.fsdp_params():
                sharded = private(fsdp_param, "sharded_param")
                if sharded.requires_grad:
                    is_new = sharded.grad is None
                    self._reduced.append((sharded, is_new and _is_unused(fsdp_param)))
                    hooks = sharded._post_accumulate_grad_hooks
                    if hooks:
                        self._held_hooks.append((sharded, hooks))
                        sharded._post_accumulate_grad_hooks = None
            self._fold_gradients(zeros=True)
            for root in self._parameters.roots:
                _drive(root, sync=True, by_hand=True)
            for group in self._parameters.groups:
                if private(private(group, "mesh_info"), "mesh").size() == 1:
                    _move_gradients(group)
                start_reduce_scatter(group)
        self._parameters.reshard()
        self._is_reduced = reduce

    def _fold_gradients(self, *, zeros: bool = False) -> None:
        """Make `reduce_dtype` the dtype of all accumulators. zeros: parameters without a gradient get zeros.

        Before torch 2.15 FSDP2 may also hold gradients in a second accumulator, which it adds itself.
        """
        for param, dtype in self._parameters.unsharded():
            if not param.requires_grad:
                continue
            fold(param, dtype)
            if zeros and param.grad is None:
                create_zeros(param, dtype)

    def finish(self) -> None:
        """End the step: later work on the device runs after the reductions, and FSDP2 is as before the step.

        Raises RuntimeError if a gradient was lost.
        """
        for root in self._parameters.roots:
            _drive(root, sync=self._is_reduced, by_hand=False)
            finalize_backward(root)
            _leave_manual_mode(root)
        self._parameters.set_idle()
        if self._is_reduced:
            self._check_gradients()

    def unused(self) -> list[tuple[Tensor, bool]]:
        """Return parameters of a step that has reduced, with True for one that has no gradient on this rank.

        They are all trained parameters that are sharded, and the others that `prepare` makes accumulators for: the same
        on all data-parallel ranks.
        """
        if not self._reduced and not self._prepared:
            return []
        gathered = {id(param) for param, _ in self._parameters.unsharded()}
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
        for fsdp_param in self._parameters.fsdp_params():
            param = private(fsdp_param, "sharded_param")
            if param.requires_grad and param.grad is None:
                lost.append(private(fsdp_param, "_param_fqn"))
        if lost:
            raise RuntimeError(f"FSDP2 reduced no gradient for {lost}, though every trainable parameter had one")

    def abandon(self) -> None:
        """End a failed step without communication: free the gathered parameters and drop their gradients."""
        self.run_hooks(run=False)
        for root in self._parameters.roots:
            forget_gathers(root, self._parameters.groups)
            _leave_manual_mode(root)
        self._parameters.reshard()
        self._parameters.set_idle()
        self._parameters.discard()


def parameters_without_accumulators(stage: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of modules that do not create their accumulators themselves: see `StageStep.prepare`."""
    for module in modules_of(stage):
        if not getattr(type(module), "makes_accumulators", False):  # a lookup on the module itself takes 1 us
            for param in module._parameters.values():  # its own alone; `parameters()` takes 5 times as long
                if param is not None:
                    yield param


def _is_unused(fsdp_param: Any) -> bool | Tensor:
    """Return True for a gathered parameter without a gradient; see `_is_untouched`."""
    if second_accumulator(fsdp_param) is not None:
        return False
    return _is_untouched(private(fsdp_param, "_unsharded_param").grad)


def _is_untouched(grad: Tensor | None) -> bool | Tensor:
    """Return True for no gradient, and for zeros that `StageStep.prepare` has made and nothing was added to.

    torch counts changes in place. A kernel that writes past torch is seen by its values: the result is then a flag on
    the device.
    """
    if grad is None:
        return True
    values = local(grad)
    return getattr(grad, _PREPARED, None) == values._version and ~values.any()


class ParametersStep:
    """Parameters of one rank's stages during one step.

    Args:
        stages: their parameters, by number.
        users: by stage, the other stages that use its parameters.
        train: the step has backwards.
        reduce: it reduces gradients at the end.

    Collectives run in the order of the rank's program, the same on every data-parallel rank; stages that are not
    sharded have none. A step ends with `finish`, or after an error with `abandon`.
    """

    def __init__(
        self, stages: Mapping[int, StageParameters], users: Mapping[int, set[int]], *, train: bool, reduce: bool
    ) -> None:
        self._stage_parameters = stages
        self._stages: dict[int, StageStep] = {}
        self._sharded: dict[int, StageStep] = {}
        for stage, parameters in stages.items():
            self._stages[stage] = StageStep(parameters)
            if parameters.is_sharded:
                self._sharded[stage] = self._stages[stage]
        self._users = users
        self._train = train
        self._reduce = reduce
        self._waiting = set(self._sharded).union(*users.values())  # stages for which `wait` is still to be called
        self._open = set(self._sharded)  # sharded stages that are not complete
        self._in_use = set(stages)  # stages with further actions in this step
        self._recorder = Recorder.current()

    def gather(self) -> None:
        """Start to gather all sharded stages, and prepare the accumulators of the others."""
        for stage, stage_step in self._stages.items():
            if stage in self._sharded:
                with self._collective("gather", stage):
                    stage_step.gather()
            elif self._train and stage not in self._waiting:
                stage_step.prepare()

    def must_wait(self, stage: int) -> bool:
        """Return True if `wait` must be called before each forward of this stage. Ask before the first `wait`.

        The stage is sharded, or uses a parameter of a sharded stage, whose accumulator exists once it is gathered.
        """
        return stage in self._waiting

    def wait(self, stage: int) -> None:
        """Wait for the parameters of a stage before it runs a forward."""
        if stage in self._waiting:
            self._waiting.remove(stage)
            if stage in self._sharded:
                with self._collective("gather", stage):
                    self._sharded[stage].wait()
            if self._train:
                self._stages[stage].prepare()
        parameters = self._stage_parameters[stage]
        if not parameters.allows_several_groups:
            parameters.set_idle()  # otherwise FSDP2 would take the forward for a recompute, and not cast its inputs

    def complete(self, stages: Iterable[int]) -> None:
        """Reduce or keep the gradients of stages without further actions in this step, and free their parameters.

        Parameters that another stage uses too stay gathered until that stage is complete.
        """
        self._in_use.difference_update(stages)
        complete = [stage for stage in self._open if self._in_use.isdisjoint({stage, *self._users[stage]})]
        for stage in complete:
            self._open.remove(stage)
            with self._collective("reduce", stage):
                self._sharded[stage].complete(reduce=self._reduce)

    def finish(self) -> None:
        """End the step: later work on the device runs after its reductions."""
        for stage, stage_step in self._sharded.items():
            with self._collective("reduce", stage):
                stage_step.finish()

    def unused(self) -> dict[Tensor, bool]:
        """Return parameters that the step has reduced, with True for one without a gradient on this rank.

        The same parameters on all data-parallel ranks.
        """
        stages = self._stages.values() if self._reduce else ()
        return {param: is_unused for stage_step in stages for param, is_unused in stage_step.unused()}

    def drop_unused(self, unused: Mapping[Tensor, bool], agree: Callable[[list[bool]], list[bool]]) -> None:
        """Set the gradients of this step to None for parameters that have none on any data-parallel rank.

        Without it they would be zero if they are sharded, and an optimizer would let the parameters decay.

        unused: as `unused` returns them. agree: returns the flags that all data-parallel ranks have set.
        """
        is_unused_everywhere = agree([*unused.values()])
        drop(param for param, is_unused in zip(unused, is_unused_everywhere, strict=True) if is_unused)

    def run_hooks(self) -> None:
        """Run the post-accumulate-grad hooks of all sharded parameters that have a gradient."""
        for stage_step in self._sharded.values():
            stage_step.run_hooks()

    def abandon(self) -> None:
        """End a failed step without communication; never raises.

        FSDP2 returns to its state before the step, so that a pipeline without other ranks can be used again.
        """
        for stage_step in self._sharded.values():
            with suppress(Exception):  # the error that ended the step is reported instead
                stage_step.abandon()

    def _collective(self, kind: str, stage: int) -> RecordedWait:
        title = f"the {'parameters' if kind == 'gather' else 'gradients'} of stage {stage}"
        return self._recorder.collective(kind, title, self._stage_parameters[stage].ranks)


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
        reduced = local(grad).contiguous()
        hook = private(group, "_all_reduce_hook")
        if hook is not None:
            hook(reduced.view(-1))
        move_to(sharded, param, private(fsdp_param, "to_sharded_dtensor")(reduced))


def _drive(root: FSDPModule, *, sync: bool, by_hand: bool) -> None:
    """Configure the backward of the units of `root`.

    sync: reduce the gradients. by_hand: do not reshard and do not run FSDP2's final callback.
    """
    root.set_requires_gradient_sync(sync)
    root.set_reshard_after_backward(not by_hand)
    set_final_callback(root, runs=not by_hand)
    if by_hand:
        set_manual_mode(root, True)


def _leave_manual_mode(root: FSDPModule) -> None:
    """Let the units of `root` reduce in their backwards, as outside of a step."""
    set_manual_mode(root, False)
    _drive(root, sync=True, by_hand=False)
