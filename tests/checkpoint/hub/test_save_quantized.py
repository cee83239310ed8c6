"""FP8 blocks and MXFP4 of Hugging Face checkpoints keep their bytes, in and out."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers import quantizer_finegrained_fp8, quantizer_mxfp4

from dualpipe.checkpoint import hub_dtypes, load_hf, save_hf
from dualpipe.checkpoint.hub.load import find_cut_block, open_hf
from dualpipe.checkpoint.tensors import bytes_of
from dualpipe.kernels.formats import FORMATS
from dualpipe.models import build_stages, read_config
from dualpipe.models.stages import meta_stages
from dualpipe.parallel import DTypePolicy, Rule, resolve_dtypes, shard
from dualpipe.parallel.fsdp.materialize import build_on_meta
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import quantizable
from hub import FP8_CONFIG, FP8_SIZES, read_all, rewrite, save_family, save_fp8, save_mxfp4, stages_on_meta
from models import from_hub
from ranks import run_ranks


def whole(shape):
    return tuple(slice(0, size) for size in shape)


def quantized(tensor, format, place=None):
    """Return a tensor of the checkpoint as a quantized tensor, or its part at `place`."""
    place = place or whole(tensor.shape)
    shape = [part.stop - part.start for part in place]
    return QuantizedTensor(tensor.quantized(place, FORMATS[format]), shape, torch.float32, FORMATS[format])


def test_fp8_blocks_become_block_rows(tmp_path):
    files = save_fp8(tmp_path)
    tensors = open_hf(tmp_path, read_config(tmp_path))[1]
    for name, parts in {
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": ["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"],
        "layers.0.mlp.up_proj.weight": ["model.layers.0.mlp.up_proj.weight"],
        "layers.1.mlp.experts.gate_up_proj.weight": [f"model.layers.1.mlp.experts.{expert}.{half}_proj.weight"
                                                     for expert in range(4) for half in ("gate", "up")],
    }.items():
        kept, format = quantized(tensors[name], "fp8_block"), FORMATS["fp8_block"]
        assert torch.equal(kept.dequantize(), tensors[name][whole(kept.shape)].float())
        rows, columns = kept.shape[-2:]
        assert torch.equal(format.scales(kept.block_rows, columns).flatten(0, 1),
                           torch.cat([files[f"{part}_scale_inv"] for part in parts]))
        elements = format.elements(kept.block_rows, columns).flatten(1, 2)[:, :rows].flatten(0, 1)
        assert torch.equal(elements, torch.cat([files[part].view(torch.uint8) for part in parts]))
        # Nothing but elements and scales is there: what is compared, hashed and saved is the same for the same weight.
        again = QuantizedTensor.empty(kept.shape, format, dtype=torch.float32)
        format.elements(again.block_rows, columns).copy_(format.elements(kept.block_rows, columns))
        format.scales(again.block_rows, columns).copy_(format.scales(kept.block_rows, columns))
        assert torch.equal(again.block_rows, kept.block_rows)
        # Quantized from its values it would be another: these scales are not ours.
        assert not torch.equal(QuantizedTensor.quantize(kept.dequantize(), format).block_rows, kept.block_rows)


def test_mxfp4_blocks_become_block_rows(tmp_path):
    files = save_mxfp4(tmp_path)
    tensors = open_hf(tmp_path, read_config(tmp_path))[1]
    for name in ("gate_up_proj", "down_proj"):
        fused = f"model.layers.1.mlp.experts.{name}"
        expected = convert_moe_packed_tensors(files[f"{fused}_blocks"], files[f"{fused}_scales"]).mT.float()
        kept = quantized(tensors[f"layers.1.mlp.experts.{name}.weight"], "mxfp4")
        assert torch.equal(kept.dequantize(), expected)
        assert not torch.equal(QuantizedTensor.quantize(expected, "mxfp4").block_rows, kept.block_rows)


def test_a_part_is_the_part_of_the_whole(tmp_path):
    save_fp8(tmp_path / "fp8")
    save_mxfp4(tmp_path / "mxfp4")
    for format, places in {"fp8_block": [(1, 3, 0, 128), (2, 4, 128, 256), (3, 4, 0, 256), (0, 0, 0, 256)],
                           "mxfp4": [(1, 3, 5, 6), (0, 4, 100, 192), (3, 4, 0, 192)]}.items():
        folder = tmp_path / format.partition("_")[0]
        reader, tensors = open_hf(folder, read_config(folder))
        tensor = tensors["layers.1.mlp.experts.gate_up_proj.weight"]
        all_of_it = quantized(tensor, format)
        for first, last, top, bottom in places:
            before, place = reader.bytes_read, (slice(first, last), slice(top, bottom), slice(0, tensor.shape[2]))
            assert torch.equal(quantized(tensor, format, place).block_rows, all_of_it[place].block_rows)
            # No byte besides is read: a gate's half of the rows reads no up projection.
            elements = (last - first) * (bottom - top) * tensor.shape[2]
            share = elements * 17 // 32 if format == "mxfp4" else elements + 4 * 2 * (elements // (128 * 192))
            assert reader.bytes_read - before == share


def test_of_another_form_there_are_no_blocks(tmp_path):
    save_fp8(tmp_path)
    tensors = open_hf(tmp_path, read_config(tmp_path))[1]
    for name, format in (("layers.1.mlp.experts.down_proj.weight", "mxfp8"), ("embed_tokens.weight", "fp8_block"),
                         ("layers.1.mlp.experts.down_proj.weight", "fp8_block_pow2")):
        assert tensors[name].quantized(whole(tensors[name].shape), FORMATS[format]) is None


@pytest.mark.parametrize("changes, message", [
    ({"moe_intermediate_size": 136}, r"experts.0.gate_proj.weight is rows 0 to 136 of it, which are no whole blocks"),
    ({"block": 64}, r"experts.0.gate_proj.weight is in blocks of \(64, 64\) in the files, and fp8_block is in"),
    ({"plain": "model.layers.1.mlp.experts.2.up_proj.weight"}, r"experts.2.up_proj.weight is torch.bfloat16 in the f"),
])
def test_blocks_that_cannot_be_kept(tmp_path, changes, message):
    changes = dict(changes)
    block, plain = changes.pop("block", 128), changes.pop("plain", None)
    files = save_fp8(tmp_path, **changes)
    if plain:
        del files[f"{plain}_scale_inv"]
        files[plain] = files[plain].bfloat16()
    for name in files:
        if name.endswith("_scale_inv"):
            files[name] = torch.ones([-(-size // block) for size in files[name.removesuffix("_scale_inv")].shape])
    rewrite(tmp_path, files, quantization_config=FP8_CONFIG | {"weight_block_size": [block, block]})
    tensor = open_hf(tmp_path, read_config(tmp_path))[1]["layers.1.mlp.experts.gate_up_proj.weight"]
    with pytest.raises(ValueError, match=message):
        tensor.quantized(whole(tensor.shape), FORMATS["fp8_block"])
    stages, plan = on_meta(tmp_path, "fp8_block")
    with pytest.raises(ValueError, match=message):
        load_hf(stages, tmp_path, None, plan)
    assert all(param.device.type == "meta" for param in stages[0].parameters())
    stored(tmp_path, "mxfp8")  # of the values of whatever blocks


def test_scales_that_are_powers_of_two_lose_nothing_in_fp8_block_pow2(tmp_path):
    """DeepSeek-V3.1's scales are such: the bytes may differ, the values are equal."""
    files = save_fp8(tmp_path)
    for name, scales in files.items():
        if name.endswith("_scale_inv"):
            files[name] = torch.exp2(torch.randint(-30, -3, scales.shape).float())
    rewrite(tmp_path, files)
    values = open_hf(tmp_path, read_config(tmp_path))[1]["layers.1.mlp.experts.down_proj.weight"][whole((4, 192, 128))]
    assert torch.equal(QuantizedTensor.quantize(values, "fp8_block_pow2").dequantize(), values)


PATTERNS = {"fp8_block": "*", "mxfp8": "*", "mxfp4": "*.experts"}


def on_meta(folder, format, dtype=torch.bfloat16, trained=False, pattern=None, others=()):
    """Return the model in one stage, without values, with weights stored in a format; and its plan."""
    config = read_config(folder)
    stages = build_on_meta(lambda: build_stages(config, 1))
    stages[0].to(dtype).requires_grad_(trained)
    rules = [Rule(pattern or PATTERNS[format], storage=format), *others]
    plan = resolve_dtypes(stages, DTypePolicy(dtype, torch.float32, dtype, rules), hub_dtypes(folder, config))
    shard(stages[0], None, plan)
    return stages, plan


def stored(folder, *args, **options):
    stages, plan = on_meta(folder, *args, **options)
    load_hf(stages, folder, None, plan)
    return stages, plan


SAVERS = {"fp8_block": save_fp8, "mxfp4": save_mxfp4}


def assert_same_bytes(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype is tensor.dtype and bytes_of(actual[name]) == bytes_of(tensor), name


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("format", SAVERS)
def test_written_as_they_came(tmp_path, format, trained):
    files = SAVERS[format](tmp_path / "source")
    stages, plan = stored(tmp_path / "source", format, trained=trained)
    save_hf(stages, tmp_path / "again", None, plan, source=tmp_path / "source", quantized=True)
    save_hf(stages, tmp_path / "without", None, plan, quantized=True)
    for target in ("again", "without"):
        assert_same_bytes(read_all(tmp_path / target), files)
        told = json.loads((tmp_path / target / "config.json").read_text())["quantization_config"]
        others = told.pop("modules_to_not_convert", None)
        if format == "fp8_block":
            assert told == FP8_CONFIG and others is None
        else:
            attention = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"]
            assert told == {"quant_method": "mxfp4"} and others == ["lm_head", *attention]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("format", SAVERS)
def test_written_in_numbers(tmp_path, format, trained, dtype):
    """An unquantized save has the values of the masters of trained weights, whatever the bytes are."""
    SAVERS[format](tmp_path / "source")
    stages, plan = stored(tmp_path / "source", format, dtype, trained)
    tensors = open_hf(tmp_path / "source", stages[0].config)[1]
    expected = {name: tensor[whole(tensor.shape)] for name, tensor in tensors.items()}
    for name, param in stages[0].named_parameters():
        if isinstance(param, QuantizedTensor) and trained:
            assert torch.equal(param.master, expected[name].float())  # there is nothing better to start from
            param.master.mul_(1.1)
            expected[name] = expected[name].float() * 1.1
    save_hf(stages, tmp_path / "again", None, plan, source=tmp_path / "source")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    again = open_hf(tmp_path / "again", stages[0].config)[1]
    for name, tensor in again.items():
        kept = torch.float32 if "correction_bias" in name else dtype
        assert tensor.dtype is kept and torch.equal(tensor[whole(tensor.shape)], expected[name].to(kept)), name


@pytest.mark.parametrize("format", SAVERS)
def test_transformers_reads_what_is_written(tmp_path, format, monkeypatch):
    """transformers dequantizes without a GPU, and without accelerate, which it asks for first."""
    for module in (quantizer_finegrained_fp8, quantizer_mxfp4):
        monkeypatch.setattr(module, "is_accelerate_available", lambda: True)
    # It takes a weight of two blocks for one of two equal halves, so partial blocks stand alone here.
    sizes = {"hidden_size": 128, "intermediate_size": 128, "kv_lora_rank": 64} if format == "fp8_block" else {}
    SAVERS[format](tmp_path / "source", **sizes)
    stages, plan = stored(tmp_path / "source", format)
    save_hf(stages, tmp_path / "again", None, plan, quantized=True)
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16), stages[0]
    reference = from_hub(ours.config, {name: tensor.shape for name, tensor in ours.state_dict().items()},
                         theirs.state_dict())
    for name, tensor in ours.state_dict().items():
        numbers = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        assert torch.equal(numbers.bfloat16(), reference[name].bfloat16()), name


def test_layers_that_are_not_quantized_are_named(tmp_path):
    """The list of unquantized layers includes those only gathered in a format, and layers carried from the source."""
    files = save_fp8(tmp_path / "source")
    carried = {"model.layers.2.eh_proj.weight": torch.randn(192, 384).bfloat16()}
    rewrite(tmp_path / "source", files | carried, num_nextn_predict_layers=1)
    stages, plan = stored(tmp_path / "source", "fp8_block", pattern="*.experts.*", others=[
        Rule("*.self_attn", gather="mxfp8")])
    assert stages[0].layers["1"].self_attn.o_proj.weight.format.name == "mxfp8"  # as nobody is here to gather from
    save_hf(stages, tmp_path / "again", None, plan, source=tmp_path / "source", quantized=True)
    assert read_all(tmp_path / "again")["model.layers.1.self_attn.o_proj.weight"].dtype is torch.bfloat16
    told = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    names = told.pop("modules_to_not_convert")
    assert told == FP8_CONFIG and names[0] == "lm_head" and names[-1] == "model.layers.2"
    assert "model.layers.1.self_attn.o_proj" in names
    assert len(names) == 2 + 2 * 5 + 3 + 3  # of two layers' attention, a dense MLP and a shared expert


@pytest.mark.parametrize("family, sizes, format, pattern, message", [
    ("deepseek_v3", {}, "mxfp8", "*.down_proj", r"down_proj.weight cannot be .* in mxfp8, and checkpoints of deepseek"),
    ("deepseek_v3", {}, "mxfp4", "*.o_proj", r"o_proj.weight cannot be exported quantized: it is in mxfp4, and check"),
    ("gpt_oss", {}, "mxfp4", "*.o_proj", r"in checkpoints of gpt_oss, experts alone are in mxfp4"),
    ("deepseek_v3", {"moe_intermediate_size": 136}, "fp8_block", "*.experts", r"gate_proj.weight is rows 0 to 136 of"),
    ("deepseek_v3", {}, None, "*", r"the dtype plan stores no weight in fp8_block; give it a rule"),
])
def test_what_the_hub_does_not_have_is_not_exported(tmp_path, family, sizes, format, pattern, message):
    save_family(tmp_path / "source", family, **(FP8_SIZES if family == "deepseek_v3" else {}) | sizes)
    config = read_config(tmp_path / "source")
    stages = build_on_meta(lambda: build_stages(config, 1))
    rules = [Rule(pattern, torch.float32, storage=format)]
    plan = resolve_dtypes(stages, DTypePolicy(torch.float32, torch.float32, torch.float32, rules))
    with pytest.raises(ValueError, match=message):
        save_hf(stages, tmp_path / "again", None, plan, quantized=True)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite"])
def test_weights_of_real_models_are_whole_blocks(model):
    """Gate and up of experts meet at a block boundary: nothing is refused, or rounded again."""
    config = read_config(Path(__file__).parents[3] / "examples/models" / model)
    weights = list(quantizable(meta_stages(config)[0]))
    assert len(weights) > 200
    for each in weights:
        parts = config.hub_parts(each.name, each.param.shape)[0]
        assert not find_cut_block(parts, each.param.shape, FORMATS["fp8_block"]), each.name


def load_and_save(rank, source, target, shape, format):
    """Load and save through ranks; only experts are quantized, and each rank has whole blocks of them."""
    rules = [Rule("*.experts", storage=format)]
    stages, mesh, plan = stages_on_meta(source, shape, rules=rules)
    load_hf(stages, source, mesh, plan)
    save_hf(stages, target, mesh, plan, source=source, quantized=True)


@pytest.mark.parametrize("format, shape", [("fp8_block", (1, 1, 2)), *(
    pytest.param(format, shape, marks=pytest.mark.slow) for format in SAVERS
    for shape in ((1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2)))])
def test_ranks_write_what_one_writes(tmp_path, format, shape):
    files = SAVERS[format](tmp_path / "source")
    stages, plan = stored(tmp_path / "source", format, torch.float32, pattern="*.experts")
    save_hf(stages, tmp_path / "alone", None, plan, source=tmp_path / "source", quantized=True)
    run_ranks(load_and_save, prod(shape), str(tmp_path / "source"), str(tmp_path / "ranks"), shape, format)
    alone, ranks = (read_all(tmp_path / target) for target in ("alone", "ranks"))
    assert_same_bytes(ranks, alone)
    kept = [name for name in files if ".experts." in name and not name.endswith("bias")]
    assert_same_bytes(*({name: each[name] for name in kept} for each in (ranks, files)))
    assert (tmp_path / "alone/config.json").read_bytes() == (tmp_path / "ranks/config.json").read_bytes()
