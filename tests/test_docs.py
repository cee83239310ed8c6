"""The programs in docs/: a custom training loop, transformers' and custom models, and schedules."""

import copy
import os
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from dualpipe import Pipeline
from dualpipe.cli import main
from dualpipe.nn.accumulators import local
from dualpipe.parallel import ExpertParallel, run_experts
from dualpipe.schedule import Costs, build, simulate
from hf_families import save_tiny
from ranks import run_ranks

DOCUMENT = Path(__file__).parents[1] / "docs" / "your-loop.md"
YOUR_MODEL = DOCUMENT.with_name("your-model.md")
SCHEDULES = DOCUMENT.with_name("schedules.md")


def programs(document):
    return re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def run_document(rank, folder, runs):
    """Run the program for each (folder name, number of steps); return what stage 0 saw, and this rank's parameters."""
    (text,) = programs(DOCUMENT)
    assert text.count("STEPS = 2, 4, 16, 32, 30") == text.count("% 10 ==") == text.count("T_max=STEPS") == 1
    text = text.replace("% 10 ==", "% 2 ==").replace("T_max=STEPS", "T_max=6")
    dist.init_process_group = dist.destroy_process_group = lambda *arguments: None  # there is one already
    results = []
    for name, count in runs:
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        os.chdir(f"{folder}/{name}")
        seen = {"__name__": "__main__"}
        exec(compile(text.replace("32, 30", f"32, {count}"), str(DOCUMENT), "exec"), seen)
        held = [local(p).detach().numpy().tobytes() for p in seen["decayed"]]
        results.append((seen["validation"], seen["norm"].item(), held))
        dist.barrier()
    return results


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_your_own_loop(tmp_path, ranks):
    found = run_ranks(run_document, ranks, str(tmp_path), [("whole", 6), ("parts", 4), ("parts", 6)], fresh=True)
    for whole, part, again in found:
        assert again[:2] == whole[:2] and part[1] != whole[1]
        assert again[2] == whole[2] != part[2]
    assert len({norm for rank in found for _, norm, _ in rank[:1]}) == 1, "the norm is that of all ranks"
    assert found[0][0][0] < found[0][1][0], "the validation loss falls"
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").glob("step-*"))[-1] == "step-00000006"


def run_finetuning(rank, folder):
    """Run the program for a model of transformers, on the tiny one in `folder`; return the losses on this rank."""
    text = programs(YOUR_MODEL)[0]
    assert text.count('SOURCE = "Qwen/Qwen3-30B-A3B"') == 1
    dist.init_process_group = dist.destroy_process_group = lambda *arguments: None  # there is one already
    os.chdir(folder)
    seen = {"__name__": "__main__"}
    text = text.replace('SOURCE = "Qwen/Qwen3-30B-A3B"', f"SOURCE = {folder!r}")
    exec(compile(text, str(YOUR_MODEL), "exec"), seen)
    batches = [[tensor.tolist() for tensor in seen["batch_of"](0, replica)] for replica in range(2)]
    return seen["losses"], batches


def test_experts_of_a_list_become_stacked_weights():
    seen = {"__name__": "__main__"}
    exec(compile(programs(YOUR_MODEL)[3], str(YOUR_MODEL), "exec"), seen)
    torch.manual_seed(0)
    experts = torch.nn.ModuleList(seen["Expert"](8, 12) for _ in range(4)).double()
    stacked = seen["StackedExperts"](experts)
    x, dy = torch.randn(2, 6, 8, dtype=torch.float64)
    weights, choices = torch.rand(6, 4, dtype=torch.float64).topk(2)
    dispatcher = ExpertParallel(4).dispatcher()
    rows, row_weights, plan = dispatcher.plan(x, weights, choices)
    y = dispatcher.finish(run_experts(stacked, rows, row_weights, plan), plan)
    y.backward(dy)
    outputs = torch.stack([expert(x) for expert in experts], 1)  # (6, 4, 8)
    expected = (outputs.gather(1, choices.unsqueeze(-1).expand(-1, -1, 8)) * weights.unsqueeze(-1)).sum(1)
    expected.backward(dy)
    torch.testing.assert_close(y, expected)
    for number, expert in enumerate(experts):
        gate_up = torch.cat([expert.gate.weight.grad, expert.up.weight.grad])
        torch.testing.assert_close(stacked.gate_up.weight.grad[number], gate_up)
        torch.testing.assert_close(stacked.down.weight.grad[number], expert.down.weight.grad)


@pytest.mark.slow
def test_your_model(tmp_path):
    """Weights saved by four ranks equal those that transformers and torch's AdamW reach in one process."""
    save_tiny(tmp_path, "qwen3_moe")
    (losses, batches), *_ = run_ranks(run_finetuning, 4, str(tmp_path), fresh=True, timeout=240)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for _ in range(5):
        replica_losses = []
        for tokens, labels in batches:
            logits = model(torch.tensor(tokens), use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten())
            (loss / 2).backward()
            replica_losses.append(loss.item())
        expected.append(replica_losses[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-6) and losses[-1] < losses[0]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    differences = {name: (p - q).abs().max().item()
                   for (name, p), q in zip(saved.named_parameters(), model.parameters(), strict=True)}
    # Changes are up to 5e-3. Losses are computed in float32, and AdamW divides by the size of a gradient: a rounding
    # counts where that is almost zero.
    assert max(differences.values()) < 1e-5, differences


def run_own_model(rank):
    """Run the program for custom modules; return the losses on this rank."""
    text = programs(YOUR_MODEL)[2]
    dist.init_process_group = dist.destroy_process_group = lambda *arguments: None  # there is one already
    seen = {"__name__": "__main__"}
    exec(compile(text, str(YOUR_MODEL), "exec"), seen)
    return seen["losses"]


def test_your_own_modules():
    """The losses equal those of the whole model, trained in one process."""
    losses, others = run_ranks(run_own_model, 2, fresh=True)
    seen = {"__name__": "document"}
    exec(programs(YOUR_MODEL)[2].partition("dist.init_process_group")[0], seen)
    model = torch.nn.Sequential(*(seen["build_stage"](number) for number in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(seen["ROWS"], seen["WIDTH"], generator=torch.Generator().manual_seed(0))
    expected = []
    for _ in range(seen["STEPS"]):
        loss = torch.nn.functional.mse_loss(model(x), x.roll(1, dims=-1))
        loss.backward()
        expected.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0] and others == []


def test_the_layer_of_your_own_moe_is_that_of_the_example():
    example = (YOUR_MODEL.parents[1] / "examples/wrap_your_moe.py").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```py\n(def segments.*?)```", YOUR_MODEL.read_text(encoding="utf-8"), re.DOTALL)
    assert textwrap.indent(lines, "    ") in example


@pytest.mark.slow
def test_the_programs_about_schedules(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for program in programs(SCHEDULES):
        exec(compile(program, str(SCHEDULES), "exec"), {"__name__": "document"})
    assert capsys.readouterr().out.startswith("60.4, 7.5% bubble (9, 9, 9, 9)\n")
    assert (tmp_path / "step.html").exists()


def test_a_schedule_of_your_own_runs():
    """The document's GPipe has the gradients of the whole model."""
    (program,) = [program for program in programs(SCHEDULES) if "def gpipe" in program]
    seen = {"__name__": "document"}
    exec(program.partition("schedule = gpipe")[0], seen)
    stage, batch = torch.nn.Linear(4, 4), torch.randn(6, 4)
    pipe = Pipeline([stage], schedule=seen["gpipe"](1, 3))
    pipe.step(batch, num_chunks=3, criterion=torch.nn.functional.mse_loss, labels=(batch,))
    expected = copy.deepcopy(stage)
    expected.zero_grad()
    (3 * torch.nn.functional.mse_loss(expected(batch), batch)).backward()
    torch.testing.assert_close(stage.weight.grad, expected.weight.grad)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_formulas_of_schedules(num_ranks):
    """The formulas are those in the table of docs/schedules.md, where F = I = W and a pair saves time."""
    F, B, W, pair, P = 1.0, 2.0, 1.0, 2.6, num_ranks
    costs = Costs(F=F, B=B, W=W, FB=pair)
    bubbles = {
        "gpipe": 2 * (P - 1) * (F + B), "1f1b": 2 * (P - 1) * (F + B), "zb1p": 2 * (P - 1) * (F + B - 2 * W),
        "zb2p": 2 * (P - 1) * F, "interleaved_1f1b": (P - 1) * (F + B), "interleaved_zb": (P - 1) * (F + B - 2 * W),
        "zbv": (P - 1) * F, "v_half": max(1, 3 * P - 7) * F, "v_min": max(2, 3 * P - 1 if P > 2 else 0) * F,
        "dualpipev": (P - 1) * (pair + B - 3 * W), "dualpipev_full": (P - 1) * (pair + B) - F,
    }
    M = 4 * P
    memory = {
        "gpipe": (2 * M, 2 * M), "1f1b": (2 * P, 2), "zb1p": (2 * P, P + 1), "zb2p": (4 * P - 2, 2 * P),
        "interleaved_1f1b": (3 * P - 1, P + 1), "interleaved_zb": (3 * P - 1, (3 * P + 1) / 2),
        "zbv": (2 * P, 2 * P), "v_half": (P + 2, P + 2), "v_min": (max(3, P), max(3, P)),
        "dualpipev": (2 * P + 1, 2 * P + 1), "dualpipev_full": (2 * P + 1, 2 * P + 1),
    }
    for name, bubble in bubbles.items():
        schedule = build(name, P, M)
        size = 2 * P // schedule.num_stages  # of a stage
        timeline = simulate(schedule, costs.scaled(size))
        assert max(timeline.bubble) == pytest.approx(bubble), name
        peaks = [size * peak for peak in timeline.memory_by_rank]
        assert (peaks[0], peaks[-1]) == memory[name], name
    rows = set(re.findall(r"^\| `(\w+)` \| 2?P \|", SCHEDULES.read_text(), re.M))
    assert bubbles.keys() | {"auto", "dualpipev_half"} == rows


def test_the_table_of_schedules_is_that_of_its_command(capsys):
    text = SCHEDULES.read_text(encoding="utf-8").replace("\\\n", " ")
    command, printed = re.search(r"^    dualpipe (schedule .*?) --svg \S+\n\n```\n(.*?)```", text, re.M | re.S).groups()
    assert main(command.split()) == 0 and capsys.readouterr().out.startswith(printed)
