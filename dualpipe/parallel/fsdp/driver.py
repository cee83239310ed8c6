"""The parameters of one pipeline stage under FSDP2: gathered once a step, reduced when the stage is done.

FSDP2 alone gathers before every forward and reduces in every backward; in a pipeline that is once for each micro-batch.
Here a stage's units stay gathered from its first forward to its last weight gradient. Its gradients accumulate in
`.grad` of the gathered parameters, in the policy's `reduce_dtype` by torch's `grad_dtype`: autograd, the kernels and
the reduce-scatter share one buffer, and nothing is rounded between micro-batches.

    gather -> wait -> forwards and backwards of all micro-batches -> complete -> finish

What FSDP2 keeps private is used here and in `gather` only; `private` says so where a torch release has moved it. Public
calls are used where the installed torch has them: `reset_iter_state` from 2.13, `finalize_backward` from 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from dualpipe.parallel.fsdp.private import groups_of, private, state_of
from dualpipe.parallel.fsdp.quantized_gather import attach
from dualpipe.quantized.quantize_model import placed_as, quantized_part
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.recorder import Recorder, Waiting

ParameterPlace = tuple[nn.Module, str]  # a module that has a parameter, and its name there


class StageParameters:
    """Drives the FSDP2 units of a stage, if there are any, through a step; ValueError for what cannot be in one."""

    def __init__(self, stage: nn.Module) -> None:
        sharded: list[Any] = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        self._units = _units(stage)
        inside = {inner for outer in sharded for inner in outer.modules() if inner is not outer}
        self._roots: list[Any] = [module for module in sharded if module not in inside]
        self.several_groups = all(hasattr(state_of(unit), "_fsdp_param_groups") for unit in self._units)
        # Groups of parameters, in the order of a backward.
        self._groups = [group for unit in reversed(self._units) for group in reversed(groups_of(unit))]
        self._stage, self._reduced = stage, False
        self._gathering: list[Any] = []  # handles of gathers that are not waited for
        groups = process_groups([stage]) if sharded else ()
        self.ranks = tuple(sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)}))
        """those that the parameters are cut over (global numbers); none for plain ones"""
        for root in self._roots:
            if any(kind.__name__ == "ReplicateModule" for kind in type(root).__mro__):  # which is private
                raise ValueError("a module was given to torch's replicate, which a pipeline cannot drive; use "
                                 "fully_shard with a mesh of (ranks, 1)")
            if len(private(state_of(root), "_modules")) > 1:
                raise ValueError("fully_shard was given several modules together that are in no larger unit of their "
                                 "stage; call fully_shard on the stage itself as well")
        for group in self._groups:
            if isinstance(private(group, "offload_policy"), CPUOffloadPolicy):
                raise ValueError("FSDP2's CPU offload is not supported under a pipeline, which keeps parameters "
                                 "gathered for a whole step; leave offload_policy out")
        self._check_towers()
        for root in self._roots:
            root.set_reshard_after_forward(False)
            if hasattr(root, "set_reduce_scatter_max_input_buffers"):
                # With one, the default, a unit's reduction would hold up the computing until the one before it is
                # through. It costs no memory: a buffer takes the place of the gradients that were copied into it.
                root.set_reduce_scatter_max_input_buffers(len(self._units))

    def _check_towers(self) -> None:
        """Raise ValueError for a frozen module that computes in another dtype than all that is trained, where nothing
        casts between them: `fully_shard` does not, while `shard` does, and says so by `cast_forward_inputs`."""
        computes: dict[nn.Parameter, torch.dtype] = {}
        for fsdp_param in self._fsdp_params():
            policy = private(fsdp_param, "mp_policy")
            if not policy.cast_forward_inputs:
                return
            param = private(fsdp_param, "sharded_param")
            computes[param] = policy.param_dtype or param.dtype
        trained = {dtype for param, dtype in computes.items() if param.requires_grad}
        for name, tower in _towers(self._stage):
            dtypes = {computes.get(p, p.dtype) for p in tower.parameters() if p.is_floating_point()}
            if trained and dtypes and dtypes.isdisjoint(trained) and not _returns_a_dtype(tower):
                frozen_in = " and ".join(sorted(map(short_name, dtypes)))
                trained_in = " and ".join(sorted(map(short_name, trained)))
                raise ValueError(
                    f"{name} ({type(tower).__name__}) is frozen and computes in {frozen_in}, what is trained in "
                    f"{trained_in}, and fully_shard casts nothing between them: cast it first (.to(dtype)), or shard "
                    "the stage by dualpipe.parallel.shard, which does; where the stage's forward casts by itself, give "
                    "fully_shard MixedPrecisionPolicy(..., cast_forward_inputs=False)")

    @property
    def is_sharded(self) -> bool:
        """Return True if FSDP2 has any parameters of the stage."""
        return bool(self._roots)

    def places(self) -> Iterator[ParameterPlace]:
        """Return the places of the parameters that FSDP2 has, in other stages too that see them (`lend`)."""
        for fsdp_param in self._fsdp_params():
            yield from _places(private(fsdp_param, "_module_info"))

    def borrowers(self, stages: Mapping[int, nn.Module]) -> set[int]:
        """Which of the other stages see a parameter of this one."""
        modules = {module for module, _ in self.places()}.difference(self._stage.modules())
        return {number for number, stage in stages.items() if not modules.isdisjoint(stage.modules())}

    def check(self) -> None:
        """Find what FSDP2 refuses before a step begins; ValueError, or FSDP2's own error."""
        if isinstance(self._stage, FSDPModule) and self._stage not in self._units:
            raise ValueError("a stage was given to fully_shard after the pipeline was built; build the pipeline anew")
        for root in self._roots:
            private(state_of(root), "_lazy_init")()

    def gather(self) -> None:
        """Start to gather all parameters; collective over the data-parallel ranks, as `complete` is."""
        for root in self._roots:
            _drive(root, sync=False, by_hand=True)
        for unit in self._units:
            unit.reshard()  # one that was left gathered may be older than the last optimizer step
        attach(packed for each in self._fsdp_params() if (packed := getattr(each, "packed_gather", None)) is not None)
        for unit in self._units:
            keep_hook_on_reduce_stream(unit)
            self._gathering.append(unit.unshard(async_op=True))

    def wait(self) -> None:
        """Wait until the parameters are there; from now on gradients accumulate in `reduce_dtype`."""
        handles, self._gathering = self._gathering, []
        for handle in handles:
            handle.wait()
        if handles:
            self._fold()

    def prepare(self) -> None:
        """Give every parameter whose accumulator is of another dtype than its own one to add to: zeros.

        Code that was written for gradients in the parameter's dtype then adds them in the accumulator's, be it autograd
        or a closure in the usual form, `w.grad = g if w.grad is None else w.grad.add_(g)`. To assign a bfloat16 `g`
        would fail. The layers of `dualpipe.nn` need no zeros: they write the first gradient as it has to be.
        """
        for module in self._stage.modules():
            if not getattr(type(module), "makes_accumulators", False):  # of a module itself it takes 1 us
                for param in module._parameters.values():  # its own alone; `parameters()` takes five times as long
                    if param is None or not param.requires_grad or param.grad is not None:
                        continue
                    dtype = param.grad_dtype
                    if dtype not in (None, param.dtype):
                        param.grad = torch.zeros_like(param, dtype=dtype)

    def set_idle(self) -> None:
        """Have no unit left in its backward: it would take the next forward for a recomputation."""
        for unit in self._units:
            state = state_of(unit)
            state._training_state = type(private(state, "_training_state")).IDLE

    def complete(self, *, reduce: bool) -> None:
        """Free the gathered parameters; before that, with `reduce`, start the reductions, of all gradients in
        `reduce_dtype`. Without, they stay in their accumulators, for a later step to reduce.

        Every trainable parameter takes part, with zeros where it has no gradient: on another rank it may have one.
        """
        self.wait()
        if reduce:
            self._fold(zeros=True)
            for root in self._roots:
                _drive(root, sync=True, by_hand=True)
            for group in self._groups:
                if private(private(group, "mesh_info"), "mesh").size() == 1:
                    _hand_over(group)
                private(group, "post_backward")()
        for unit in self._units:
            unit.reshard()
        self._reduced = reduce

    def finish(self) -> None:
        """End the step: work that follows on the device comes after the reductions, and FSDP2 is as it was before.

        Raises RuntimeError where a gradient was lost.
        """
        reduced, self._reduced = self._reduced, False
        for root in self._roots:
            _drive(root, sync=reduced, by_hand=False)
            by_torch = getattr(root, "finalize_backward", None)
            (by_torch or private(state_of(root), "_root_post_backward_final_callback"))()
            _leave_manual_mode(root)
        self.set_idle()
        lost = [
            private(fsdp_param, "_param_fqn")
            for fsdp_param in (self._fsdp_params() if reduced else ())
            if (param := private(fsdp_param, "sharded_param")).requires_grad and param.grad is None
        ]
        if lost:
            raise RuntimeError(f"FSDP2 reduced no gradient for {lost}, though every trainable parameter had one")

    def abandon(self) -> None:
        """Leave a step that failed, without communication: free the gathered parameters and drop their gradients."""
        self._reduced = False
        self._gathering = []
        for group in self._groups:
            group._all_gather_result = None  # the next step would take it for its own, and FSDP2 would wait for it
            group._training_state = type(private(group, "_training_state")).IDLE  # else FSDP2 may not reshard
        for root in self._roots:
            if hasattr(root, "reset_iter_state"):
                root.reset_iter_state()
            _leave_manual_mode(root)
        for unit in self._units:
            unit.reshard()
        self.set_idle()
        self.discard()

    def discard(self) -> None:
        """Drop gradients that wait for a later step to reduce them."""
        for param, _ in self._unsharded():
            param.grad = None
        for fsdp_param in self._fsdp_params():
            if hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed"):  # before torch 2.15, it has another place
                fsdp_param.unsharded_accumulated_grad = None

    def _fsdp_params(self) -> Iterator[Any]:
        """FSDP2's own records of the parameters."""
        return chain.from_iterable(private(group, "fsdp_params") for group in self._groups)

    def _unsharded(self) -> Iterator[tuple[Tensor, torch.dtype]]:
        """The gathered parameters and the dtype of their accumulators; none before the first gather."""
        for fsdp_param in self._fsdp_params():
            if (param := getattr(fsdp_param, "_unsharded_param", None)) is not None:
                own = getattr(fsdp_param, "unsharded_grad_dtype", None)  # torch 2.15 decides
                yield param, own or private(fsdp_param, "mp_policy").reduce_dtype or param.dtype

    def _fold(self, *, zeros: bool = False) -> None:
        """Have all gradients in `reduce_dtype`, as a reduce-scatter takes one dtype: also those of backwards outside of
        steps, and of code that assigned one in the parameter's dtype. FSDP2 adds what it has put elsewhere itself."""
        for param, dtype in self._unsharded():
            if param.requires_grad and param.grad_dtype is not dtype:
                grad, param.grad = param.grad, None
                param.grad_dtype = dtype
                if grad is not None:
                    param.grad = grad.to(dtype)
            if zeros and param.requires_grad and param.grad is None:
                # Not zeros_like where it is quantized: in the dtype that it gives itself out as, that is quantized too.
                part = quantized_part(param)
                param.grad = (torch.zeros_like(param, dtype=dtype) if part is None else
                              placed_as(param, torch.zeros(part.shape, dtype=dtype, device=part.device)))


class ParametersStep:
    """The parameters of one rank's stages during one step.

    borrowers: by stage, the stages that see its parameters. train: whether there are backwards; reduce: whether
    gradients are reduced at the end. Its collectives come in the order of the rank's program, which is that of every
    data-parallel rank; stages that are not sharded have none. A step ends by `finish`, or, where anything failed, by
    `abandon`.
    """

    def __init__(
        self, stages: Mapping[int, StageParameters], borrowers: Mapping[int, set[int]], *, train: bool, reduce: bool
    ) -> None:
        self._stages = stages
        self._sharded = {stage: parameters for stage, parameters in stages.items() if parameters.is_sharded}
        self._borrowers = borrowers
        self._train = train
        self._reduce = reduce
        self._waiting = set(self._sharded).union(*borrowers.values())
        self._open = set(self._sharded)
        self._in_use = set(stages)
        self._recorder = Recorder.current()

    def gather(self) -> None:
        """Start to gather all sharded stages; the parameters of others are there."""
        for stage, parameters in self._stages.items():
            if stage in self._sharded:
                with self._collective("gather", stage):
                    parameters.gather()
            elif self._train and stage not in self._waiting:
                parameters.prepare()

    def must_wait(self, stage: int) -> bool:
        """Return True if `wait` must be called before the forwards of this stage; to be asked before the first one.

        The stage is sharded, or sees a parameter of a sharded stage, whose accumulator is known once it is gathered.
        """
        return stage in self._waiting

    def wait(self, stage: int) -> None:
        """Wait for the parameters of a stage that is about to run a forward."""
        parameters = self._stages[stage]
        if stage in self._waiting:
            self._waiting.remove(stage)
            if stage in self._sharded:
                with self._collective("gather", stage):
                    parameters.wait()
            if self._train:
                parameters.prepare()
        if not parameters.several_groups:  # until torch 2.12, whose FSDP2 does not cast for a recomputation
            parameters.set_idle()

    def complete(self, stages: Iterable[int]) -> None:
        """Reduce or keep the gradients of stages that have nothing left to do, and free their parameters.

        Parameters that another stage sees as well stay until that one is complete too.
        """
        self._in_use.difference_update(stages)
        for stage in [s for s in self._open if self._in_use.isdisjoint({s, *self._borrowers[s]})]:
            self._open.remove(stage)
            with self._collective("reduce", stage):
                self._sharded[stage].complete(reduce=self._reduce)

    def finish(self) -> None:
        """End the step; its results on the device come before work that follows."""
        for stage, parameters in self._sharded.items():
            with self._collective("reduce", stage):
                parameters.finish()

    def abandon(self) -> None:
        """Leave a step that failed, as far as this rank can alone: never communicates, never raises.

        FSDP2 is then in the state before the step, so that a pipeline without other ranks can be used again.
        """
        for parameters in self._sharded.values():
            with suppress(Exception):  # the error that ended the step is the one to report
                parameters.abandon()

    def _collective(self, kind: str, stage: int) -> Waiting:
        title = f"the {'parameters' if kind == 'gather' else 'gradients'} of stage {stage}"
        return self._recorder.collective(kind, title, self._sharded[stage].ranks)


def lend(stage: nn.Module, places: Sequence[ParameterPlace]) -> None:
    """Have the other places, in other stages, see a parameter that FSDP2 has at the first, in `stage`, as it is there:
    sharded or gathered."""
    own, *others = places
    for group in chain.from_iterable(groups_of(unit) for unit in _units(stage)):
        for fsdp_param in private(group, "fsdp_params"):
            info = private(fsdp_param, "_module_info")
            for module, name in others if own in _places(info) else ():
                info.shared_modules.append(module)
                info.shared_param_names.append(name)
                setattr(module, name, private(fsdp_param, "sharded_param"))


def _towers(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules with modules inside, and their names, that are frozen, where others are trained."""
    frozen: set[nn.Module] = set()
    for name, module in stage.named_modules():
        is_frozen = not any(param.requires_grad for param in module.parameters())
        if is_frozen and module not in frozen and any(True for _ in module.children()):
            yield name, module
        if is_frozen:
            frozen.update(module.modules())


def _returns_a_dtype(module: nn.Module) -> bool:
    """Return True for an FSDP2 unit whose policy casts what goes in and what comes out."""
    if not isinstance(module, FSDPModule):
        return False
    fsdp_params = chain.from_iterable(private(group, "fsdp_params") for group in groups_of(module))
    policies = [private(fsdp_param, "mp_policy") for fsdp_param in fsdp_params]
    return all(policy.param_dtype and policy.output_dtype for policy in policies)


def _units(stage: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on, outermost first; of those sharded together the first."""
    sharded = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    return list({id(state_of(unit)): unit for unit in reversed(sharded)}.values())[::-1]


def _places(info: Any) -> list[ParameterPlace]:
    """Return the places where FSDP2 puts a parameter, by its `info`."""
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]


def process_groups(stages: Iterable[nn.Module], others: Iterable[ProcessGroup] = ()) -> list[ProcessGroup]:
    """The groups, of more than one rank, over which parameters of `stages` are distributed, and `others`; none within
    another."""
    params = (p for stage in stages for p in stage.parameters() if isinstance(p, DTensor))
    found = [group for param in params for group in param.device_mesh.get_all_groups()]
    groups: dict[tuple[int, ...], ProcessGroup] = {}
    for group in (*found, *others):
        groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    ranks = [set(r) for r in groups]
    return [group for r, group in groups.items() if len(r) > 1 and not any(set(r) < other for other in ranks)]


def mesh_groups(stages: Iterable[nn.Module]) -> list[ProcessGroup]:
    """Return all groups of the meshes that parameters of `stages` are distributed over."""
    meshes = {p.device_mesh for stage in stages for p in stage.parameters() if isinstance(p, DTensor)}
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def keep_hook_on_reduce_stream(unit: FSDPModule) -> None:
    """Have a hook on a unit's reduced gradients run where they are reduced, once FSDP2 has its streams.

    FSDP2 has another stream for such hooks, on which it then also casts and adds gradients, out of memory that it gives
    back to the reducing stream at once: the next unit's reduction may write there before. After an all-reduce it keeps
    that memory itself, and does not look at this.
    """
    for group in groups_of(unit):
        if private(group, "_all_reduce_hook") is not None and private(group, "_all_reduce_hook_stream") is None:
            group._all_reduce_hook_stream = private(private(group, "comm_ctx"), "reduce_scatter_stream")


def _hand_over(group: Any) -> None:
    """Make the accumulators of a group of one rank its reduced gradients, as such experts have without data-parallel
    ranks. FSDP2 would copy them into memory of another stream, which both keep: 4 bytes a parameter. It does where more
    is asked of it: another dtype, to add, to divide, hooks of parameters."""
    for fsdp_param in private(group, "fsdp_params"):
        param, sharded = private(fsdp_param, "_unsharded_param"), private(fsdp_param, "sharded_param")
        grad = param.grad
        if (grad is None or grad.dtype is not sharded.dtype or sharded.grad is not None
                or sharded._post_accumulate_grad_hooks or private(group, "gradient_divide_factor") is not None):
            continue
        param.grad, reduced = None, (grad.to_local() if isinstance(grad, DTensor) else grad).contiguous()
        if (hook := private(group, "_all_reduce_hook")) is not None:
            hook(reduced.view(-1))
        sharded.grad = private(fsdp_param, "to_sharded_dtensor")(reduced)


def _drive(root: FSDPModule, *, sync: bool, by_hand: bool) -> None:
    """Set what the units below `root` do in a backward: reduce with `sync`; reshard, and end it, unless `by_hand`."""
    root.set_requires_gradient_sync(sync)
    root.set_reshard_after_backward(not by_hand)
    context = private(state_of(root), "_state_ctx")
    private(context, "post_backward_final_callback_queued")
    context.post_backward_final_callback_queued = by_hand  # autograd would call it, for 200 us, after each backward
    if by_hand and hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(True)


def _leave_manual_mode(root: FSDPModule) -> None:
    """Have the units below `root` reduce in a backward of their own again, as outside of a step."""
    if hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(False)
    _drive(root, sync=True, by_hand=False)
