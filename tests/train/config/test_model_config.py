"""Choice of the implementation of a model, and settings that are refused for models of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualpipe import cli
from dualpipe.train.config.load import load_config
from dualpipe.train.config.model_config import flops_per_token, read_model
from dualpipe.train.config.schema import LoRAConfig
from hf_families import config_of
from run_files import write_files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with run.toml; the working directory."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_missing_transformers_names_the_package_to_install(folder, monkeypatch):
    monkeypatch.setattr("dualpipe.train.config.model_config.find_spec", lambda name: None)
    describe_model("olmoe")
    with pytest.raises(ValueError, match="transformers is not installed"):
        read_model(load_config("run.toml", []))


def describe_model(family, **changes):
    """Write a tiny model's config.json."""
    content = config_of(family, vocab_size=257, **changes).to_dict()
    Path("config.json").write_text(json.dumps(content))
    return content


def test_auto_backend_depends_on_family_and_options(folder):
    def model_class(*options):
        return type(read_model(load_config("run.toml", list(options))).config).__name__

    assert model_class() == "Qwen3MoeConfig"
    assert model_class("--model.backend", "transformers") == "TransformersModel"
    own = json.loads(Path("config.json").read_text())
    Path("config.json").write_text(json.dumps(own | {"attention_dropout": 0.1}))
    assert model_class("--model.backend", "transformers") == "TransformersModel"
    with pytest.raises(ValueError, match=r'attention_dropout=0\.1 .*; model\.backend = "transformers"'):
        model_class()
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        model_class("--model.backend", "dualpipe")
    describe_model("olmoe")
    assert model_class() == "TransformersModel"
    with pytest.raises(ValueError, match="'olmoe' is not one of those supported: qwen3_moe"):
        model_class("--model.backend", "dualpipe")
    Path("config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ValueError, match="model_type 'nothing' is unknown to"):
        model_class()


@pytest.mark.parametrize("options, message", [
    ("--parallel.cp 2", "parallel.cp = 2: "),
    ("--parallel.ep 3", "parallel.ep = 3: 8 experts cannot be divided evenly among 3"),
    ("--mtp.weight 0.3", "mtp.weight = 0.3: "),
    ("--optimizer.qk_clip 100", "optimizer.qk_clip = 100.0: "),
    ("--router.balance 0.01", "router.balance = 0.01: "),
    ("--router.z_loss 0.01", "router.z_loss = 0.01: "),
    ("--router.bias_update_rate 0.01", "router.bias_update_rate = 0.01: "),
    ("--memory.recompute layer experts:0-1", "memory.recompute = ['experts:0-1']: "),
    ("--train.compile True", "train.compile = True: "),
    ("--dtypes.rules *.experts,storage=fp8_block", "dtypes.rules = ['*.experts,storage=fp8_block']: "),
    ("--dtypes.fp8_dispatch True", "dtypes.fp8_dispatch = True: "),
    ("--export.quantized True", "export.quantized = True: "),
])
def test_unsupported_settings_are_refused_in_one_line(folder, capsys, options, message):
    describe_model("olmoe")
    assert cli.main(["dtypes", "run.toml", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_experts_of_a_dense_model_are_not_divided(folder, capsys):
    describe_model("llama")
    assert cli.main(["dtypes", "run.toml", "--parallel.ep", "2"]) == 2
    assert "parallel.ep = 2: a LlamaForCausalLM has no experts" in capsys.readouterr().err


def test_other_commands_refuse_transformers_models_in_one_line(folder, capsys):
    describe_model("olmoe")
    assert cli.main(["plan", "run.toml"]) == 2
    assert "dualpipe plan" in capsys.readouterr().err
    assert cli.main(["dtypes", "run.toml"]) == 0
    assert "model.layers.0-3.mlp.experts.gate_up_proj" in capsys.readouterr().out


def test_memory_counts_activations_and_draws_them(folder, capsys):
    describe_model("olmoe")
    assert cli.main(["memory", "run.toml", "--timeline", "memory.svg"]) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert float(row.split()[header.split().index("activations") - 2]) > 0
    assert "<svg" in (folder / "memory.svg").read_text()


def test_separate_documents_are_refused_for_layers_that_mix_them(folder, capsys):
    describe_model("qwen3_next")
    assert cli.main(["dtypes", "run.toml", "--data.separate_documents", "True"]) == 2
    assert "from one document into the next" in capsys.readouterr().err


RANK = 2
ADAPTERS = {  # FLOPs of a token in all adapters, forward: of queries, of two experts' down_proj, and of the head
    ("q_proj",): 4 * 2 * RANK * (32 + 32),
    ("q_proj", "experts.down_proj", "lm_head"): 4 * 2 * RANK * (32 + 32 + 2 * (32 + 32)) + 2 * RANK * (32 + 257),
}


@pytest.mark.parametrize("targets", ADAPTERS, ids=str)
@pytest.mark.parametrize("backend", ["dualpipe", "transformers"])
def test_flops_of_adapters_leave_out_weight_gradients_of_what_is_frozen(folder, backend, targets):
    pytest.importorskip("peft", reason='needs peft: pip install "dualpipe[hf]"')
    model = read_model(load_config("run.toml", ["--model.backend", backend])).config
    full = flops_per_token(model, 64)
    matrices = flops_per_token(model, 0) / 3
    lora = LoRAConfig(rank=RANK, targets=targets)
    assert flops_per_token(model, 64, lora) == pytest.approx(full - matrices + 3 * ADAPTERS[targets])


@pytest.mark.parametrize("backend", ["dualpipe", "transformers"])
def test_layers_before_the_first_adapter_have_the_flops_of_a_forward(folder, backend):
    pytest.importorskip("peft", reason='needs peft: pip install "dualpipe[hf]"')
    model = read_model(load_config("run.toml", ["--model.backend", backend])).config
    lora = LoRAConfig(rank=RANK, targets=("lm_head",))
    factors = 2 * RANK * (32 + 257)
    head = 2 * 32 * 257
    assert flops_per_token(model, 64, lora) == pytest.approx(flops_per_token(model, 64) / 3 + head + 3 * factors)


def test_flops_per_token_equal_those_of_our_own_model(folder):
    own = read_model(load_config("run.toml", [])).config
    theirs = read_model(load_config("run.toml", ["--model.backend", "transformers"])).config
    assert flops_per_token(theirs, 64) == pytest.approx(flops_per_token(own, 64))
