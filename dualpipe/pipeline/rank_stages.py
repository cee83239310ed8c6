"""Stages of a rank: modules, programs, side inputs and parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup

from dualpipe.nn.segments import Communication
from dualpipe.parallel.fsdp.driver import StageParameters
from dualpipe.pipeline.side_inputs import SideSpec
from dualpipe.pipeline.stage_program import OfferedSegments, StageProgram, compile_stage, segments_key
from dualpipe.runtime.ranks.failure import HasWaits


@dataclass(frozen=True)
class RankStages:
    """Stages of a rank, by stage number.

    Attributes:
        modules: the stages.
        specs: side inputs that the stages take.
        parameters: parameters of the stages under FSDP2.
        borrowers: for each stage, the other stages that use parameters which FSDP2 manages in it.
        count: number of stages of the whole pipeline.
        device: device of all stages.
        batch_dim: dimension along which batches are split.
        programs: compiled stages; filled by `compile_programs`.
        known_groups: process groups over which the segments communicated when the pipeline was built; a failed step
            ends them.
        known_waits: communications of the segments then whose waits outside of process groups a failed step ends.
    """

    modules: Mapping[int, nn.Module]
    specs: Mapping[int, SideSpec]
    parameters: Mapping[int, StageParameters]
    borrowers: Mapping[int, set[int]]
    count: int
    device: torch.device
    batch_dim: int
    programs: dict[int, StageProgram] = field(default_factory=dict)
    known_groups: list[ProcessGroup] = field(default_factory=list)
    known_waits: list[HasWaits] = field(default_factory=list, init=False)
    _keys: dict[int, Hashable] = field(default_factory=dict)

    @property
    def is_hooked(self) -> bool:
        """Return True if the stages have one type with `overlapped_forward_backward`, and none runs as segments."""
        types = set(map(type, self.modules.values()))
        if len(types) != 1 or not hasattr(types.pop(), "overlapped_forward_backward"):
            return False
        return all(program.is_module for program in self.programs.values())

    def compile_programs(self, offered: Mapping[int, OfferedSegments] | None = None) -> None:
        """Compile the stages that have not been compiled yet, or whose `segments_key` has changed.

        offered: the segments of the stages; only when the pipeline is built. Raises ValueError if a stage communicates
        over another process group than when the pipeline was built.
        """
        for number, module in self.modules.items():
            key = segments_key(module)
            if number in self.programs and key == self._keys[number]:
                continue
            segments = OfferedSegments(module) if offered is None else offered[number]
            program = compile_stage(module, segments, self.specs[number], is_last=number == self.count - 1)
            groups = communication_groups(program)
            if offered is not None:
                self.known_groups.extend(groups)
                self.known_waits.extend(c for c in communications_of(program) if isinstance(c, HasWaits))
            elif not set(groups) <= set(self.known_groups):
                raise ValueError(f"the segments of stage {number} communicate over another process group than when the "
                                 "pipeline was built; build the pipeline anew")
            self.programs[number] = program
            self._keys[number] = key


def communication_groups(program: StageProgram) -> list[ProcessGroup]:
    """Return the groups over which a stage's segments communicate."""
    return [communication.group for communication in communications_of(program) if communication.group is not None]


def communications_of(program: StageProgram) -> list[Communication]:
    """Return the communications of a stage's segments."""
    return [segment.communication for segment in program.segments if segment.communication is not None]
