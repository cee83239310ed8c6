"""Detect ranks with wrong results: replicated state with different bits, and micro-batches that are not repeatable.

Such a rank is named even while all numbers are finite, which the guard cannot see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dualpipe.parallel.mesh import DENSE
from dualpipe.parallel.tied import tied_parameters
from dualpipe.runtime.device import RandomState
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.replay import (
    ResultLocation,
    ResultWatch,
    checksum_bits,
    first_location,
    local_gradients,
    read_values,
)
from dualpipe.train.saver import TrainingState
from dualpipe.train.step import StepRunner

_MAX_SHOWN = 8  # tensors in a message

K = TypeVar("K")


class Corrupted(FloatingPointError):
    """Replicated state differs between ranks, or a rank gets other bits when it repeats a computation."""


class RankChecks:
    """Checks the results of ranks, as [guard] configures it. All ranks call the same methods at the same steps.

    Args:
        runner: runs the steps.
        state: of the run.
    """

    def __init__(self, runner: StepRunner, state: TrainingState) -> None:
        self._settings = runner.config.guard
        self._runner = runner
        self._state = state

    def is_due(self, step: int) -> bool:
        """Return True if `check` has anything to do after this step."""
        intervals = (self._settings.checksum_interval, self._settings.recheck_interval)
        return any(_is_multiple(step, interval) for interval in intervals)

    def check(self, step: int, batch: TokenBatch) -> None:
        """Run the checks that are due after the last step. Collective.

        Args:
            step: the last step, counted from 1.
            batch: of the step.

        Raises:
            Corrupted: on all ranks.
        """
        runner = self._runner
        problems: list[str] = []
        if _is_multiple(step, self._settings.checksum_interval):
            buffers = {name: buffer for stage in runner.model.stages for name, buffer in stage.named_buffers()}
            state = {name: value for name, value in self._state.tensors().items() if isinstance(value, Tensor)}
            local_problems = _compare_copies(buffers | state, runner.job.place.group(*DENSE), runner.recorder)
            problems += chain.from_iterable(runner.job.ranks.gather(lambda: local_problems))
            problems += self._compare_pipeline_ends()
        if _is_multiple(step, self._settings.recheck_interval):
            number = step // self._settings.recheck_interval % runner.config.train.num_chunks
            problems += self._compare_repetitions(batch, step, number)
        if problems:
            raise Corrupted(f"after step {step}: {'; '.join(dict.fromkeys(problems))}; suspect its device or its "
                            "memory, and resume without it from an earlier checkpoint")

    def _compare_pipeline_ends(self) -> list[str]:
        """Compare tied parameters on the first and the last stage of each pipeline; return texts about differences.

        Collective if the ends are on two ranks.
        """
        runner = self._runner
        placement = runner.schedule.placement
        if placement[0] == placement[-1]:
            return []
        tied = list(chain.from_iterable(map(tied_parameters, runner.model.stages)))
        states = self._state.optimizer.state_tensors() if tied else {}
        tensors = chain.from_iterable((parameter, *states[parameter].values()) for parameter in tied)
        local_checksums = [int(checksum_bits(tensor)) for tensor in tensors if isinstance(tensor, Tensor)]
        by_replica: dict[int, dict[int, list[int]]] = {}  # checksums by replica, then rank
        gathered = runner.job.ranks.gather(lambda: (runner.job.place.replica, local_checksums))
        for rank, (replica, checksums) in enumerate(gathered):
            if checksums:
                by_replica.setdefault(replica, {})[rank] = checksums
        return [f"{' or '.join(map(runner.recorder.name, ends))} has wrong bits in parameters that both ends of a "
                "pipeline have" for ends in by_replica.values() if len(set(map(tuple, ends.values()))) > 1]

    def _compare_repetitions(self, batch: TokenBatch, step: int, number: int) -> list[str]:
        """Run a micro-batch of the last step twice, and return texts about differences. Drops gradients. Collective.

        The first run has full backwards, the second one deferred weight gradients, which are the same GEMMs.

        Args:
            batch: of the step.
            step: counted from 1.
            number: of the micro-batch.
        """
        runner = self._runner
        size = runner.config.train.micro_batch_size
        microbatch = TokenBatch(*(tensor[number * size : (number + 1) * size] for tensor in batch))
        random_state = RandomState.capture()
        results, gradients = self._checksums(microbatch, step, deferred=False)
        random_state.restore()
        other_results, other_gradients = self._checksums(microbatch, step, deferred=True)
        random_state.restore()
        runner.drop_scores()
        locations = _different_keys(results, other_results)
        parameters = _different_keys(gradients, other_gradients)
        location = min(locations, default=None)
        parameter = next(iter(parameters), None)
        by_rank = runner.job.ranks.gather(lambda: (location, parameter))
        first = first_location(location for location, _ in by_rank)
        if first is not None:
            label = first.label.replace("micro-batch 0", f"micro-batch {number}")  # it ran alone
            return [f"{runner.recorder.name(first.rank)} got other bits for {label} when it computed it a second time"]
        return [f"{runner.recorder.name(rank)} got other bits for the gradient of {name} when it computed micro-batch "
                f"{number} a second time" for rank, (_, name) in enumerate(by_rank) if name is not None]

    def _checksums(
        self, microbatch: TokenBatch, step: int, *, deferred: bool
    ) -> tuple[dict[ResultLocation, int], dict[str, int]]:
        """Run forward and backward of a micro-batch, and return the checksums of its results and its gradients."""
        runner = self._runner
        with runner.pipeline.in_order(deferred=deferred), ResultWatch(runner.recorder, checksum_bits) as watch:
            runner.forward_backward(microbatch, runner.criterion(step), num_microbatches=1)
        gradients = local_gradients(runner.model.stages)
        checksums = {name: checksum_bits(gradient) for name, gradient in gradients.items()}
        runner.pipeline.zero_grad()
        return read_values(watch.results), read_values(checksums)


def _is_multiple(step: int, interval: int) -> bool:
    """Return True if a check with this interval is due after a step; an interval of 0 is never due."""
    return interval > 0 and step % interval == 0


def _different_keys(first: Mapping[K, int], second: Mapping[K, int]) -> list[K]:
    """Return the keys of `first` whose values differ in `second`, or are not there."""
    return [key for key, value in first.items() if second.get(key) != value]


def _compare_copies(tensors: Mapping[str, Tensor], replicas: ProcessGroup | None, recorder: Recorder) -> list[str]:
    """Compare tensors that ranks replicate; return texts about ranks whose bits differ from the majority's.

    Collective over the groups that replicate a tensor.

    Args:
        tensors: by name. A DTensor is compared over the mesh dimensions along which it is replicated.
        replicas: the ranks over which plain tensors are compared. None: this rank only.
        recorder: of this rank.
    """
    by_group: dict[ProcessGroup, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups = [replicas]
        if isinstance(tensor, DTensor):
            groups = [tensor.device_mesh.get_group(mesh_dim) for mesh_dim, placement in enumerate(tensor.placements)
                      if placement.is_replicate()]
        for group in groups:
            if group is not None and group.size() > 1:
                by_group.setdefault(group, {})[name] = tensor
    problems = []
    for group, replicated in by_group.items():
        ranks = recorder.members(group)
        checksums = [checksum_bits(tensor) for tensor in replicated.values()]
        # Moments may be in host memory; the parameters beside them are on the device.
        device = next((checksum.device for checksum in checksums if checksum.is_cuda), torch.device("cpu"))
        local_checksums = torch.stack([checksum.to(device) for checksum in checksums])
        gathered = [torch.empty_like(local_checksums) for _ in ranks]
        with recorder.collective("checksums", "checksums", ranks, local_checksums.nbytes):
            dist.all_gather(gathered, local_checksums, group=group)
        for name, checksums_of_ranks in zip(replicated, torch.stack(gathered, 1).tolist()):
            wrong = _wrong_ranks(ranks, checksums_of_ranks)
            if wrong:
                problems.append(f"{' or '.join(map(recorder.name, wrong))} has wrong bits in {name}, which ranks "
                                f"{', '.join(map(str, ranks))} replicate")
    return problems[:_MAX_SHOWN]


def _wrong_ranks(ranks: Sequence[int], checksums: Sequence[int]) -> list[int]:
    """Return the ranks whose checksum is not that of the majority: all of them if there is none.

    Example: ranks 0, 1, 2 with checksums 7, 7, 5 give [2]; ranks 0, 1 with 7, 5 give [0, 1].
    """
    (most_common, count), *others = Counter(checksums).most_common()
    if not others:
        return []
    has_majority = 2 * count > len(ranks)
    return [rank for rank, checksum in zip(ranks, checksums) if checksum != most_common or not has_majority]
