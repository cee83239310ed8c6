"""The files of a training run small enough for a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL = {
    "model_type": "qwen3_moe", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
RUN = """
[model]
config = "config.json"
[data]
path = "text"
validation_fraction = 0.2
[parallel]
pp = 2
device = "cpu"
[train]
steps = 5
sequence_length = 16
micro_batch_size = 2
num_chunks = 4
eval_interval = 2
eval_batches = 2
print_interval = 1
[optimizer]
lr = 3e-3
[output]
dir = "out"
"""


def write_files(folder: Path, model: Mapping[str, Any] = MODEL) -> Path:
    """A config, a model's config.json and 40 files of text in `folder`; the path of the config."""
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "run.toml").write_text(RUN)
    (folder / "text").mkdir(exist_ok=True)
    for i in range(40):
        (folder / "text" / f"{i}.txt").write_text(f"{i}: the cat sat on the mat and the dog did not. " * (1 + i % 5))
    return folder / "run.toml"
