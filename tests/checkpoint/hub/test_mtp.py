"""Layers for multi-token prediction in Hugging Face checkpoints.

Not trained, an export carries them from its source, or says 0. Trained, they are loaded, saved and exported as all
others.
"""

import json
import re
import shutil
from math import prod
from pathlib import Path

import pytest
import torch

from dualpipe.checkpoint import latest, load_hf, save, save_hf, training_state
from dualpipe.checkpoint.hub.load import model_shapes
from dualpipe.checkpoint.hub.save import new_tensors
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.cli import main
from dualpipe.kernels.formats import FORMATS
from dualpipe.models import read_config
from dualpipe.models.stages import meta_stages
from dualpipe.parallel import Rule
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.quantized.quantize_model import quantizable
from dualpipe.schedule import build
from dualpipe.train.step import build_model, resolve_model_dtypes
from hub import add_mtp, read_all, rewrite, save_family, save_fp8, stages_on_meta
from native import Trainee, load_trainee, save_trainee
from ranks import run_ranks

LAYERS = ("model.layers.4.", "model.layers.5.")
BIG = {"model.layers.4.mlp.experts.0.up_proj.weight": (24, 32), "model.layers.4.eh_proj.weight": (32, 64)}


def raw_tensors(folder):
    """Return (dtype code, shape, bytes) of each tensor by name, by the format's description alone; no name twice."""
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


# -- trained

FP8 = (Rule("*", storage="fp8_block"),)

@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Build a DeepSeek-V3 with two layers for prediction as published: FP8, with extra copies of embedding and head."""
    folder = tmp_path_factory.mktemp("mtp") / "published"
    save_fp8(folder)
    add_mtp(folder, 2)
    return folder


def save_bfloat16(folder):
    """Save a bfloat16 DeepSeek-V3 with one layer for prediction; tensors published in float32 stay in float32."""
    save_family(folder, "deepseek_v3")
    rewrite(folder, {name: tensor if "e_score" in name else tensor.bfloat16()
                     for name, tensor in read_all(folder).items()})
    add_mtp(folder)


def there_and_back(rank, source, target, shape=(1, 1, 1), schedule="dualpipev", rules=(), given=True):
    """Load and save; return the names of the embedding and of the first layer for prediction on this rank."""
    config, device = read_config(source).with_mtp(), torch.device("cpu")
    mesh = build_mesh(*shape, device) if prod(shape) > 1 else None
    place = Mesh.of(mesh)
    plan = resolve_model_dtypes(config, torch.bfloat16, replicas=place.replicas, rules=rules, from_hf=source, mesh=mesh)
    stages = build_model(config, build(schedule, shape[0], 4), place.rank("pp"), dtypes=plan, device=device,
                         mesh=mesh, from_hf=source).stages
    save_hf(stages, target, mesh, plan, source=source if given else None, max_shard_bytes=60_000, quantized=bool(rules))
    return [name for stage in stages for name in stage.state_dict() if name in ("embed_tokens.weight",
                                                                                "layers.2.enorm.weight")]


def test_published_weights_come_back_bit_for_bit(published, tmp_path, recwarn):
    """Elements, scales and the copies of embedding and head come back; every layout writes the same files."""
    there_and_back(0, str(published), str(tmp_path / "alone"), rules=FP8)
    v, apart = (
        run_ranks(there_and_back, 2, str(published), str(tmp_path / schedule), (2, 1, 1), schedule, FP8)
        for schedule in ("dualpipev", "1f1b"))
    for target in tmp_path.iterdir():
        assert raw_tensors(target) == raw_tensors(published) and len(list(target.glob("*.safetensors"))) > 3
        assert config_of(target)["num_nextn_predict_layers"] == 2
        assert config_of(target)["quantization_config"] == config_of(published)["quantization_config"]
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in tmp_path.iterdir()]
    assert files[0] == files[1] == files[2]
    embedding, layer = "embed_tokens.weight", "layers.2.enorm.weight"
    assert v == [[embedding, embedding, layer], []] and apart == [[embedding], [embedding, layer]]
    assert not recwarn.list


def test_numbers_come_back_bit_for_bit(tmp_path):
    """A bfloat16 checkpoint comes back bit for bit, sharded too.

    It is saved with and without a source, and serves as the source of a model that does not train the layers.
    """
    source = tmp_path / "source"
    save_bfloat16(source)
    for target, given in (("given", True), ("none", False)):
        there_and_back(0, str(source), str(tmp_path / target), given=given)
        assert raw_tensors(tmp_path / target) == raw_tensors(source)
        assert config_of(tmp_path / target)["num_nextn_predict_layers"] == 1
    run_ranks(there_and_back, 2, str(source), str(tmp_path / "sharded"), (1, 1, 2))
    assert raw_tensors(tmp_path / "sharded") == raw_tensors(source)
    save_again(0, tmp_path / "none", tmp_path / "carried", None)
    assert mtp_of(tmp_path / "carried") == mtp_of(source)


def test_a_source_that_announces_none_does_not_change_that_they_are_written(tmp_path, recwarn):
    save_family(tmp_path / "source", "deepseek_v3")
    add_mtp(tmp_path / "source")
    stages, mesh, plan = stages_on_meta(tmp_path / "source", mtp=True)
    load_hf(stages, tmp_path / "source", mesh, plan)
    shutil.copytree(tmp_path / "source", tmp_path / "other")
    for announced in ({"num_mtp_layers": 0}, {}):  # an older name; config.json of a library that knows of no layers
        content = config_of(tmp_path / "other")
        content.pop("num_nextn_predict_layers", None)
        (tmp_path / "other" / "config.json").write_text(json.dumps(content | announced))
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
        save_hf(stages, tmp_path / "target", mesh, plan, source=tmp_path / "other")
        assert mtp_of(tmp_path / "target") == mtp_of(tmp_path / "source")
        assert config_of(tmp_path / "target").items() >= {**dict.fromkeys(announced, 1)}.items()
        assert not recwarn.list


def test_the_files_of_deepseek_v3_are_those_published():
    """91,991 tensors have 684,531,386,000 elements, with scales, in files of 688,586,727,753 bytes with headers."""
    config = read_config(Path(__file__).parents[3] / "examples/models/deepseek-v3").with_mtp()
    in_blocks = {weight.name for weight in quantizable(meta_stages(config)[0])}
    tensors = new_tensors(config, {name: FORMATS["fp8_block"] if name in in_blocks else
                                   torch.float32 if "e_score" in name else torch.bfloat16
                                   for name in model_shapes(config)})
    sizes = {name: prod(shape) for name, (_, shape) in tensors.items()}
    size = sum(sizes[name] * dtype.itemsize for name, (dtype, _) in tensors.items())
    assert (len(sizes), sum(sizes.values())) == (91_991, 684_531_386_000)
    assert 100 < (688_586_727_753 - size) / len(sizes) < 150, "what a header has for each"
    assert tensors["model.layers.61.eh_proj.weight"] == (torch.bfloat16, (7168, 14336))
    assert "model.layers.61.mlp.experts.255.up_proj.weight_scale_inv" in tensors


def test_a_copy_with_other_values_is_refused(tmp_path):
    """It would be trained apart from the model's head; the model has one for both."""
    save_family(tmp_path, "deepseek_v3")
    tensors = add_mtp(tmp_path)
    rewrite(tmp_path, tensors | {"model.layers.4.shared_head.head.weight": tensors["lm_head.weight"] * 2})
    with pytest.raises(ValueError, match=r"model.layers.4.shared_head.head.weight differs from"):
        stages_on_meta(tmp_path, mtp=True)
    stages_on_meta(tmp_path)


def test_copies_may_be_in_fp8_or_not_there_and_layers_must_be(published, tmp_path):
    config = stages_on_meta(published, mtp=True)[0][0].config
    assert config.hub_copies == {
        "model.layers.2.embed_tokens.weight": "embed_tokens.weight", "model.layers.2.shared_head.head.weight":
        "lm_head.weight", "model.layers.3.embed_tokens.weight": "embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight"}
    shutil.copytree(published, tmp_path / "other")
    tensors, scaled, lost = read_all(published), "model.layers.2.shared_head.head.weight", "model.layers.3.hnorm.weight"
    tensors[scaled] = tensors[scaled].to(torch.float8_e4m3fn)
    tensors[f"{scaled}_scale_inv"] = torch.ones(1, 2)
    del tensors["model.layers.3.embed_tokens.weight"]
    rewrite(tmp_path / "other", tensors)
    there_and_back(0, str(tmp_path / "other"), str(tmp_path / "target"), rules=FP8)
    assert raw_tensors(tmp_path / "target") == raw_tensors(published)
    del tensors[lost]
    rewrite(tmp_path / "other", tensors)
    with pytest.raises(ValueError, match=rf"does not fit the model.*{lost}: missing.*mtp.weight = 0"):
        there_and_back(0, str(tmp_path / "other"), str(tmp_path / "again"), rules=FP8)


def test_through_a_checkpoint_of_a_run_on_the_command_line(tmp_path, capsys, recwarn):
    source = tmp_path / "source"
    save_bfloat16(source)
    capsys.readouterr()
    run, given, alone = (str(tmp_path / name) for name in ("run", "given", "alone"))
    assert main(["hf", "import", str(source), run, "--mtp"]) == 0
    assert main(["hf", "export", run, given, "--source", str(source)]) == 0
    assert main(["hf", "export", run, alone]) == 0
    for target in (tmp_path / "given", tmp_path / "alone"):
        assert raw_tensors(target) == raw_tensors(source) and config_of(target)["num_nextn_predict_layers"] == 1
    assert not capsys.readouterr().err and not recwarn.list
    held = []
    for options in ([], ["--mtp"]):
        assert main(["hf", "check", str(source), "--pp", "2", *options]) == 0
        told = capsys.readouterr().out
        assert ("1 of 1 layer for multi-token prediction" in told) != bool(options) and "it can be loaded" in told
        held.append(int(re.search(r"holds at most ([\d,]+) parameters", told)[1].replace(",", "")))
    assert held[1] > held[0] + 32 * 64
    content = config_of(source) | {"num_nextn_predict_layers": 0}
    (source / "config.json").write_text(json.dumps(content))
    assert main(["hf", "import", str(source), str(tmp_path / "none"), "--mtp"]) == 2
    assert "announces no layers for multi-token prediction" in capsys.readouterr().err


def options_of(schedule):
    return {"schedule": schedule, "mtp": True, "num_nextn_predict_layers": 2}


def spread(rank, folder):
    trainee = Trainee((2, 1, 1), **options_of("1f1b"))
    trainee.fill(rank)
    training = training_state(trainee.model.stages)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has other values on rank 1"):
        save(folder, {"embed_tokens.weight": training["embed_tokens.weight"]}, step=1, mesh=trainee.mesh)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [
    [("1f1b", 2, 1, 1), ("dualpipev", 1, 2, 1)],
    [("1f1b", 2, 2, 1), ("1f1b", 2, 1, 1), ("dualpipev", 2, 1, 1), ("dualpipev", 1, 2, 1)],
], ids=["some", "all"])
def test_the_embedding_of_two_ranks_is_saved_once_and_loaded_by_both(tmp_path, layouts):
    """The first and the last stage have the embedding, with its master and moments: in a V on one rank, else on two."""
    folders = []
    for schedule, *shape in layouts:
        folders.append(str(tmp_path / "-".join([schedule, *map(str, shape)])))
        names = run_ranks(save_trainee, prod(shape), folders[-1], shape, options_of(schedule))
        holds = ["embed_tokens.weight" in of_rank for of_rank in names]
        assert sum(holds) == (len(holds) if schedule == "1f1b" else shape[1])
        stored, _ = Checkpoint.read(latest(folders[-1])).read_tensors()
        ours = [each.boxes for name, each in stored.items() if "embed_tokens" in name and each.shape]
        assert list(map(len, ours)) == [shape[1]] * 3  # the master and its moments, once for each of "dp"
        if prod(shape) == 2:
            assert not any(run_ranks(load_trainee, 2, folders, shape, options_of(schedule))), (schedule, shape)
    assert not load_trainee(0, folders, (1, 1, 1), options_of("dualpipev"))
    run_ranks(spread, 2, str(tmp_path / "spread"))
