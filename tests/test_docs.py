"""The programs in docs/: a loop of one's own, which goes on from its checkpoints, and a model of transformers."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from dualpipe.nn.deferral import local
from hf_families import save_tiny
from ranks import run_ranks

DOCUMENT = Path(__file__).parents[1] / "docs" / "your-own-loop.md"
YOUR_MODEL = DOCUMENT.with_name("your-model.md")


def run_document(rank, folder, runs):
    """Run it once for each (name of a folder, number of steps); what stage 0 saw, and this rank's parameters."""
    (text,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
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
        results.append((seen["held_out"], seen["norm"].item(), held))
        dist.barrier()
    return results


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_your_own_loop(tmp_path, ranks):
    found = run_ranks(run_document, ranks, str(tmp_path), [("whole", 6), ("parts", 4), ("parts", 6)], fresh=True)
    for whole, part, again in found:
        assert again[:2] == whole[:2] and part[1] != whole[1]
        assert again[2] == whole[2] != part[2]
    assert len({norm for rank in found for _, norm, _ in rank[:1]}) == 1, "the norm is that of all ranks"
    assert found[0][0][0] < found[0][1][0], "the held-out loss falls"
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").glob("step-*"))[-1] == "step-00000006"


def run_finetuning(rank, folder):
    """The program for a model of transformers, on the tiny one in `folder`; the losses that this rank has seen."""
    text, _ = re.findall(r"```python\n(.*?)```", YOUR_MODEL.read_text(encoding="utf-8"), re.DOTALL)
    assert text.count('SOURCE = "Qwen/Qwen3-30B-A3B"') == 1
    dist.init_process_group = dist.destroy_process_group = lambda *arguments: None  # there is one already
    os.chdir(folder)
    seen = {"__name__": "__main__"}
    text = text.replace('SOURCE = "Qwen/Qwen3-30B-A3B"', f"SOURCE = {folder!r}")
    exec(compile(text, str(YOUR_MODEL), "exec"), seen)
    batches = [[tensor.tolist() for tensor in seen["batch_of"](0, replica)] for replica in range(2)]
    return seen["losses"], batches


def test_your_model(tmp_path):
    """What four ranks have saved are the weights that transformers and torch's AdamW come to in one process."""
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
    # Of changes up to 5e-3. Losses are computed in float32, and AdamW divides by the size of a gradient: a rounding
    # counts where that is all but zero.
    assert max(differences.values()) < 1e-5, differences
