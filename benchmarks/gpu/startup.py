"""Part 1: the cost of starting up, with and without expandable segments and eager loading of torch's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

from gpu.session import Output

# Runs in a new interpreter for each setting, so that the variables are set before CUDA starts.
PROGRAM = """
import json, resource, sys, time
start = time.perf_counter()
def since():
    global start
    before, start = start, time.perf_counter()
    return start - before
import torch
row = {"import torch s": since()}
import dualpipe, dualpipe.kernels
row["import dualpipe s"] = since()
if torch.cuda.is_available():
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    row["context s"] = since()
    row["context MB"] = device_mb = (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 1e6
device = "cuda" if torch.cuda.is_available() else "cpu"
from dualpipe.kernels import swiglu
gate_up = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
since()
swiglu(gate_up).sum().item()
row["first kernel s"] = since()
swiglu(gate_up).sum().item()
row["second call s"] = since()
if device == "cuda":
    blocks = [torch.empty(2**28 + 2**20 * i, dtype=torch.uint8, device=device) for i in range(8)]
    del blocks[::2]
    whole = torch.empty(2**30, dtype=torch.uint8, device=device)
    row["reserved MB"] = torch.cuda.memory_reserved() / 1e6
    row["allocated MB"] = torch.cuda.memory_allocated() / 1e6
row["resident MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(json.dumps(row))
"""


def measure(output: Output) -> None:
    """Send a row for each combination of the two settings; a combination that cannot start is a failure."""
    loadings = ("LAZY",) if output.dry else ("LAZY", "EAGER")
    for loading, expandable in product(loadings, (False, True)):
        setting = {"CUDA_MODULE_LOADING": loading, "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
        done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], env=os.environ | setting, capture_output=True,
                              text=True)
        if done.returncode:
            output.failure(**setting, error=done.stderr)
        else:
            output.row(**setting, **json.loads(done.stdout))
