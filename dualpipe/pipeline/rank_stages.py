"""The stages of a rank: their modules, programs, side inputs and parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup

from dualpipe.parallel.fsdp.driver import StageParameters
from dualpipe.pipeline.side_inputs import SideSpec
from dualpipe.pipeline.stage_program import OfferedSegments, StageProgram, compile_stage, segments_key


@dataclass(frozen=True)
class RankStages:
    """The stages of a rank, by number, of `count` in the whole pipeline.

    borrowers: of each stage, the others that see parameters which FSDP2 has in it. batch_dim: along which batches are
    cut. programs: what `compile_programs` has made of the modules. known_groups: over which the segments communicated
    when the pipeline was built: those that a failure ends.
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
    _keys: dict[int, Hashable] = field(default_factory=dict)

    @property
    def is_hooked(self) -> bool:
        """Return True for stages of one type that offers DeepSeek's `overlapped_forward_backward`, and that do not run
        as segments."""
        types = set(map(type, self.modules.values()))
        if len(types) != 1 or not hasattr(types.pop(), "overlapped_forward_backward"):
            return False
        return all(program.is_module for program in self.programs.values())

    def compile_programs(self, offered: Mapping[int, OfferedSegments] | None = None) -> None:
        """Compile the stages that were not compiled yet, or whose `segments_key` has changed.

        offered: the segments of stages, when the pipeline is built. Raises ValueError where stages that are compiled
        again communicate over other groups than when the pipeline was built.
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
            elif not set(groups) <= set(self.known_groups):
                raise ValueError(f"the segments of stage {number} communicate over another process group than when the "
                                 "pipeline was built; build it anew")
            self.programs[number] = program
            self._keys[number] = key


def communication_groups(program: StageProgram) -> list[ProcessGroup]:
    """Return the groups over which a stage's segments communicate."""
    communications = [segment.communication for segment in program.segments if segment.communication is not None]
    return [communication.group for communication in communications if communication.group is not None]
