"""Path of a batch through the code: few functions and files, in the order of docs/architecture.md."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualpipe
from dualpipe import DualPipeV
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.nn import cross_entropy_loss
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.mesh import build_mesh
from ranks import run_ranks

ROOT = Path(dualpipe.__file__).parent.parent
CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
)


def file_of(frame: FrameType) -> str | None:
    """Return the library's file of a frame, such as "pipeline/engine.py"; None for other files."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in ("dualpipe", "models", "kernels"):
        return None
    return str(path.relative_to(ROOT)).removeprefix("dualpipe/")


def tensors_in(value: Any, depth: int = 5) -> Iterator[Tensor]:
    """Yield the tensors in containers and in the pipeline's records."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for part in parts_of(value):
            yield from tensors_in(part, depth - 1)


def parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if type(value).__module__.startswith("dualpipe.pipeline") and not isinstance(value, nn.Module):
        names = getattr(type(value), "__slots__", None) or vars(value)
        return [getattr(value, name, None) for name in names]
    return ()


class Computing(Exception):
    """Raised when the batch has arrived in a stage."""


class Arriving(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise Computing


def way(x: Tensor, pipe: DualPipeV) -> list[tuple[str, str]]:
    """Return the functions, with their files, that take the batch or a part of it before the first stage does."""
    found: list[tuple[str, str]] = []
    (value,) = x.unique().tolist()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        file = file_of(frame) if event == "call" else None
        if file is None:
            return
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount + 1]
        values = [frame.f_locals[name] for name in names if name in frame.f_locals and name != "self"]
        if any((t == value).all() for t in tensors_in(values)):
            found.append((file, frame.f_code.co_qualname))

    sys.setprofile(trace)
    try:
        pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(torch.ones_like(x),))
    except dualpipe.PipelineError as error:
        assert isinstance(error.__cause__, Computing)
    finally:
        sys.setprofile(None)
    return found


def test_a_batch_goes_forward_through_few_functions():
    found = way(torch.full((4, 8), 7.25), DualPipeV([Arriving(8, 8), Arriving(8, 8)]))
    files = [file for file, _ in groupby(found, itemgetter(0))]
    assert len(found) <= 20 and len(set(files)) <= 7, found
    assert files == [f"pipeline/{name}.py" for name in (
        "engine", "batch", "engine", "executor", "microbatch_state", "stage_runner", "compiled_stage")], files


# Calls of the library's own functions for each micro-batch and stage of a step, of plain modules on one rank.
CALLS = 44


def test_a_step_calls_few_functions_of_the_library():
    """Count calls, as a test of time missed an increase of the host's time by a half."""
    num_microbatches = 8
    pipe = DualPipeV([nn.Linear(8, 8), nn.Linear(8, 8)])
    x = torch.ones(2 * num_microbatches, 8)
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and file_of(frame) is not None:
            calls.append(frame.f_code.co_qualname)

    def step() -> None:
        pipe.step(x, num_chunks=num_microbatches, criterion=F.mse_loss, labels=(x,))

    step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    found = len(calls) / (2 * num_microbatches)
    assert found <= 1.05 * CALLS, (found, Counter(calls).most_common(20))


def frames_to_a_kernel(rank: int) -> list[str]:
    """Return the library's frames, outermost first, from `step` to the first grouped GEMM of a rank's experts."""
    mesh = build_mesh(1, 1, 2, torch.device("cpu"))
    stages = build_stages(CONFIG, 2)
    found: list[str] = []

    def note(*_: Any) -> None:
        handle.remove()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = file_of(frame)
            if file is not None:
                found.insert(0, f"{file}: {frame.f_code.co_qualname}")
            frame = frame.f_back

    for stage in stages:
        stage.use_expert_parallelism(ExpertParallel(CONFIG.num_experts, mesh["ep"]))
        for layer in stage.layers.values():
            for module in layer.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    if param.dim() == 3:
                        setattr(module, name, nn.Parameter(param.detach().chunk(2)[rank].clone()))
    experts = stages[0].layers["0"].mlp.experts
    handle = experts.register_forward_pre_hook(note)
    pipe = DualPipeV(stages, process_group=mesh["pp"].get_group())
    tokens = torch.randint(61, (2, 9))
    pipe.step(tokens[:, :-1], num_chunks=2, criterion=cross_entropy_loss, labels=(tokens[:, 1:].contiguous(),))
    return found


def test_few_frames_lead_from_a_step_to_the_experts():
    for frames in run_ranks(frames_to_a_kernel, 2, fresh=True):
        names = [frame.partition(": ")[2] for frame in frames]
        assert names[:4] == ["Pipeline.step", "Pipeline._run", "Executor.run", "Executor._run"], frames
        assert len(frames) <= 10 and len({frame.partition(":")[0] for frame in frames}) <= 5, frames


def test_the_document_names_the_files_in_their_order():
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"\]\(\.\./dualpipe/(pipeline/\w+\.py)\)", text[text.index("## Read the code"):])
    step = ("engine", "batch", "lower", "executor", "microbatch_state", "stage_runner", "overlap", "p2p")
    assert named[: len(step)] == [f"pipeline/{name}.py" for name in step]
    assert {f"pipeline/{path.name}" for path in (ROOT / "dualpipe/pipeline").glob("[a-z]*.py")} == set(named)
