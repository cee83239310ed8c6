"""Stages built from checkpoints: a rank reads its own experts alone, and has the numbers of the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers.modeling_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from dualpipe.hf import load_stages, save_stages
from dualpipe.hf.build import READS_SHARDS
from dualpipe.parallel.experts.dispatcher import stacked_parameters
from dualpipe.parallel.mesh import build_mesh
from hf_families import save_tiny, tiny_model
from ranks import run_ranks

EP = 2


class CountingFile:
    """A safetensors file that counts the numbers read of each tensor in `counts`."""

    def __init__(self, counts, *args, **kwargs):
        self.counts = counts
        self.file = safe_open(*args, **kwargs)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def get_slice(self, name):
        return CountingSlice(self.counts, name, self.file.get_slice(name))


class CountingSlice:
    def __init__(self, counts, name, tensor):
        self.counts = counts
        self.name = name
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def __getitem__(self, index):
        part = self.tensor[index]
        self.counts[self.name] = self.counts.get(self.name, 0) + part.numel()
        return part


def numbers_read(rank, folder):
    """Numbers read of each tensor; experts of each layer, to compare with those of the whole model."""
    counts: dict[str, int] = {}
    mesh = build_mesh(1, 1, EP, torch.device("cpu"))
    with mock.patch.object(transformers.modeling_utils, "safe_open", partial(CountingFile, counts)):
        (stage,) = load_stages(folder, 1, (0,), mesh=mesh, dtype=torch.float64)
    experts = {
        f"{path}.{name}": parameter.full_tensor().detach()
        for path, module in stage.named_modules() for name, parameter in stacked_parameters(module).items()}
    return counts, experts


def stack_experts(folder: Path) -> None:
    """Store experts as transformers' parameters are, one stacked tensor for all."""
    (file,) = folder.glob("*.safetensors")
    names = set(load_file(file))
    tensors = {name: tensor.clone() for name, tensor in tiny_model("qwen3_moe").state_dict().items()}
    assert names != set(tensors), "the checkpoint has a tensor for each expert"
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.skipif(not READS_SHARDS, reason="this version of transformers reads all experts")
@pytest.mark.parametrize("family, is_stacked", [("qwen3_moe", False), ("qwen3_moe", True), ("gpt_oss", True)])
def test_a_rank_reads_its_own_experts_alone(family, is_stacked, tmp_path):
    save_tiny(tmp_path, family)
    if is_stacked and family == "qwen3_moe":
        stack_experts(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    sizes = {name: tensor.numel() for name, tensor in load_file(file).items()}
    results = run_ranks(numbers_read, EP, tmp_path)
    total: dict[str, int] = {}
    for counts, _ in results:
        of_experts = sum(count for name, count in counts.items() if ".experts." in name)
        assert of_experts == sum(size for name, size in sizes.items() if ".experts." in name) // EP
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    assert total == {name: size if ".experts." in name else EP * size for name, size in sizes.items()}
    expected = tiny_model(family).state_dict()
    for _, experts in results:
        assert experts and all(torch.equal(tensor, expected[name]) for name, tensor in experts.items())


def _bars(rank, folder):
    """Return the progress bars shown while this rank loads and saves its stages."""

    def count(factory, args, kwargs):
        if factory is not transformers_logging.EmptyTqdm:
            shown.append(kwargs.get("desc"))
        return factory(*args, **kwargs)

    shown = []
    transformers_logging.set_tqdm_hook(count)
    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    stages = load_stages(folder, 4, (rank, 3 - rank), mesh=mesh)
    save_stages(stages, Path(folder, "saved"), mesh=mesh)
    assert transformers_logging.is_progress_bar_enabled()
    return shown


def test_the_first_rank_alone_shows_progress_bars(tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    first, second = run_ranks(_bars, 2, str(tmp_path))
    assert first
    assert not second


def test_an_end_is_not_resized_alone(tmp_path):
    save_tiny(tmp_path, "olmoe")
    for stage in load_stages(tmp_path, 2, (0, 1)):
        with pytest.raises(ValueError, match="resize the whole model"):
            stage.causal_lm.resize_token_embeddings(80)
    (whole,) = load_stages(tmp_path, 1, (0,))
    whole.causal_lm.resize_token_embeddings(80)
    assert whole(torch.tensor([[1, 70]])).shape == (1, 2, 80)


def test_damaged_files_are_named(tmp_path):
    save_tiny(tmp_path, "olmoe")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be opened as safetensors"):
        load_stages(tmp_path, 1, (0,))
    file.unlink()
    file.symlink_to("gone")
    with pytest.raises(ValueError, match=r"model\.safetensors is a link to gone, which does not exist"):
        load_stages(tmp_path, 1, (0,))
