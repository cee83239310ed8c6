"""The program in docs/your-own-loop.md trains, and goes on from its checkpoints bit for bit."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from dualpipe.nn.deferral import local
from ranks import run_ranks

DOCUMENT = Path(__file__).parents[1] / "docs" / "your-own-loop.md"


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
