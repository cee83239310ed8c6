"""Training that starts from a Hugging Face checkpoint and leaves with one."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dualpipe import cli
from dualpipe.checkpoint import save_hf
from dualpipe.models import read_config
from dualpipe.train.config.load import load_config
from dualpipe.train.metrics import read_metrics
from dualpipe.train.step import build_whole, resolve_model_dtypes
from hub import read_all, rewrite, save_family, save_fp8, save_qwen

pytestmark = pytest.mark.usefixtures("without_evaluation")
SIZES = {"vocab_size": 257, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def train(run_folder, dualpipe, monkeypatch):
    """Five steps; the losses. On one rank in this process, which is faster."""
    monkeypatch.chdir(run_folder)

    def run(out, *options):
        arguments = ["train", "run.toml", "--output.dir", out, *options]
        if "--parallel.pp" in options:
            assert cli.main(arguments) == 0
        else:
            done = dualpipe(run_folder, *arguments)
            assert done.returncode == 0, done.stderr
        return [row["loss"] for row in read_metrics(run_folder / out / "metrics.jsonl")]

    return run


ALONE = ["--parallel.pp", "1"]


def from_and_to(checkpoint, out):
    return ["--init.from_hf", str(checkpoint), "--model.config", "", "--export.to_hf", out]


@pytest.mark.slow
def test_in_and_out_in_two_layouts(run_folder, train, capsys):
    checkpoint = run_folder / "qwen"
    first = save_qwen(checkpoint, **SIZES)
    (checkpoint / "tokenizer.json").write_text("{}")
    on_bytes = ("--data.tokenizer", "bytes")
    losses = train("sharded", *from_and_to(checkpoint, "a"), *on_bytes, "--parallel.ep", "2")
    again = train("whole", *from_and_to(checkpoint, "b"), *on_bytes, *ALONE, "--train.num_chunks", "8")
    assert "was packed as bytes" in capsys.readouterr().out
    assert losses == pytest.approx(again, rel=1e-5)
    assert losses[-1] < losses[0]
    models = (AutoModelForCausalLM.from_pretrained(run_folder / out) for out in "ab")
    trained, expected = (dict(model.named_parameters()) for model in models)
    assert trained.keys() == expected.keys()
    for name, start in first.named_parameters():
        moved = (expected[name] - start).norm()
        assert moved > 0 and (trained[name] - expected[name]).norm() < 0.01 * moved, name
    assert (run_folder / "a" / "tokenizer.json").read_text() == "{}"


FLOAT32 = ("e_score_correction_bias", "router", "sinks", "norm.weight", "lm_head")


@pytest.mark.slow
@pytest.mark.parametrize("family, options", [
    ("deepseek_v3", ["--router.bias_update_rate", "0.01"]), ("gpt_oss", []),
])
def test_a_checkpoint_of_two_dtypes_is_trained_and_keeps_them(run_folder, train, family, options):
    """On two pipelines that share the experts."""
    save_family(run_folder / family, family, vocab_size=257)
    source = {name: tensor if any(part in name for part in FLOAT32) else tensor.bfloat16()
              for name, tensor in read_all(run_folder / family).items()}
    rewrite(run_folder / family, source)
    losses = train(f"{family}-metrics", *from_and_to(family, f"{family}-out"), *options, "--parallel.ep", "2",
                   "--train.dtype", "bf16")
    assert losses[0] == pytest.approx(math.log(257), abs=0.1) and losses[-1] < losses[0]
    trained = read_all(run_folder / f"{family}-out")
    assert trained.keys() == source.keys()
    for name, tensor in source.items():
        assert trained[name].dtype is tensor.dtype and trained[name].isfinite().all(), name
        is_one_expert = ".experts." in name and tensor.dim() == 2  # which may get no token
        assert is_one_expert or not torch.equal(trained[name], tensor), name
        if name.endswith("e_score_correction_bias"):
            assert ((trained[name] - tensor) / 0.01).round().abs().max() in range(1, 6)


def test_the_model_goes_beside_the_metrics_and_that_of_an_earlier_run_is_kept(run_folder, train, capsys):
    """With fewer positions in config.json than a sequence has tokens, which is said."""
    config = json.loads((run_folder / "config.json").read_text())
    (run_folder / "few.json").write_text(json.dumps(config | {"max_position_embeddings": 15}))
    once = [*ALONE, "--train.steps", "1", "--train.eval_batches", "0", "--export.to_hf", "auto"]
    said = []
    for seed in ("0", "1"):
        train("beside", *once, "--model.config", "few.json", "--train.seed", seed)
        said.append(capsys.readouterr().out)
    assert "the model: beside/hf\n" in said[0]
    assert "exceeds the model's 15 positions" in said[0]
    assert {path.name for path in (run_folder / "beside").glob("hf*")} == {"hf", "hf.1"}
    first, second = (read_all(run_folder / "beside" / name)["lm_head.weight"] for name in ("hf.1", "hf"))
    assert not torch.equal(first, second)


def test_layers_that_are_not_trained_are_carried_also_by_a_run_that_goes_on(run_folder, train):
    save_family(run_folder / "v3", "deepseek_v3", vocab_size=257)
    mtp = {"model.layers.4.eh_proj.weight": torch.randn(32, 64).to(torch.float8_e4m3fn),
           "model.layers.4.eh_proj.weight_scale_inv": torch.ones(1, 1)}
    rewrite(run_folder / "v3", read_all(run_folder / "v3") | mtp, num_nextn_predict_layers=1)
    for steps in ("1", "2"):
        train("mtp", *from_and_to("v3", f"v3-{steps}"), *ALONE, "--train.steps", steps, "--checkpoint.interval", "1",
              "--train.eval_batches", "0")
        exported = read_all(run_folder / f"v3-{steps}")
        for name, tensor in mtp.items():
            assert exported[name].dtype is tensor.dtype
            assert torch.equal(exported[name].view(torch.uint8), tensor.view(torch.uint8))
        assert json.loads((run_folder / f"v3-{steps}" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("ranks", [ALONE, pytest.param(["--parallel.ep", "2"], marks=pytest.mark.slow)])
def test_fp8_blocks_are_trained_and_leave_as_fp8_blocks(run_folder, train, ranks):
    files = save_fp8(run_folder / "fp8", vocab_size=257)
    rule = ["--dtypes.rules", "*.experts,storage=fp8_block"]
    target, metrics = ("-".join((each, *ranks)).replace("-", "") for each in ("out", "metrics"))
    losses = train(metrics, *from_and_to("fp8", target), "--export.quantized", "True", *ranks, *rule)
    assert losses[-1] < losses[0]
    trained = read_all(run_folder / target)
    for name in (each for each in files if ".experts." in each):
        before, after = files[name], trained[name]
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert not torch.equal(after.float(), before.float())
    told = json.loads((run_folder / target / "config.json").read_text())["quantization_config"]
    assert told["quant_method"] == "fp8" and "model.layers.0.mlp.up_proj" in told["modules_to_not_convert"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--init.from_hf", "nothing", "--model.config", ""], "init.from_hf: "),
        (["--init.from_hf", "small"], "the checkpoint does not fit the model"),
        (["--export.to_hf", "text"], "export.to_hf = 'text' exists"),
        (["--export.to_hf", "run.toml/out"], "export.to_hf = 'run.toml/out'"),
        (["--init.from_hf", "small", "--model.config", "small/one.json", "--export.to_hf", "new"],
         "model.config is another model"),
        (["--export.to_hf", "new", "--export.quantized", "True"], "no weight in fp8_block"),
        (["--export.to_hf", "new", "--export.quantized", "True", "--dtypes.rules", "*.experts,storage=mxfp8"],
         "it is in mxfp8"),
        (["--parallel.layers_per_stage", "2", "2", "1"], "layers_per_stage must be 2 numbers that add up to 4"),
    ],
)
def test_what_cannot_be_is_said_once_before_anything_is_trained(run_folder, monkeypatch, capsys, options, message):
    if not (run_folder / "small").exists():
        config = save_qwen(run_folder / "small", **SIZES).config.to_dict()
        (run_folder / "small" / "one.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    monkeypatch.chdir(run_folder)
    assert cli.main(["train", "run.toml", "--output.dir", "none", *ALONE, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1
    assert not (run_folder / "none" / "metrics.jsonl").exists()


def test_a_checkpoint_that_does_not_fit_is_said_once_by_several_ranks(run_folder, dualpipe):
    save_qwen(run_folder / "other", **SIZES)
    done = dualpipe(run_folder, "train", "run.toml", "--init.from_hf", "other")
    assert done.returncode == 2
    assert "the checkpoint does not fit the model" in done.stderr and done.stderr.count("error: ") == 1


def test_the_lines_of_the_quickstart_generate_text_with_what_the_example_exports(tmp_path, monkeypatch, capsys):
    root = Path(cli.__file__).parents[1]
    example = load_config(root / "examples/tiny-cpu.toml")
    folder = example.export_directory
    blocks = re.findall("```py\n(.*?)```", (root / "docs/quickstart.md").read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "from_pretrained" in block]
    assert f'from_pretrained("{folder}")' in lines and example.data.tokenizer == "bytes"
    monkeypatch.chdir(tmp_path)
    model = read_config(example.model_path)
    stage = build_whole(model, dtypes=torch.float32, device=torch.device("cpu"))
    folder.parent.mkdir(parents=True)
    save_hf([stage], folder, None, resolve_model_dtypes(model, torch.float32, replicas=1))
    exec(lines.replace("max_new_tokens=200", "max_new_tokens=8"), {})
    assert capsys.readouterr().out.startswith("def main(")


@pytest.mark.slow
def test_another_cut_trains_the_same(train):
    assert train("cut", "--parallel.layers_per_stage", "0", "2", "1", "1") == pytest.approx(train("even"), rel=1e-5)


@pytest.mark.slow
def test_compiled_parts_train_the_same(run_folder, train, monkeypatch):
    few = [*ALONE, "--train.steps", "2", "--train.eval_batches", "0", "--train.eval_interval", "0"]
    losses = train("plain", *few)
    graphs = []

    def record(graph, inputs):  # without code generation, which takes a minute here: what is traced is the same
        graphs.append({str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes})
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    assert train("compiled", *few, "--train.compile", "True") == pytest.approx(losses, rel=1e-5)
    assert any({"cat", "softmax"} <= names for names in graphs), "from the rotary embedding to the values in one piece"
    assert all(row["tflops_per_rank"] > 0 for row in read_metrics(run_folder / "compiled" / "metrics.jsonl"))
