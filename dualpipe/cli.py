"""The `dualpipe` command. Thin: each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualpipe import __version__
from dualpipe.errors import PLAIN, error_line, exit_status
from dualpipe.schedule import command as schedule  # pure Python


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dualpipe *arguments` (default: those of the process) and return its exit status.

    0: done; 1: it failed; 2: something the user can put right, said in one line on stderr.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        with _plain_warnings():
            status = args.run(args)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # the reader of our output has gone (`dualpipe schedule | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PLAIN as error:
        print(error_line(error), file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        return 130


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """What this library warns about is for who runs it, without the line of code."""
    ordinary, here = warnings.formatwarning, os.path.dirname(__file__) + os.sep

    def formatted(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> str:
        ours = category is UserWarning and filename.startswith(here)
        return f"warning: {message}\n" if ours else ordinary(message, category, filename, *place)

    warnings.formatwarning = formatted  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = ordinary


# -- what there is to run


def _train(args: argparse.Namespace) -> int:
    from dualpipe.train.launch import as_rank, load_everywhere, start_ranks

    config, info = load_everywhere(args.config, args.overrides)
    if info is None:
        return start_ranks(args.arguments, config.parallel)
    with as_rank(info) as ending:
        from dualpipe.train.loop import train

        ending.status = train(config, info)
    return ending.status


def _parity(args: argparse.Namespace) -> int:
    from dualpipe.train.launch import as_rank, load_everywhere, start_ranks

    after_config = argparse.ArgumentParser(prog="dualpipe parity CONFIG", allow_abbrev=False, add_help=False)
    _add_parity_options(after_config)
    args, overrides = after_config.parse_known_args(args.overrides, namespace=args)
    for name in ("pp", "dp", "ep"):
        if getattr(args, name) is not None:
            overrides += [f"--parallel.{name}", str(getattr(args, name))]
    config, info = load_everywhere(args.config, overrides)
    if info is None:
        return start_ranks(args.arguments, config.parallel)
    with as_rank(info) as ending:
        from dualpipe.train.parity import check

        ending.status = check(config, info, dtype=args.dtype, tolerance=args.tolerance, worst=args.worst)
    return ending.status


def _pack(args: argparse.Namespace) -> int:
    from dualpipe.train.pack import find_sources, load_tokenizer, pack

    sources, tokenizer = find_sources(args.paths), load_tokenizer(args.tokenizer, args.end_of_document)
    packed = pack(sources, tokenizer, args.out, text_key=args.text_key)
    print(f"{Path(args.out)}: {packed['tokens']:,} tokens in {packed['documents']:,} documents")
    return 0


def _dtypes(args: argparse.Namespace) -> int:
    from dualpipe.train.config import fit_world, load_config
    from dualpipe.train.model import plan_run, read_model_config
    from dualpipe.train.resume import find_source

    config = load_config(args.config, args.overrides)
    config = fit_world(config, config.parallel.world_size)
    source, recorded, _ = find_source(config)
    print(plan_run(config, read_model_config(config), recorded).table())
    p, start = config.parallel, source or config.init.from_hf
    print(f"for pp {p.pp}, dp {p.dp}, ep {p.ep}{f', from {start}' if start else ''}", file=sys.stderr)
    return 0


def _memory(args: argparse.Namespace) -> int:
    from dualpipe.train.config import load_config
    from dualpipe.train.memory import estimate, table
    from dualpipe.train.model import read_model_config

    config = load_config(args.config, args.overrides)
    model = read_model_config(config)
    for line in table(estimate(config, model)):
        print(line)
    if layers := len(model.carried_layers):
        print(f"{layers} layer{'s' * (layers > 1)} for multi-token prediction: not trained, so nothing is needed; an "
              "export carries what its source has")
    return 0


def _checkpoint(args: argparse.Namespace) -> int:
    from dualpipe.checkpoint import commands

    for line in {"ls": commands.ls, "verify": commands.check, "show": commands.show}[args.command](args.path):
        print(line)
    return 0


def _hf_check(args: argparse.Namespace) -> int:
    from dualpipe.checkpoint.hub_commands import check
    from dualpipe.parallel.mesh import Mesh

    for line in check(args.path, Mesh.planned(pp=args.pp, dp=args.dp, ep=args.ep)):
        print(line)
    return 0


def _hf_import(args: argparse.Namespace) -> int:
    from dualpipe.checkpoint.hub_commands import import_hf

    print(f"{import_hf(args.source, args.target)}: written")
    return 0


def _hf_export(args: argparse.Namespace) -> int:
    from dualpipe.checkpoint.hub_commands import export, export_checkpoint, is_of_a_run, parse_size
    from dualpipe.dtypes import dtype_of

    how = (args.path, args.target, dtype_of(args.dtype), parse_size(args.max_shard_size))
    if is_of_a_run(args.path):
        export_checkpoint(*how, args.source)
    elif args.source is not None:
        raise ValueError(f"--source is for a run's checkpoint; {args.path} is one of Hugging Face's, its own source")
    else:
        export(*how)
    print(f"{args.target}: written")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from dualpipe.doctor import run

    return run()


# -- how it is said


def _parser() -> argparse.ArgumentParser:
    text = "mixture-of-experts training on a V-shaped bidirectional pipeline"
    parser = argparse.ArgumentParser(prog="dualpipe", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dualpipe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    schedule.add_parser(commands)
    train = _add(commands, "train", _train, "train a model; starts the ranks of this machine unless torchrun or SLURM "
                 "did")
    _add_config(train)
    data = commands.add_parser("data", help="prepare training data").add_subparsers(required=True, metavar="COMMAND")
    pack = _add(data, "pack", _pack, "tokenise text into memory-mapped shards")
    pack.add_argument("paths", nargs="+", metavar="PATH", help="files or folders of text, .jsonl[.gz|.zst] or "
                      '.parquet, or "stdlib" (Python\'s own source)')
    pack.add_argument("--tokenizer", default="bytes", metavar="bytes|FILE.json", help="default: bytes")
    pack.add_argument("--end-of-document", metavar="TOKEN", help="the tokenizer's token that closes a document")
    pack.add_argument("--text-key", default="text", metavar="KEY", help="of the text of a record; default: text")
    pack.add_argument("--out", required=True, metavar="DIR", help="the packed directory to make")
    parity = _add(commands, "parity", _parity, "compare loss and gradients of the pipelined model with the unpipelined "
                  "one")
    _add_parity_options(parity)
    _add_config(parity)
    dtypes = _add(commands, "dtypes", _dtypes, "print in which dtype every tensor of the model is stored, computes, is "
                  "reduced and saved, and why")
    _add_config(dtypes)
    memory = _add(commands, "memory", _memory, "print what a run needs on each rank in GiB, by what it is for; nothing "
                  "is allocated")
    _add_config(memory)
    _add_checkpoint(commands)
    _add_hf(commands)
    _add(commands, "doctor", _doctor, "say what is installed here, and what of it will be used or missed; exit status "
         "1 if training cannot run")
    return parser


def _add(
    commands: argparse._SubParsersAction, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, such as examples/tiny-cpu.toml")
    overrides = parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, metavar="--TABLE.FIELD VALUE",
        help="settings that replace those of the file; `CONFIG --help` lists them all",
    )
    overrides.required = False  # Python 3.11 calls them missing where CONFIG is


def _add_parity_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default: the file's parallel.pp)")
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel ranks (default: the file's)")
    parser.add_argument("--ep", type=int, metavar="N", help="expert-parallel ranks (default: the file's)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bf16"), default="float64",
                        help="default: float64; bf16 is compared with float64, by tolerances that are derived")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="relative error allowed (default: 1e-10, float32 1e-5)"
    )
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="parameters to print (default: 10)")


def _add_checkpoint(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("checkpoint", help="a run's checkpoints")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in {
        "ls": "list the checkpoints of a directory: step, size, layout, dtypes, complete or not",
        "verify": "read every byte of a checkpoint, or of all in a directory, and say what is damaged",
        "show": "say what is in a checkpoint: how it was saved, by whom, and its tensors",
    }.items():
        command = _add(sub, name, _checkpoint, text)
        command.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of them")
        command.set_defaults(command=name)


def _add_hf(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("hf", help="Hugging Face checkpoints")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")
    check = _add(sub, "check", _hf_check, "say whether a checkpoint can be loaded, what it holds, and how much of it "
                 "each rank reads (headers only)")
    check.add_argument("path", metavar="PATH", help="a directory with config.json and safetensors")
    for name, ranks in (("pp", "pipeline"), ("dp", "data-parallel"), ("ep", "expert-parallel")):
        check.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{ranks} ranks (default: 1)")
    imported = _add(sub, "import", _hf_import, "make a checkpoint of this library from one of Hugging Face's, as step "
                    "0 of a run")
    imported.add_argument("source", metavar="SRC", help="a directory with config.json and safetensors")
    imported.add_argument("target", metavar="DIR", help="the directory of a run's checkpoints")
    export = _add(sub, "export", _hf_export, "write a run's checkpoint, or again one of Hugging Face's, in Hugging "
                  "Face's form, dequantized")
    export.add_argument(
        "path", metavar="SRC", help="a checkpoint, the directory of a run's, or one with config.json and safetensors"
    )
    export.add_argument("target", metavar="OUT", help="the directory to make")
    export.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    export.add_argument(
        "--source", metavar="CHECKPOINT", help="what a run's model was made from: its config.json, tokenizer and "
        "layers for multi-token prediction go along",
    )
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file's tensors (default: 5GB)")
