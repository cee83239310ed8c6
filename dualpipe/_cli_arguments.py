"""Arguments of the `dualpipe` command's subcommands: keywords of `ArgumentParser.add_argument`, by name. Pure data."""

from __future__ import annotations

import argparse
from typing import Any

Arguments = dict[str, dict[str, Any]]

CONFIG: Arguments = {
    "config": dict(metavar="CONFIG", help="a TOML file, such as examples/tiny-cpu.toml"),
    "overrides": dict(nargs=argparse.REMAINDER, metavar="--TABLE.FIELD VALUE",
                      help="settings that override those of the file; `CONFIG --help` lists all"),
}
CONFIG_OR_MODEL: Arguments = {**CONFIG, "config": {**CONFIG["config"], "nargs": "?"}}
PARITY: Arguments = {
    "--model": dict(metavar="MODULE:FUNCTION|DIR", help="instead of CONFIG: a function that returns a "
                    "dualpipe.train.parity.CutModel, or a directory of a transformers model; see "
                    "docs/your-loop.md#parity"),
    "--pp": dict(type=int, metavar="N", help="pipeline ranks (default: the file's parallel.pp)"),
    "--dp": dict(type=int, metavar="N", help="data-parallel ranks (default: the file's)"),
    "--dp-replicate": dict(type=int, metavar="N", help="replicas of all parameters in dp (default: the file's)"),
    "--cp": dict(type=int, metavar="N", help="context-parallel ranks (default: the file's)"),
    "--ep": dict(type=int, metavar="N", help="expert-parallel ranks (default: the file's)"),
    "--dtype": dict(choices=("float64", "float32", "bf16"), default="float64",
                    help="default: float64; bf16 is compared with float64, by derived tolerances"),
    "--tolerance": dict(type=float, metavar="X", help="allowed relative error (default: 1e-10, float32 1e-5)"),
    "--worst": dict(type=int, default=10, metavar="N", help="parameters to print (default: 10)"),
}
TRAIN: Arguments = {
    "--max-restarts": dict(type=int, default=0, metavar="N", help="restart the ranks from the last checkpoint after "
                           "a failure, at most N times (default: 0)"),
    "--trace": dict(default="", metavar="STEPS", help="write a trace of all ranks in some steps, for "
                    "ui.perfetto.dev: steps=10..12[,file=PATH] (default: trace-10-12.json in output.dir)"),
    "--profile": dict(default="", metavar="STEPS", help="profile some steps with torch.profiler: steps=10..12; every "
                      "rank writes profile-10-12-rankN.json to output.dir"),
    "--memory-snapshot": dict(action="store_true", help="record the allocations on CUDA devices; at the end, or when "
                              "out of memory, every rank writes memory-rankN.pickle to output.dir"),
}
REPLAY: Arguments = {
    "bundle": dict(metavar="BUNDLE", help="the recorded inputs of a step: a folder in `bundles` of a run's output.dir"),
}
TRACE: Arguments = {"file": dict(metavar="FILE", help="a trace of dualpipe train --trace or Pipeline.trace")}
TRACE_SUMMARY: Arguments = {
    **TRACE,
    "--svg": dict(metavar="FILE", help="draw the middle step as an SVG"),
    "--html": dict(metavar="FILE", help="write a page for a browser, with that step and its simulation"),
}
TRACE_COSTS: Arguments = {
    **TRACE,
    "--out": dict(metavar="FILE.json", help="write the costs in the form of dualpipe schedule --costs"),
}
PLAN: Arguments = {
    "--gpus": dict(type=int, metavar="N", default=8, help="number of GPUs on all nodes (default: 8)"),
    "--gpu": dict(metavar="NAME", default="h100", help="a100, h100, h800, h200, b200, or a FILE.toml with the fields "
                  "of dualpipe/plan/machines.toml (default: h100)"),
    "--nodes-of": dict(type=int, metavar="N", help="GPUs per node (default: the file's parallel.ranks_per_node, or 8 "
                       "without it)"),
    "--costs": dict(action="append", metavar="FILE", default=[], help="JSON with measured efficiencies, by the names "
                    "in machines.toml, or as bench_grouped_gemm.py --save writes it; may be given several times"),
    "--sequence-length": dict(type=int, metavar="N", default=0, help="tokens (default: the file's)"),
    "--global-batch": dict(type=int, metavar="TOKENS", default=0, help="tokens per step on all GPUs (default: the "
                           "file's)"),
    "--objective": dict(choices=("time", "memory"), default="time", help="quantity to minimize (default: time)"),
    "--rows": dict(type=int, metavar="N", default=10, help="number of meshes to list (default: 10)"),
    "--write": dict(nargs=2, metavar=("ROW", "FILE"), help="write the configuration of a row to a file"),
}
MEMORY: Arguments = {
    "--timeline": dict(metavar="FILE", help="draw the memory of every rank in every step of its schedule, by kind, as "
                       ".png, .svg or .pdf (extra viz), and print every rank's worst step"),
}
OPTIONS_AFTER_CONFIG = {"train": TRAIN, "parity": PARITY, "plan": PLAN, "memory": MEMORY}  # by command
PACK: Arguments = {
    "paths": dict(nargs="+", metavar="PATH", help="files or folders in the formats of docs/data.md, or "
                  '"stdlib" (Python\'s own source)'),
    "--tokenizer": dict(default="bytes", metavar="bytes|DIR|FILE.json", help="default: bytes"),
    "--end-of-document": dict(metavar="TOKEN", help="token that ends a document; default: the tokenizer's eos_token"),
    "--text-key": dict(default="text", metavar="KEY", help="key of the text in a record; default: text, and with "
                       "--chat, messages or conversations"),
    "--chat": dict(action="store_true", help="pack conversations, in OpenAI's or ShareGPT's form, through the "
                   "tokenizer's chat template; only the assistant's tokens count for the loss"),
    "--chat-template": dict(default="", metavar="FILE", help="chat template to use instead of the tokenizer's"),
    "--out": dict(required=True, metavar="DIR", help="the packed directory to write"),
    "--overwrite": dict(action="store_true", help="replace an existing packed directory once the new one is done"),
}
SHOW: Arguments = {
    "path": dict(metavar="DIR", help="a packed directory"),
    "--tokenizer": dict(default="bytes", metavar="bytes|DIR|FILE.json",
                        help="tokenizer that the directory was packed with; default: bytes"),
    "--document": dict(type=int, default=0, metavar="N", help="first document to print, from 0 (default: 0)"),
    "--count": dict(type=int, default=1, metavar="N", help="number of documents to print (default: 1)"),
}
CHECKPOINT: Arguments = {"path": dict(metavar="PATH", help="a checkpoint, or a directory of checkpoints, or a URL")}
HUB = "a directory with config.json and safetensors"
MTP: Arguments = {
    "--mtp": dict(action="store_true", help="include layers for multi-token prediction, for a run with mtp.weight > 0"),
}
CHECK: Arguments = {"path": dict(metavar="PATH", help=HUB)} | {
    f"--{name}": dict(type=int, default=1, metavar="N", help=f"{ranks} ranks (default: 1)")
    for name, ranks in (("pp", "pipeline"), ("dp", "data-parallel"), ("cp", "context-parallel"),
                        ("ep", "expert-parallel"))
} | MTP
IMPORT: Arguments = {
    "source": dict(metavar="SRC", help=HUB),
    "target": dict(metavar="DIR", help="the directory of a run's checkpoints, or its URL"),
    **MTP,
}
EXPORT: Arguments = {
    "path": dict(metavar="SRC", help="a checkpoint, a run's directory of checkpoints, or a directory with config.json "
                 "and safetensors"),
    "target": dict(metavar="OUT", help="the directory to write"),
    "--dtype": dict(choices=("bf16", "fp32"), default="bf16", help="default: bf16"),
    "--source": dict(metavar="CHECKPOINT", help="the Hugging Face checkpoint that a run has started from: its "
                     "config.json, tokenizer and layers for multi-token prediction are copied"),
    "--max-shard-size": dict(default="5GB", metavar="SIZE", help="maximum size of a file's tensors (default: 5GB)"),
}
WHY: Arguments = {
    "path": dict(metavar="DIR", help="output.dir of a run, or the folder `why` in it"),
    "--json": dict(action="store_true", help="print the rank at fault, the diagnosis and all states as JSON"),
}
