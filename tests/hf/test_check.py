"""`dualpipe hf check` of checkpoints that transformers' implementation is trained from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualpipe import cli
from hf_families import tiny_model
from hub import read_all, rewrite


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_model(family):
    """Write a tiny model to the folder hub."""
    tiny_model(family, torch.float32).save_pretrained("hub")


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "llama", "qwen3_5_moe_text", "minimax_m2", "glm4_moe", "jamba",
                                    "ernie4_5_moe", "granitemoe", "llama4_text"])
def test_hf_check_reads_headers_only(folder, capsys, family):
    save_model(family)
    assert cli.main(["hf", "check", "hub", "--pp", "2", "--dp", "2"]) == 0
    assert "it can be loaded" in capsys.readouterr().out


def test_hf_check_names_what_is_missing(folder, capsys):
    save_model("olmoe")
    tensors = read_all(Path("hub"))
    rewrite(Path("hub"), {name: tensor for name, tensor in tensors.items() if ".2.mlp.gate." not in name})
    assert cli.main(["hf", "check", "hub"]) == 1
    assert "it lacks model.layers.2.mlp.gate.weight" in capsys.readouterr().err
    rewrite(Path("hub"), tensors)
    assert cli.main(["hf", "check", "hub", "--ep", "3"]) == 2
    assert "8 experts cannot be divided evenly among 3 expert-parallel ranks" in capsys.readouterr().err
    save_model("llama")
    assert cli.main(["hf", "check", "hub", "--ep", "2"]) == 2
    assert "only those can be divided among 2 expert-parallel ranks; set ep to 1" in capsys.readouterr().err
    save_model("olmoe")
    assert cli.main(["hf", "check", "hub", "--mtp"]) == 2
    assert "--mtp is for this library's own models" in capsys.readouterr().err
