"""Every command in a block of README.md, docs/, benchmarks/README.md and CONTRIBUTING.md runs.

Commands are shrunken: fewer steps, shorter sequences, one rank, a small checkpoint. A command that cannot run is
checked as far as it can be.
"""

import json
import os
import re
import shlex
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from chats import random_chats, save_chat_tokenizer, write_chats
from command import Command
from dualpipe import cli
from dualpipe.train.config.load import load_config
from hf_families import tiny_model
from hub import save_qwen
from run_files import write_files
from scripts import fork_script

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md",
             ROOT / "CONTRIBUTING.md")
NO_COMMANDS = (  # first words of other blocks: output, a sketch, settings, a list of folders
    "error: ", "WARNING: ", "watchdog: ", "first step ", "stopped by SIGTERM", "tensor ", "ms a step ", "row  pp",
    "parity FAILED: ", "B  finish", "B combine", "[", "dualpipe/runtime/ ", "weight gradients of rank",
    "olmoe (transformers' ", "resuming from ", "schedule  ", "options:",
)

# Arguments that are added to a command, and replaced in it, to make it small.
SHORT = "--data.path text --train.steps 1 --train.sequence_length 16 --train.micro_batch_size 1 --train.eval_interval 0"
ONE_RANK = f"{SHORT} --parallel.pp 1 --train.num_chunks 1"
FROM_HUB = (f"{ONE_RANK} --model.config '' --parallel.ep 1 --parallel.device cpu --train.compile False "
            "--train.dtype fp32 --train.num_chunks 2 --data.tokenizer bytes --output.dir out/hub")
LORA = f"{ONE_RANK} --init.from_hf CHECKPOINT --data.chat False --data.tokenizer bytes --checkpoint.interval 1"
TRAINED = {
    'dualpipe train examples/tiny-cpu.toml --train.dtype bf16 --dtypes.rules "*,gather=mxfp8"': ONE_RANK,
    "dualpipe train examples/qwen3-30b-a3b.toml --init.from_hf CHECKPOINT --export.to_hf OUT": FROM_HUB,
    "dualpipe train examples/qwen3-30b-a3b-8x80gb.toml --init.from_hf CHECKPOINT --checkpoint.interval 100 "
    "--export.to_hf auto": FROM_HUB.replace("out/hub", "out/node"),
    "dualpipe train examples/tiny-cpu.toml --data.path TEXT --output.dir out/mine --train.steps 100 "
    "--checkpoint.interval 50": f"{SHORT} --checkpoint.interval 1",
    "dualpipe train examples/tiny-cpu.toml --data.path TEXT --output.dir out/mine --train.steps 200 "
    "--checkpoint.interval 50": f"{SHORT} --checkpoint.interval 1 --output.dir out/longer",
    'dualpipe train examples/tiny-cpu.toml --model.config "" --init.from_hf tiny-olmoe --router.balance 0 '
    "--parallel.ep 2 --train.steps 20 --output.dir out/olmoe": f"{SHORT} --parallel.pp 1 --train.num_chunks 1",
    "dualpipe train examples/tiny-cpu.toml --optimizer.lr 3e-3 --train.steps 200": SHORT,
    "dualpipe train --trace steps=9..11 examples/tiny-cpu.toml --train.steps 12":
        SHORT.replace("steps 1 ", "steps 12 "),
    "dualpipe train examples/tiny-cpu.toml --train.steps 2 --parallel.schedule auto --parallel.schedule_costs "
    "F=1,B=1.6,W=0.8,FB=2 --parallel.schedule_memory 4": f"{SHORT} --train.num_chunks 2",
    "dualpipe train examples/deepseek-v3.toml --mtp.weight 0.3 --mtp.last_weight 0.1 --mtp.last_steps 333":
        f"{ONE_RANK} --model.config examples/tiny-cpu/deepseek-v3.json --parallel.ep 1 --parallel.device cpu "
        "--train.compile False --train.num_chunks 2 --mtp.last_steps 1 --data.tokenizer bytes --output.dir out/mtp",
    "dualpipe train examples/tiny-cpu.toml --model.config examples/tiny-cpu/deepseek-v3.json --mtp.weight 0.3":
        ONE_RANK,
    "dualpipe train examples/lora-tiny.toml": LORA,
    "dualpipe train examples/lora-tiny.toml --export.merged True --export.to_hf out/lora-tiny/merged":
        f"{LORA} --output.dir out/lora-merged",
    "dualpipe parity examples/tiny-cpu.toml --pp 2 --ep 2": f"{SHORT} --pp 1 --ep 1",
    "dualpipe parity examples/tiny-cpu.toml --pp 2 --dtype bf16": f"{SHORT} --pp 1",
}
IN_PROCESS = {  # replaced text: its replacement
    "dualpipe hf check CHECKPOINT --pp 4 --ep 8": {"--pp 4 --ep 8": "--pp 2 --ep 2"},
    "dualpipe hf check CHECKPOINT --pp 2 --ep 4": {"--ep 4": "--ep 2"},
    "dualpipe memory examples/qwen3-30b-a3b.toml": {},
    "dualpipe memory examples/qwen3-30b-a3b-8x80gb.toml": {},
    "dualpipe memory examples/qwen3-30b-a3b-2x8x80gb.toml": {},
    "dualpipe plan examples/qwen3-30b-a3b-2x8x80gb.toml --gpus 16":
        {"qwen3-30b-a3b-2x8x80gb": "tiny-cpu", "--gpus 16": "--gpus 1"},
    "dualpipe schedule --ranks 4 --microbatches 10 --name dualpipev --costs F=1,B=2,W=1,FB=2.6 --compare "
    "dualpipev_full,zbv,interleaved_1f1b,interleaved_zb,v_half,v_min,1f1b,zb1p,zb2p --svg dualpipev.svg": {},
    "dualpipe plan examples/qwen3-30b-a3b.toml --gpus 64 --gpu h100 --global-batch 4194304 --rows 8":
        {"qwen3-30b-a3b": "tiny-cpu", "--gpus 64": "--gpus 1", "4194304": "1024"},
    "dualpipe data pack PATH... --tokenizer bytes --out DIR": {"PATH...": "text"},
    "dualpipe data pack PATH... --tokenizer CHECKPOINT/tokenizer.json --out data":
        {"PATH...": "text", "CHECKPOINT/": "", "--out data": "--out packed"},
    "dualpipe hf import CHECKPOINT out/checkpoints": {},
    "dualpipe checkpoint ls out/checkpoints": {},
    "dualpipe checkpoint verify out/checkpoints": {},
    "dualpipe checkpoint show out/checkpoints/step-00000500": {"step-00000500": "step-00000000"},
    "dualpipe checkpoint clean out/checkpoints": {},
    "dualpipe checkpoint ls out/mine/checkpoints": {"out/mine": "out"},
    "dualpipe hf export out/checkpoints OUT": {"OUT": "exported"},
    "dualpipe hf export out/mine/checkpoints out/mine/exported":
        {"out/mine/checkpoints out/mine/exported": "out/checkpoints exported-mine"},
    "dualpipe hf export CHECKPOINT OUT --dtype bf16": {"OUT": "dequantized"},
    "dualpipe data pack PATH... --tokenizer CHECKPOINT --text-key text --out data": {"PATH...": "records.jsonl",
                                                                                          "CHECKPOINT": "CHAT"},
    "dualpipe data pack PATH... --chat --tokenizer CHECKPOINT --out chats": {"PATH...": "chats.jsonl",
                                                                             "CHECKPOINT": "CHAT"},
    "dualpipe data show chats --tokenizer CHECKPOINT --document 3": {"CHECKPOINT": "CHAT"},
    'dualpipe dtypes examples/tiny-cpu.toml --parallel.ep 2 --train.dtype bf16 --dtypes.rules "*.mlp.gate,'
    'compute=fp32" "lm_head,save=fp32" "*.experts,gather=mxfp8"': {},
    "dualpipe trace summary out/tiny-cpu/trace-9-11.json --svg trace.svg --html trace.html": {},
    "dualpipe trace costs out/tiny-cpu/trace-9-11.json --out costs.json": {},
    "dualpipe schedule --ranks 2 --microbatches 4 --costs costs.json --compare zbv": {},
    "dualpipe schedule --ranks 4 --microbatches 10 --costs F=1,B=2,W=1,FB=2.6,p2p=0.1 --compare zbv --html "
    "schedules.html": {},
    "dualpipe memory examples/tiny-cpu.toml --timeline memory.png": {},
    "dualpipe schedule --name auto --ranks 4 --microbatches 8 --compare dualpipev,zbv --costs F=1,B=1.3,W=0.65,I=1,"
    "FB=1.95,FF=1.3,FI=1.3,FW=1.3,II=1.3,IW=1.3,BI=1.95": {"--ranks 4": "--ranks 2", "--microbatches 8":
                                                           "--microbatches 2"},
}


def takes(arguments):
    """Fail unless `dualpipe` accepts the command, and the settings after its CONFIG."""
    args = cli._parser().parse_args(arguments)
    if vars(args).get("config"):
        args, overrides = cli._parse_after_config(args)
        load_config(args.config, overrides)


def command_is_taken(command):
    """tests/train/test_guard.py and tests/train/parity/test_command.py run these."""
    takes(shlex.split(command)[1:])


def batch_script_is_taken(command):
    """tests/train/launch/test_environment.py runs it."""
    words = shlex.split(command)
    script = words.index("examples/slurm.sbatch")
    assert words[1] == "--nodes" and words[2] in ("2", "4")
    assert subprocess.run(["bash", "-n", words[script]]).returncode == 0
    takes(["train", *words[script + 1:]])


def launched_command_is_taken(command):
    """tests/train/launch/test_environment.py has what srun sets; mpirun starts torchrun."""
    words = shlex.split(command)
    if "torchrun" in words:
        torchrun_takes_it(shlex.join(words[words.index("torchrun"):]))
    else:
        takes(words[words.index("dualpipe") + 1:])


def packages_exist(command):
    """Packages are in the environment of the tests, and extras in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    *_, package = shlex.split(command)
    name, _, wanted = package.removesuffix("]").partition("[")
    assert set(filter(None, wanted.split(","))) <= extras.keys()
    assert name == "." or find_spec(name)


def torchrun_takes_it(command):
    """tests/test_examples.py and tests/test_docs.py run these scripts."""
    words = shlex.split(command.replace("CONFIG", "examples/tiny-cpu.toml"))[1:]
    args = get_args_parser().parse_args(words)
    if args.module:
        assert args.training_script == "dualpipe"
        takes(args.training_script_args)
    else:
        assert args.training_script in ("loop.py", "finetune.py", "own_model.py") or Path(args.training_script).exists()


def example_exists(command):
    """tests/test_examples.py runs it."""
    assert Path(shlex.split(command)[1]).exists()


def make_would_run_it(command):
    shown = [*shlex.split(command), "--dry-run", "--always-make"]
    done = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search("pytest|ruff|benchmarks/|tiny-cpu.toml|wheels.sh|docs/generate/", done.stdout), done.stdout


def script_says_it_needs_a_gpu(command):
    script, *arguments = shlex.split(command)[1:]
    done = fork_script(ROOT / script, *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and "needs a CUDA device" in done.stdout, done.stderr


def shell_parses_it(command):
    assert subprocess.run(["bash", "-nc", command]).returncode == 0


CHECKED = {  # checks of commands that replace running them, by the beginning of a command
    "dualpipe replay ": command_is_taken,
    "dualpipe parity --model ": command_is_taken,
    "sbatch ": batch_script_is_taken,
    "srun ": launched_command_is_taken,
    "mpirun ": launched_command_is_taken,
    "torchrun ": torchrun_takes_it,
    "make ": make_would_run_it,
    "pip install ": packages_exist,
    "python benchmarks/": script_says_it_needs_a_gpu,
    "python examples/": example_exists,
    "python -m venv ": shell_parses_it,
    "source ": shell_parses_it,
    "export ": shell_parses_it,
}


def blocks(text):
    """Return the code blocks, fenced without a language or indented, as lists of lines."""
    found, language, previous = [], None, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            language = None if language is not None else line.strip()[3:]
            if language is not None:
                found.append((language, []))
        elif language is not None:
            found[-1][1].append(line)
        elif line.startswith("    "):
            if not previous.startswith("    "):
                found.append(("", []))
            found[-1][1].append(line)
        previous = line if language is None else ""
    return [[line for line in lines if line.strip()] for language, lines in found if language in ("", "text", "sh",
                                                                                                  "bash", "console")]


def commands(block):
    """Yield the commands of a block: one a line, or on several lines that end in a backslash; without comments."""
    text = "\n".join(line.strip() for line in block).replace("\\\n", " ")
    for line in text.splitlines():
        yield re.sub(r"\s+", " ", re.sub(r"\s#.*", "", line)).strip()


DOCUMENTED = {
    command: document.name for document in DOCUMENTS for block in blocks(document.read_text(encoding="utf-8"))
    if not block[0].strip().startswith(NO_COMMANDS) for command in commands(block)
}


NOT_RUN = [command for command in DOCUMENTED if command not in TRAINED and command not in IN_PROCESS]


def test_every_documented_command_is_tried():
    assert [command for command in NOT_RUN if not command.startswith(tuple(CHECKED))] == [], "list it in a table above"
    assert {*TRAINED, *IN_PROCESS} - DOCUMENTED.keys() == set(), "no longer documented"


def test_commands_are_found_in_blocks():
    text = "text\n\n    a b \\\n        --c  # why\n    d\n\n```toml\nx = 1\n```\n\n```\ne\n```\n    - no block\n"
    assert [list(commands(block)) for block in blocks(text)] == [["a b --c", "d"], ["e"], ["- no block"]]


def small_tokenizer(path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, "</s>": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the commands' working directory: examples, some text, records, a small checkpoint called CHECKPOINT."""
    folder = tmp_path_factory.mktemp("commands")
    write_files(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "records.jsonl").write_text(json.dumps({"text": "the cat"}) + "\n")
    small_tokenizer(folder / "tokenizer.json")
    save_qwen(folder / "CHECKPOINT", vocab_size=257)
    save_chat_tokenizer(folder / "CHAT")
    write_chats(folder / "chats.jsonl", random_chats(4))
    tiny_model("olmoe", torch.float32, vocab_size=257).save_pretrained(folder / "tiny-olmoe")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


def run_in_process(command, capsys):
    for part, small in IN_PROCESS[command].items():
        assert part in command
        command = command.replace(part, small)
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert out and not err.startswith("error"), command


def run_training(command, folder):
    words = shlex.split(f"{command} {TRAINED[command]}")[1:]
    process = Command(folder, words, os.environ)
    out, err = process.communicate(250)
    assert process.returncode == 0 and out, f"{command}\n{out}{err}"


OF_CHECKPOINTS = "/checkpoints"
TRACE = next(command for command in TRAINED if "--trace" in command)
FEW = ("--init.from_hf tiny-olmoe", "dualpipe parity examples/tiny-cpu.toml --pp 2 --ep 2")


@pytest.mark.parametrize("command", [
    pytest.param(command, marks=[] if any(part in command for part in FEW) else pytest.mark.slow)
    for command in TRAINED if command != TRACE
])
def test_trains(command, here):
    run_training(command, here)


@pytest.mark.slow
def test_a_trace_gives_costs_for_schedules(here, capsys):
    run_training(TRACE, here)
    for command in (command for command in IN_PROCESS if "trace-9-11" in command or "costs.json" in command):
        run_in_process(command, capsys)


def test_checkpoints_are_listed_and_exported(here, capsys):
    (begin,) = (command for command in IN_PROCESS if "hf import" in command)
    for command in (begin, *(command for command in IN_PROCESS if OF_CHECKPOINTS in command and command != begin)):
        run_in_process(command, capsys)


def test_conversations_are_packed_and_shown(here, capsys):
    pack, show = (command for command in IN_PROCESS if " chats" in command)
    assert "data pack" in pack
    for command in (pack, show):
        run_in_process(command, capsys)


@pytest.mark.parametrize("command", [command for command in IN_PROCESS if not re.search(
    f"trace-9-11|costs.json| chats|{OF_CHECKPOINTS}", command)])
def test_prints(command, here, capsys):
    run_in_process(command, capsys)


@pytest.mark.parametrize("command", NOT_RUN)
def test_is_taken(command, here):
    (check,) = [check for beginning, check in CHECKED.items() if command.startswith(beginning)]
    check(command)


def test_settings_in_blocks_are_toml():
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        indented = ["\n".join(block) for block in blocks(text) if block[0].strip().startswith("[")]
        for block in (*indented, *re.findall(r"```toml\n(.*?)```", text, re.S)):
            tomllib.loads(block)
