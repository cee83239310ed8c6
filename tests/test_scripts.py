"""A test runs every script under benchmarks/ and every file of examples/, at its smallest sizes and on CPU."""

import json
import os
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from command import Command
from hub import FAMILIES, TINY
from run_files import write_files
from scripts import BENCHMARKS, fork_script, run_script

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
                                  reason="Triton is not installed, or interprets and so cannot compile")

# Arguments, and the expected output. The status also reports goals, which the times of a moment may miss.
ON_CPU = {
    "wgrad_split.py": ("--sizes small --repeats 2", r"\nsmall +\d+ +\d+ +\d+ "),
    "engine_overhead.py": ("--ranks 1 2 --rounds 1 --microbatches-per-rank 1",
                           r"\n +1 +\d.*\n +2 +\d.*\ngoal: host|: needs torch 2.12 or newer, "),
    "schedule_front.py": ("--ranks 2 --communication 0.2 --effort 100000",
                          r"\n\| 2, 4 \| 20% \| 4 \| [\d.]+ \| .*\ngoals: met"),
    "bench_checkpoint.py": ("--mb 4 --rounds 1", r"2 ranks with \d MB each\n.*\n +process +[\d.]+ s blocked .* goal "),
    "bench_optimizer.py": ("--rounds 1 --config config.json", r"parameters on 2 ranks: AdamW .* ms, Muon .* ms"),
    "bench_packing.py": ("--mb 0.1 --rounds 1 --vocab 500",
                         r"tokens, \d+ cores, tokenizers .*\npack +[\d,]+ tokens/s .*\ngoal: pack at least 0.8 of "),
    "bench_head.py": ("--tokens 64 --vocab 512 --hidden 16 --part-mb 0.05 --rounds 1",
                      r"\nfloat32 +16 +\d+ .*\nbfloat16 +16 .*\ngoal: parts take at most 1.05 of the plain form"),
    "bench_host.py": ("--rounds 1 --calls 10", r"\nadd +\d.*\ngrouped wgrad .* goal: at most 25 us.*\nlayer .* goal: "),
    "bench_overlap.py": ("--device cpu --repeats 1 --tokens 32 --costs .",
                         r"wrote overlap_tiny_32.json\n.*\ngoal: F&B at most 0.75 of F \+ B"),
    "bench_training.py": ("--device cpu --model config.json --steps 1 --mesh 2x1x1 --schedule dualpipev --overlap on",
                          r"\n +torch +1f1b .* 5\.\d+ .*\ngoal: dualpipev with overlap is at least as fast .* 1 rows"),
    "tune_grouped_gemm.py": ('--offline --arch 90 --most 1 --workers 1 --classes "weight narrow"',
                             r"sm_90 weight narrow: 1 survive, 0 of 1 candidates dropped\n +GemmConfig"),
}
COMPILING = ("bench_host.py", "tune_grouped_gemm.py")
STARTING_RANKS = ("engine_overhead.py", "bench_checkpoint.py", "bench_optimizer.py", "bench_training.py")
SLOW = (*STARTING_RANKS, "bench_host.py", "tune_grouped_gemm.py")
ON_A_GPU = (
    "bench_attention.py", "bench_expert_layer.py", "bench_grouped_gemm.py", "bench_memory_bound.py", "bench_overlap.py",
    "bench_quantized.py", "bench_training.py", "tune_grouped_gemm.py",
)
ELSEWHERE = {  # the tests that run the others
    "gpu_session.py": "benchmarks/test_gpu_session.py",
    "kernel_budget.py": "benchmarks/test_kernel_budget.py",
    "compile_kernels.py": "benchmarks/test_compile_kernels.py",
    "wrap_your_model.py": "test_examples.py",
    "wrap_your_moe.py": "test_examples.py",
    "fine_tune.py": "test_examples.py",
    "slurm.sbatch": "train/launch/test_environment.py",
}


def scripts():
    return [path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()]


def test_every_script_is_run_by_a_test():
    examples = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sbatch")]
    assert {*scripts(), *examples} == {*ON_CPU, *ON_A_GPU, *ELSEWHERE}
    for name, file in ELSEWHERE.items():
        assert Path(name).stem in (ROOT / "tests" / file).read_text()
    folders_and_configs = {path.name for path in EXAMPLES.iterdir()} - {*examples}
    data = {"models", "tiny-cpu", "lora-tiny.jsonl"}
    assert folders_and_configs == {*data, *(path.name for path in EXAMPLES.glob("*.toml"))}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[NEEDS_TRITON] * (name in COMPILING) + [pytest.mark.slow] * (name in SLOW))
    for name in ON_CPU
])
def test_runs_on_cpu(name, tmp_path):
    arguments, shown = ON_CPU[name]
    write_files(tmp_path)
    arguments = [quoted or word for quoted, word in re.findall(r'"(.*?)"|(\S+)', arguments)]
    done = fork_script(name, *arguments, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert re.search(shown, done.stdout, re.S), done.stdout + done.stderr
    assert done.returncode == ("MISSED" in done.stdout) and "FAILED" not in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTING_RANKS)
def test_those_that_start_ranks_do_so_in_an_interpreter_of_their_own(name, tmp_path):
    """Scripts that start ranks run as users run them. Above, ranks are forked from the script and inherit its state."""
    arguments, shown = ON_CPU[name]
    write_files(tmp_path)
    done = run_script(name, *arguments.split(), folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert re.search(shown, done.stdout, re.S), done.stdout + done.stderr
    assert done.returncode == ("MISSED" in done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_a_gpu_it_says_so(name):
    done = fork_script(name, CUDA_VISIBLE_DEVICES="")
    assert done.stdout == f"{name}: needs a CUDA device, and there is none here; nothing was measured\n", done.stderr
    assert done.returncode == 0


def test_a_rank_that_fails_ends_the_benchmark(tmp_path):
    """The benchmark ends at once, with the rank's reason, instead of waiting for its results."""
    done = fork_script("bench_checkpoint.py", "--mb", "0", "--rounds", "0", folder=tmp_path)
    assert done.returncode == 1 and re.search(r"FAILED: rank [01]: ", done.stderr), done.stdout + done.stderr


# -- examples/*.toml

COMMON = (
    "--model.config", "config.json", "--data.path", "text", "--data.tokenizer", "bytes", "--parallel.device", "cpu",
    "--parallel.pp", "1", "--parallel.cp", "1", "--parallel.ep", "1", "--train.steps", "1", "--train.compile", "False",
    "--train.sequence_length", "16", "--train.micro_batch_size", "1", "--train.num_chunks", "2",
    "--train.eval_interval", "0", "--output.dir", "out",
)
SIZES = {"qwen3_moe": TINY, **FAMILIES}
FAST_EXAMPLES = ("deepseek-v3", "qwen3-30b-a3b")


def shrunken(path):
    """Return the content of config.json for an example's model with few and small layers."""
    config = json.loads(path.read_text())
    sizes = {name: size for name, size in SIZES[config["model_type"]].items() if name in config}
    config |= sizes | {"vocab_size": 257, "num_hidden_layers": 2}
    if config.get("q_lora_rank"):
        config["q_lora_rank"] = 12
    config.pop("experts_per_token", None)  # the same as num_experts_per_tok
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    return config


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=[] if path.stem in FAST_EXAMPLES else pytest.mark.slow)
    for path in sorted(EXAMPLES.glob("*.toml")) if path.stem != "lora-tiny"  # test_examples.py trains its own model
])
def test_an_example_trains_a_step_of_a_shrunken_model(path, tmp_path):
    """The run uses all settings of the file except sizes, layout, data and compilation."""
    write_files(tmp_path, shrunken(EXAMPLES / tomllib.loads(path.read_text())["model"]["config"]))
    command = Command(tmp_path, ["train", str(path), *COMMON], dict(os.environ))
    out, err = command.communicate(280)
    assert command.returncode == 0, out + err
    (row,) = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    assert row["step"] == 1 and 5 < row["loss"] < 7, "a guess among 257"
