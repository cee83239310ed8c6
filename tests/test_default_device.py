"""A caller's `torch.set_default_device` changes nothing of ours: every tensor names its device.

A tensor without a named device would be on the caller's, such as a host record on a GPU, and its rank would be out of
step with the others. "meta" stands in for a GPU here: it keeps no values, so that one tensor there shows.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from dualpipe import DualPipeV
from dualpipe.checkpoint import load, training_state
from dualpipe.checkpoint.save import save
from dualpipe.models import config_from_dict
from dualpipe.plan.activations import activation_bytes
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.config.load import load_config
from dualpipe.train.trainer import train
from native import CONFIG, Trainee
from ranks import run_ranks
from run_files import write_files

ROOT = Path(__file__).parents[1]
FACTORIES = {function.__name__ for function in _device_constructors()} | {"normal"}  # what the default device changes
FILES = [path for folder in ("dualpipe", "models", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]


def unnamed(source: str) -> list[int]:
    """Return the lines that make a tensor on the default device. Parameters may, like those of torch's own modules."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    called = {call: ast.unparse(call.func) for call in calls}
    for call in calls:
        if called[call] == "nn.Parameter":
            called |= dict.fromkeys(ast.walk(call), "")
    return [
        call.lineno for call in calls
        if called[call] in {f"torch.{name}" for name in FACTORIES}
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]


def test_the_rule_finds_what_it_should():
    assert unnamed("torch.zeros(1)\ntorch.zeros(1, device=d)\nx.new_zeros(1)\nnn.Parameter(torch.ones(2))") == [1]
    assert {"zeros", "tensor", "arange", "randint", "empty", "full", "as_tensor"} <= FACTORIES


def test_every_tensor_names_its_device():
    found = {str(path.relative_to(ROOT)): unnamed(path.read_text()) for path in FILES}
    assert len(found) > 50 and {path: lines for path, lines in found.items() if lines} == {}


class OursOnMeta(TorchFunctionMode):
    """Applies `torch.set_default_device("meta")` to our files alone: DTensor reads tensors that it makes itself."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if caller in FILES:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def trained(rank: int, shape: tuple[int, int, int], elsewhere: bool, folder: str) -> list:
    """Return losses and norms of two steps with a checkpoint after the first, and of one after loading it again."""
    if elsewhere and shape[2] > 1:
        OursOnMeta().__enter__()
    elif elsewhere:
        torch.set_default_device("meta")
    it = Trainee(shape, dtype=torch.float32)
    pipe = DualPipeV(it.model.stages, process_group=it.mesh["pp"].get_group())
    rows = torch.randint(61, (4, 6), generator=torch.Generator().manual_seed(rank % shape[2]), device="cpu")

    def step() -> list[float]:
        loss, _ = pipe.step(rows if it.model.has_first else None, num_chunks=4, labels=rows,
                            criterion=lambda logits, y: logits.logsumexp(-1).mean())
        norm = pipe.clip_grad_norm_(1.0)
        it.optimizer.step(0.1)
        it.optimizer.zero_grad()
        return [norm.item(), *([] if loss is None else loss.tolist())]

    found = [step()]
    save(folder, it.state, step=1, mesh=it.mesh)
    found.append(step())
    load(folder, training_state(it.model.stages, it.optimizer), mesh=it.mesh)
    it.optimizer.round_parameters()
    return [*found, step(), torch.zeros(1).device.type]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2)], ids=str)
def test_pipeline_sharding_and_checkpoints(tmp_path, shape):
    plain, other = (run_ranks(trained, math.prod(shape), shape, elsewhere, str(tmp_path / str(elsewhere)), fresh=True)
                    for elsewhere in (False, True))
    for expected, found in zip(plain, other):
        assert found[:3] == expected[:3] and found[1] == found[2] != found[0]
        assert found[3] == ("meta" if shape[2] == 1 else "cpu")  # this file is not one of ours


SMALLER = (
    "--parallel.pp", "1", "--train.steps", "2", "--train.sequence_length", "8", "--train.micro_batch_size", "1",
    "--train.num_chunks", "2", "--train.eval_interval", "1", "--train.eval_batches", "1", "--router.balance", "0.01",
    "--checkpoint.interval", "1",
)


def trainer(rank: int, device: str, folder: str) -> list[tuple]:
    torch.set_default_device(device)
    places = ("--output.dir", f"{folder}/{device}", "--export.to_hf", f"{folder}/{device}-hub")
    config = load_config(Path(folder) / "run.toml", [*SMALLER, *places])
    train(config, RankInfo(0, 1, 0, 1))
    lines = (Path(folder) / device / "metrics.jsonl").read_text().splitlines()
    return [(line["loss"], line["grad_norm"], line["eval_loss"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_the_trainer(tmp_path):
    write_files(tmp_path, CONFIG | {"vocab_size": 257})
    (expected,), (found,) = (run_ranks(trainer, 1, device, str(tmp_path), fresh=True) for device in ("cpu", "meta"))
    assert found == expected and len(found) == 2


def test_what_memory_is_counted():
    sizes = dict(batch=1, sequence_length=64, ep=2)
    expected = activation_bytes(config_from_dict(CONFIG), range(2), **sizes)
    with torch.device("meta"):
        assert activation_bytes(config_from_dict(CONFIG), range(2), **sizes) == expected
