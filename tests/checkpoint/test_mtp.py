"""Layers for multi-token prediction, which are not trained: an export carries them from its source, or says 0."""

import json
import shutil

import pytest
import torch

from dualpipe.checkpoint import load_hf, save_hf
from dualpipe.cli import main
from hub import TINY, read_all, rewrite, save_family, stages_on_meta
from native import CONFIG as V3
from ranks import run_ranks

LAYERS = ("model.layers.4.", "model.layers.5.")
BIG = {"model.layers.4.mlp.experts.0.up_proj.weight": (24, 32), "model.layers.4.eh_proj.weight": (32, 64)}


def raw_tensors(folder):
    """(dtype code, shape, bytes) of each tensor by name, by the format's description alone; none in two files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                assert name not in found
                found[name] = entry["dtype"], entry["shape"], content[start + begin : start + end]
    return found


def mtp_of(folder):
    return {name: raw for name, raw in raw_tensors(folder).items() if name.startswith(LAYERS)}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def announced(tmp_path_factory):
    """A DeepSeek-V3 of four layers and two for prediction: FP8 with scales, and bytes that a cast would change."""
    folder = tmp_path_factory.mktemp("mtp") / "source"
    save_family(folder, "deepseek_v3")
    tensors = read_all(folder)
    generator = torch.Generator().manual_seed(1)
    for name, shape in BIG.items():
        noise = torch.randint(256, shape, dtype=torch.uint8, generator=generator)  # NaNs with payloads among them
        tensors[name] = noise.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(1, 1, generator=generator)
    noise = torch.randint(2**15 - 300, 2**15, (32,), dtype=torch.int16, generator=generator)
    tensors |= {"model.layers.4.enorm.weight": noise.view(torch.bfloat16), "model.layers.4.count": torch.tensor(7),
                "model.layers.4.shared_head.head.weight": torch.rand(61, 32, generator=generator).half(),
                "model.layers.5.mask": torch.tensor([True, False, True]), "model.layers.5.none": torch.zeros(0, 3),
                "model.layers.5.e8": torch.arange(5, dtype=torch.uint8).view(torch.float8_e8m0fnu)}
    rewrite(folder, tensors, num_nextn_predict_layers=2,
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def save_again(rank, source, target, shape, given=True):
    stages, mesh, plan = stages_on_meta(source, shape)
    load_hf(stages, source, mesh, plan)
    save_hf(stages, target, mesh, plan, source=source if given else None, max_shard_bytes=9000)


def test_carried_byte_for_byte(announced, tmp_path):
    save_again(0, announced, tmp_path / "alone", None)
    run_ranks(save_again, 2, str(announced), str(tmp_path / "two"), (1, 1, 2))
    for target in (tmp_path / "alone", tmp_path / "two"):
        assert mtp_of(target) == mtp_of(announced) and len(mtp_of(target)) == 10
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == raw_tensors(announced).keys()
        assert len(set(index["weight_map"].values())) > 3
        assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in raw_tensors(target).values())
        assert config_of(target)["num_nextn_predict_layers"] == 2 and "quantization_config" not in config_of(target)
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in tmp_path.iterdir()]
    assert files[0] == files[1]
    save_again(0, tmp_path / "alone", tmp_path / "third", None)  # what was written can be a source
    assert mtp_of(tmp_path / "third") == mtp_of(announced)


def test_without_a_source_none_are_announced(announced, tmp_path):
    with pytest.warns(UserWarning, match="says num_nextn_predict_layers = 0 instead of 2.* no source was given"):
        save_again(0, announced, tmp_path / "target", None, given=False)
    assert config_of(tmp_path / "target")["num_nextn_predict_layers"] == 0 and not mtp_of(tmp_path / "target")
    stages, mesh, plan = stages_on_meta(tmp_path / "target")  # the same model to everything else: here another's source
    load_hf(stages, tmp_path / "target", mesh, plan)
    save_hf(stages, tmp_path / "again", mesh, plan, source=announced)
    assert mtp_of(tmp_path / "again") == mtp_of(announced)


@pytest.mark.parametrize(("lost", "key", "layers"), [(5, "num_nextn_predict_layers", 1), (4, "num_mtp_layers", 0)])
def test_only_those_that_the_source_has_are_announced(announced, tmp_path, lost, key, layers):
    source = tmp_path / "source"
    shutil.copytree(announced, source)
    tensors = {name: tensor for name, tensor in read_all(source).items() if f"layers.{lost}." not in name}
    content = config_of(source)
    content[key] = content.pop("num_nextn_predict_layers")
    (source / "config.json").write_text(json.dumps(content))
    rewrite(source, tensors)
    with pytest.warns(UserWarning, match=f"says {key} = {layers} instead of 2.* has no tensors of more"):
        save_again(0, source, tmp_path / "target", None)
    assert config_of(tmp_path / "target")[key] == layers
    expected = {name: raw for name, raw in mtp_of(source).items() if layers and name.startswith("model.layers.4.")}
    assert mtp_of(tmp_path / "target") == expected


def test_on_the_command_line(announced, tmp_path, capsys):
    assert main(["hf", "check", str(announced)]) == 0
    assert "2 of 2 layers for multi-token prediction, 10 tensors," in capsys.readouterr().out
    assert main(["hf", "export", str(announced), str(tmp_path / "fp32"), "--dtype", "fp32"]) == 0
    assert mtp_of(tmp_path / "fp32") == mtp_of(announced) and config_of(tmp_path / "fp32")["dtype"] == "float32"
    run, alone, given = (str(tmp_path / name) for name in ("run", "alone", "given"))
    assert main(["hf", "import", str(announced), run]) == 0
    with pytest.warns(UserWarning, match="says num_nextn_predict_layers = 0 .* hf export --source"):
        assert main(["hf", "export", run, alone]) == 0
    assert config_of(tmp_path / "alone")["num_nextn_predict_layers"] == 0 and not mtp_of(tmp_path / "alone")
    assert main(["hf", "export", run, given, "--source", str(announced)]) == 0
    assert not capsys.readouterr().err
    assert mtp_of(tmp_path / "given") == mtp_of(announced) and (tmp_path / "given" / "tokenizer.json").exists()
    assert main(["hf", "export", str(announced), str(tmp_path / "x"), "--source", str(announced)]) == 2
    assert "--source is for a run's checkpoint" in capsys.readouterr().err


def test_memory_says_that_they_need_none(tmp_path, capsys):
    for name, config in (("v3", V3 | {"num_nextn_predict_layers": 1}), ("qwen", TINY | {"model_type": "qwen3_moe"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        (tmp_path / "run.toml").write_text(f'[model]\nconfig = "{tmp_path / name}.json"\n[data]\npath = "x"\n')
        assert main(["memory", str(tmp_path / "run.toml"), "--parallel.pp", "1"]) == 0
        assert ("1 layer for multi-token prediction: not trained" in capsys.readouterr().out) == (name == "v3")
