"""`dualpipe hf check` and `dualpipe hf export`."""

import json
import re

import pytest
import torch

from dualpipe.checkpoint.hub.commands import largest_share
from dualpipe.cli import main
from dualpipe.models import config_from_dict
from dualpipe.parallel.mesh import Mesh
from hub import TINY, held_boxes, read_all, rewrite, save_qwen


def test_check(tmp_path, capsys):
    save_qwen(tmp_path, dtype=torch.bfloat16)
    tensors = read_all(tmp_path)
    rewrite(tmp_path, tensors | {"model.norm.weight": tensors["model.norm.weight"].float()})
    assert main(["hf", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    size = sum(tensor.nbytes for tensor in tensors.values()) + 64
    assert f"qwen3_moe, {len(tensors)} tensors in 1 file, {size / 1000:.1f} KB" in out
    assert re.search(rf"bfloat16 +{len(tensors) - 1} tensors", out)
    assert re.search(r"float32 +1 tensors +128 B", out)
    assert f"reads at most {size / 1000:.1f} KB" in out
    assert main(["hf", "check", str(tmp_path), "--pp", "2", "--dp", "2", "--ep", "2"]) == 0
    smaller = re.search(r"pp 2, dp 2, ep 2 .* reads at most ([\d.]+) KB", capsys.readouterr().out)
    assert float(smaller[1]) < size / 1000 / 4


@pytest.mark.parametrize("arguments, message", [
    (["--ep", "3"], "4 experts"), (["--pp", "0"], "pp = 0"), (["--pp", "40"], "into 80 stages")])
def test_check_refuses_a_layout(tmp_path, capsys, arguments, message):
    save_qwen(tmp_path)
    assert main(["hf", "check", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 3, 1), (2, 3, 2), (3, 5, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_first_rank_of_a_pipeline_rank_has_the_largest_share(layout, tied):
    """25 rows over dp, 4 experts over ep: parts that are smaller, and cut on other dimensions."""
    config = config_from_dict(TINY | {"model_type": "qwen3_moe", "moe_intermediate_size": 25,
                                      "tie_word_embeddings": tied})
    pp, dp, ep = layout
    for place in range(pp):
        found = largest_share(config, Mesh.planned(pp=pp, dp=dp, ep=ep), place)
        ranks = [held_boxes(config, layout, rank) for rank in range(place * dp * ep, (place + 1) * dp * ep)]
        assert found.items() <= ranks[0].items()
        assert ranks[0].keys() - found.keys() == ({"lm_head.weight"} if tied and place == 0 else set())
        for name, box in found.items():
            assert box.numel == max(held[name].numel for held in ranks), name


def test_check_lists_what_is_wrong(tmp_path, capsys):
    save_qwen(tmp_path)
    tensors = read_all(tmp_path)
    del tensors["model.norm.weight"]
    rewrite(tmp_path, tensors | {"other": torch.zeros(1)})
    assert main(["hf", "check", str(tmp_path)]) == 1, "the check found something"
    err = capsys.readouterr().err
    assert "model.norm.weight: missing" in err and "other: unexpected" in err
    assert main(["hf", "check", str(tmp_path / "nowhere")]) == 2
    assert "there is no file or directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["hf", "check", str(tmp_path / "empty")]) == 2
    assert f"error: the directory {tmp_path / 'empty'} has no config.json; give one that" in capsys.readouterr().err


def test_export(tmp_path, capsys):
    """bfloat16 is widened exactly; going back, it is what it was, in files of the size that was asked for."""
    save_qwen(tmp_path / "source", dtype=torch.bfloat16)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    source, wide, narrow = (tmp_path / name for name in ("source", "wide", "narrow"))
    assert main(["hf", "export", str(source), str(wide), "--dtype", "fp32"]) == 0
    assert [path.name for path in wide.glob("*.safetensors")] == ["model.safetensors"]
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    assert (wide / "tokenizer.json").exists()
    assert main(["hf", "export", str(wide), str(narrow), "--dtype", "bf16", "--max-shard-size", "20KB"]) == 0
    assert len(list(narrow.glob("*.safetensors"))) > 3
    old, between, new = read_all(source), read_all(wide), read_all(narrow)
    assert old.keys() == between.keys() == new.keys()
    for name, tensor in old.items():
        assert between[name].dtype is torch.float32 and torch.equal(between[name], tensor.float())
        assert new[name].dtype is torch.bfloat16 and torch.equal(new[name], tensor)
    capsys.readouterr()
    assert main(["hf", "export", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 2
    assert "nowhere; give a checkpoint of a run" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["hf", "export", str(source), str(narrow)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["narrow", "source", "wide"]
