"""The `dualpipe` command. Thin: each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpipe import __version__
from dualpipe.runtime.errors import PLAIN, error_line, exit_status
from dualpipe.schedule.by_name import command as schedule  # pure Python

if TYPE_CHECKING:
    from dualpipe.train.config.schema import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dualpipe *arguments` (default: those of the process) and return its exit status.

    0: done; 1: it failed; 2: something the user can put right, said in one line on stderr.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    ordinary, here = warnings.formatwarning, os.path.dirname(__file__) + os.sep

    def plain(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> str:
        """Format a warning of this library without the line of code: it is meant for the user."""
        ours = category is UserWarning and filename.startswith(here)
        return f"warning: {message}\n" if ours else ordinary(message, category, filename, *place)

    warnings.formatwarning = plain  # type: ignore[assignment]
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:  # the reader of our output has gone (`dualpipe schedule | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PLAIN as error:
        print(error_line(error), file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        return 130
    finally:
        warnings.formatwarning = ordinary


# -- what there is to run


def _train(args: argparse.Namespace) -> int:
    """Train as a rank of the job, or start all ranks where nobody did."""
    from dualpipe.runtime.rank_process import LAUNCHER, as_rank
    from dualpipe.train.launch.environment import load_everywhere, rank_from_environment
    from dualpipe.train.launch.local import start_ranks

    args, overrides = _after_config(args)
    config, info = load_everywhere(args.config, overrides)
    restarts = 0 if LAUNCHER in os.environ else args.max_restarts
    if restarts and rank_from_environment(os.environ) is not None:
        raise ValueError(f"--max-restarts {restarts} is for ranks that this command starts itself; give it to "
                         "torchrun, as an option of its own, or have SLURM put the job back into its queue")
    if info is None or restarts:
        return start_ranks(args.arguments, config, restarts=restarts, watched=True)
    with as_rank(info, config.parallel.sizes) as ending:
        from dualpipe.train.observers import profiler, tracing
        from dualpipe.train.trainer import train

        traced = tracing.parse(args.trace, config.train.steps)
        profiled = profiler.parse(args.profile, config.train.steps)
        ending.status = train(config, info, traced, profiled=profiled, snapshot=args.memory_snapshot)
    return ending.status


def _parity(args: argparse.Namespace) -> int:
    """Compare as a rank of the job, or start all ranks where nobody did."""
    from dualpipe.runtime.rank_process import as_rank
    from dualpipe.train.launch.environment import load_everywhere
    from dualpipe.train.launch.local import start_ranks

    args, overrides = _after_config(args)
    if args.model is not None:
        return _model_parity(args, overrides)
    if args.config is None:
        args.parser.error("--model is not given, so the following arguments are required: CONFIG")
    for name in ("pp", "dp", "dp_replicate", "cp", "ep"):
        if getattr(args, name) is not None:
            overrides += [f"--parallel.{name}", str(getattr(args, name))]
    config, info = load_everywhere(args.config, overrides)
    if info is None:
        return start_ranks(args.arguments, config)
    with as_rank(info, config.parallel.sizes) as ending:
        from dualpipe.train.parity import check_parity

        ending.status = check_parity(config, info, dtype=args.dtype, tolerance=args.tolerance, worst=args.worst)
    return ending.status


def _model_parity(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Compare a model of the user's own, as a rank of the job, or start all ranks where nobody did."""
    from dualpipe.runtime.rank_process import as_rank
    from dualpipe.train.launch.environment import rank_of_job
    from dualpipe.train.launch.local import start_ranks

    config = _config_of_layout(args, overrides)
    layout = config.parallel
    info = rank_of_job(layout.world_size)
    if info is None:
        return start_ranks(args.arguments, config)
    with as_rank(info, layout.sizes) as ending:
        from dualpipe.train.model_parity.command import check_model

        ending.status = check_model(
            args.model, layout, info, dtype=args.dtype, tolerance=args.tolerance, worst=args.worst)
    return ending.status


def _config_of_layout(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return a configuration that has nothing but the numbers of ranks of `parity --model`."""
    from dualpipe.train.config.schema import Config, ParallelConfig

    if args.config is not None or overrides:
        given = " ".join([*([] if args.config is None else [args.config]), *overrides])
        raise ValueError(f"--model {args.model}: got {given} besides; a model of your own has no settings of a file, "
                         "leave them out")
    for name in ("cp", "dp_replicate"):
        if getattr(args, name) not in (None, 1):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {getattr(args, name)} is not for --model, which compares pp, dp and ep; "
                             "leave it out")
    given_sizes = {name: getattr(args, name) for name in ("pp", "dp", "ep")}
    sizes = {name: 1 if size is None else size for name, size in given_sizes.items()}
    wrong = [f"--{name} {size}" for name, size in sizes.items() if size < 1]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} must be at least 1")
    return Config(parallel=ParallelConfig(pp=sizes["pp"], dp=sizes["dp"], ep=sizes["ep"]))


def _after_config(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """A command's options may stand after CONFIG too; what else stands there are settings."""
    after_config = argparse.ArgumentParser(prog=f"dualpipe {args.command} CONFIG", allow_abbrev=False, add_help=False)
    _add_arguments(after_config, _OPTIONS[args.command])
    return after_config.parse_known_args(args.overrides, namespace=args)


def _replay(args: argparse.Namespace) -> int:
    from dualpipe.runtime.rank_process import RankInfo, as_rank
    from dualpipe.train.launch.environment import rank_from_environment, slurm_rendezvous
    from dualpipe.train.launch.local import start_ranks
    from dualpipe.train.replay import read_bundle, replay

    config, manifest = read_bundle(args.bundle)
    info = rank_from_environment(os.environ)
    if info is None and config.parallel.world_size > 1:
        return start_ranks(args.arguments, config)
    if info is not None and "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))
    info = info or RankInfo(0, 1, 0, 1)
    with as_rank(info, config.parallel.sizes) as ending:
        ending.status = replay(config, manifest, info)
    return ending.status


def _pack(args: argparse.Namespace) -> None:
    from dualpipe.train.data.pack import find_sources, load_tokenizer, pack

    sources, tokenizer = find_sources(args.paths), load_tokenizer(args.tokenizer, args.end_of_document)
    packed = pack(sources, tokenizer, args.out, text_key=args.text_key, overwrite=args.overwrite)
    print(f"{Path(args.out)}: {packed['tokens']:,} tokens in {packed['documents']:,} documents")


def _dtypes(args: argparse.Namespace) -> None:
    from dualpipe.train.config.load import load_config
    from dualpipe.train.config.resolve import resolve
    from dualpipe.train.config.source import find_source
    from dualpipe.train.step.dtype_plan import plan_run

    config = load_config(args.config, args.overrides)
    resolved = resolve(config, config.parallel.world_size)
    config = resolved.config
    source, recorded, _ = find_source(config)
    print(plan_run(resolved, recorded).table())
    p, start = config.parallel, source or config.init.from_hf
    print(f"for {p}{f', from {start}' if start else ''}", file=sys.stderr)


def _memory(args: argparse.Namespace) -> None:
    from dualpipe.models import HubConfig
    from dualpipe.plan import memory_timeline
    from dualpipe.plan.memory import estimate, table
    from dualpipe.plan.on_meta.counted_models import uncounted_layers
    from dualpipe.train.config.load import load_config
    from dualpipe.train.config.model_config import read_model_config

    args, overrides = _after_config(args)
    config = load_config(args.config, overrides)
    model = read_model_config(config)
    for line in (*table(estimate(config, model), config.memory.capacity), *uncounted_layers(model)):
        print(line)
    if args.timeline:
        ranks = memory_timeline.timeline(config, model)
        Path(args.timeline).write_text(memory_timeline.to_svg(ranks), encoding="utf-8")
        for line in (*memory_timeline.table(ranks), f"wrote {args.timeline}"):
            print(line)
    layers = len(model.carried_layers) if isinstance(model, HubConfig) else 0
    if layers:
        print(f"{layers} layer{'s' * (layers > 1)} for multi-token prediction: not trained without mtp.weight > 0, so "
              "nothing is needed; an export carries what its source has")


def _plan(args: argparse.Namespace) -> None:
    args, overrides = _after_config(args)
    from dualpipe.plan.command import run

    for line in run(args, overrides):
        print(line)


def _checkpoint(args: argparse.Namespace) -> None:
    from dualpipe.checkpoint import commands

    command = {"ls": commands.ls, "verify": commands.check, "show": commands.show, "clean": commands.clean}
    for line in command[args.command](args.path):
        print(line)


def _hf_check(args: argparse.Namespace) -> None:
    from dualpipe.checkpoint.hub.commands import check
    from dualpipe.models import HubConfig
    from dualpipe.parallel.mesh import Mesh
    from dualpipe.train.config.model_config import read_model_file

    mesh = Mesh.planned(pp=args.pp, dp=args.dp, cp=args.cp, ep=args.ep)
    model = read_model_file(args.path, "auto").config
    if isinstance(model, HubConfig):
        lines = check(args.path, mesh, mtp=args.mtp)
    else:
        if args.mtp:
            raise ValueError(f"--mtp is for this library's own models; {model.model_type} is trained by "
                             "transformers' implementation, leave it out")
        from dualpipe.hf.check import check_checkpoint

        lines = check_checkpoint(args.path, model, mesh)
    for line in lines:
        print(line)


def _hf_import(args: argparse.Namespace) -> None:
    from dualpipe.checkpoint.hub.commands import import_hf

    print(f"{import_hf(args.source, args.target, mtp=args.mtp)}: written")


def _hf_export(args: argparse.Namespace) -> None:
    from dualpipe.checkpoint.hub.commands import export, export_checkpoint, is_of_a_run
    from dualpipe.runtime.byte_sizes import parse_bytes
    from dualpipe.runtime.dtypes import dtype_of

    how = (args.path, args.target, dtype_of(args.dtype), parse_bytes(args.max_shard_size))
    if is_of_a_run(args.path):
        export_checkpoint(*how, args.source)
    elif args.source is not None:
        raise ValueError(f"--source is for a run's checkpoint; {args.path} is one of Hugging Face's, its own source")
    else:
        export(*how)
    print(f"{args.target}: written")


def _why(args: argparse.Namespace) -> None:
    from dualpipe.train.health.diagnose import report

    for line in report(Path(args.path), as_json=args.json):
        print(line)


def _trace(args: argparse.Namespace) -> None:
    from dualpipe.trace import costs, summary

    is_costs = args.command == "costs"
    print(costs.report(args.file, args.out) if is_costs else summary.report(args.file, args.svg, args.html), end="")


def _doctor(args: argparse.Namespace) -> int:
    from dualpipe.runtime.doctor import run

    return run()


# -- how it is said

_Arguments = dict[str, dict[str, Any]]  # of `add_argument`, by name

_CONFIG: _Arguments = {
    "config": dict(metavar="CONFIG", help="a TOML file, such as examples/tiny-cpu.toml"),
    "overrides": dict(nargs=argparse.REMAINDER, metavar="--TABLE.FIELD VALUE",
                      help="settings that replace those of the file; `CONFIG --help` lists them all"),
}
_CONFIG_OR_MODEL: _Arguments = {**_CONFIG, "config": {**_CONFIG["config"], "nargs": "?"}}
_PARITY: _Arguments = {
    "--model": dict(metavar="MODULE:FUNCTION|DIR", help="instead of CONFIG: a function that returns a "
                    "dualpipe.train.model_parity.CutModel, or a directory of transformers; see docs/your-own-loop.md"),
    "--pp": dict(type=int, metavar="N", help="pipeline ranks (default: the file's parallel.pp)"),
    "--dp": dict(type=int, metavar="N", help="data-parallel ranks (default: the file's)"),
    "--dp-replicate": dict(type=int, metavar="N", help="parts of dp that have all parameters each (default: the "
                           "file's)"),
    "--cp": dict(type=int, metavar="N", help="context-parallel ranks (default: the file's)"),
    "--ep": dict(type=int, metavar="N", help="expert-parallel ranks (default: the file's)"),
    "--dtype": dict(choices=("float64", "float32", "bf16"), default="float64",
                    help="default: float64; bf16 is compared with float64, by tolerances that are derived"),
    "--tolerance": dict(type=float, metavar="X", help="relative error allowed (default: 1e-10, float32 1e-5)"),
    "--worst": dict(type=int, default=10, metavar="N", help="parameters to print (default: 10)"),
}
_TRAIN: _Arguments = {
    "--max-restarts": dict(type=int, default=0, metavar="N", help="start the ranks again, from the last checkpoint, so "
                           "often after a failure (default: 0)"),
    "--trace": dict(default="", metavar="STEPS", help="write what all ranks did in some steps to a file that "
                    "ui.perfetto.dev opens: steps=10..12[,file=PATH] (default: trace-10-12.json in output.dir)"),
    "--profile": dict(default="", metavar="STEPS", help="profile some steps by torch.profiler: steps=10..12; each rank "
                      "writes profile-10-12-rankN.json into output.dir"),
    "--memory-snapshot": dict(action="store_true", help="record what allocates memory on CUDA devices; at the end, or "
                              "out of memory, each rank writes memory-rankN.pickle into output.dir"),
}
_TRACE: _Arguments = {"file": dict(metavar="FILE", help="a trace, of dualpipe train --trace or Pipeline.trace")}
_PLAN: _Arguments = {
    "--gpus": dict(type=int, metavar="N", default=8, help="how many, on all nodes (default: 8)"),
    "--gpu": dict(metavar="NAME", default="h100", help="a100, h100, h800, h200, b200, or a FILE.toml with the fields "
                  "of dualpipe/plan/machines.toml (default: h100)"),
    "--nodes-of": dict(type=int, metavar="N", default=8, help="GPUs of a node (default: 8)"),
    "--costs": dict(action="append", metavar="FILE", default=[], help="JSON with measured efficiencies, by the names "
                    "in machines.toml, or as bench_grouped_gemm.py --save writes it; may be given several times"),
    "--sequence-length": dict(type=int, metavar="N", default=0, help="tokens (default: the file's)"),
    "--global-batch": dict(type=int, metavar="TOKENS", default=0, help="tokens of a step on all GPUs (default: the "
                           "file's)"),
    "--objective": dict(choices=("time", "memory"), default="time", help="what is best (default: time)"),
    "--rows": dict(type=int, metavar="N", default=10, help="meshes to list (default: 10)"),
    "--explain": dict(metavar="ROW", help="say where every number of a row comes from"),
    "--write": dict(nargs=2, metavar=("ROW", "FILE"), help="write the configuration of a row"),
    "--svg": dict(type=Path, metavar="FILE", help="draw what the steps are spent on"),
    "--html": dict(type=Path, metavar="FILE", help="one page, for a browser, with the schedules of the first rows"),
}
_MEMORY: _Arguments = {
    "--timeline": dict(metavar="FILE", help="draw what each rank needs while each step of its schedule runs, by kind, "
                       "as an SVG, and print each rank's worst step"),
}
_OPTIONS = {"train": _TRAIN, "parity": _PARITY, "plan": _PLAN, "memory": _MEMORY}
_PACK: _Arguments = {
    "paths": dict(nargs="+", metavar="PATH", help="files or folders of text, .jsonl[.gz|.zst] or .parquet, or "
                  '"stdlib" (Python\'s own source)'),
    "--tokenizer": dict(default="bytes", metavar="bytes|FILE.json|DIR", help="default: bytes"),
    "--end-of-document": dict(metavar="TOKEN", help="the tokenizer's token that closes a document"),
    "--text-key": dict(default="text", metavar="KEY", help="of the text of a record; default: text"),
    "--out": dict(required=True, metavar="DIR", help="the packed directory to make"),
    "--overwrite": dict(action="store_true", help="replace a packed directory that is there, when the new one is done"),
}
_CHECKPOINT: _Arguments = {"path": dict(metavar="PATH", help="a checkpoint, or a directory of them, or its URL")}
_HUB = "a directory with config.json and safetensors"
_MTP: _Arguments = {
    "--mtp": dict(action="store_true", help="with layers for multi-token prediction, for a run with mtp.weight > 0"),
}
_CHECK: _Arguments = {"path": dict(metavar="PATH", help=_HUB)} | {
    f"--{name}": dict(type=int, default=1, metavar="N", help=f"{ranks} ranks (default: 1)")
    for name, ranks in (("pp", "pipeline"), ("dp", "data-parallel"), ("cp", "context-parallel"),
                        ("ep", "expert-parallel"))
} | _MTP
_IMPORT: _Arguments = {
    "source": dict(metavar="SRC", help=_HUB),
    "target": dict(metavar="DIR", help="the directory of a run's checkpoints"),
    **_MTP,
}
_EXPORT: _Arguments = {
    "path": dict(metavar="SRC", help="a checkpoint, the directory of a run's, or one with config.json and safetensors"),
    "target": dict(metavar="OUT", help="the directory to make"),
    "--dtype": dict(choices=("bf16", "fp32"), default="bf16", help="default: bf16"),
    "--source": dict(metavar="CHECKPOINT", help="what a run's model was made from: its config.json, tokenizer and "
                     "layers for multi-token prediction go along"),
    "--max-shard-size": dict(default="5GB", metavar="SIZE", help="of a file's tensors (default: 5GB)"),
}
_WHY: _Arguments = {
    "path": dict(metavar="DIR", help="output.dir of a run, or the folder `why` in it"),
    "--json": dict(action="store_true", help="the rank at fault, the diagnosis, and all states as JSON"),
}
_GROUPS = {"data": "prepare training data", "checkpoint": "a run's checkpoints", "hf": "Hugging Face checkpoints",
           "trace": "where the time of some steps went"}
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str, _Arguments]] = {
    "train": (_train, "train a model; starts the ranks of this machine unless torchrun or SLURM did",
              {**_TRAIN, **_CONFIG}),
    "data pack": (_pack, "tokenise text into memory-mapped shards", _PACK),
    "parity": (_parity, "compare loss and gradients of the pipelined model with the unpipelined one",
               {**_PARITY, **_CONFIG_OR_MODEL}),
    "replay": (_replay, "run a step again whose numbers were not finite, from its bundle, and compare bit for bit",
               {"bundle": dict(metavar="BUNDLE", help="a folder in `bundles` of a run's output.dir")}),
    "dtypes": (_dtypes, "print in which dtype every tensor of the model is stored, computes, is reduced and saved, and "
               "why", _CONFIG),
    "memory": (_memory, "print what a run needs on each rank in GiB, by what it is for; nothing is allocated",
               {**_MEMORY, **_CONFIG}),
    "plan": (_plan, "list the layouts of a model on so many GPUs that fit in memory, best first, by predicted time",
             {**_PLAN, **_CONFIG}),
    "checkpoint ls": (_checkpoint, "list the checkpoints of a directory: step, size, layout, dtypes, complete or not",
                      _CHECKPOINT),
    "checkpoint verify": (_checkpoint, "read every byte of a checkpoint, or of all in a directory, and say what is "
                          "damaged", _CHECKPOINT),
    "checkpoint show": (_checkpoint, "say what is in a checkpoint: how it was saved, by whom, and its tensors",
                        _CHECKPOINT),
    "checkpoint clean": (_checkpoint, "remove what jobs that died have left of their saves in a directory",
                         _CHECKPOINT),
    "hf check": (_hf_check, "say whether a checkpoint can be loaded, what it holds, and how much of it each rank reads "
                 "(headers only)", _CHECK),
    "hf import": (_hf_import, "make a checkpoint of this library from one of Hugging Face's, as step 0 of a run",
                  _IMPORT),
    "hf export": (_hf_export, "write a run's checkpoint, or again one of Hugging Face's, in Hugging Face's form, "
                  "dequantized", _EXPORT),
    "why": (_why, "say which rank a run waits or waited for, from what its ranks have written of themselves", _WHY),
    "trace summary": (_trace, "say where the time of the steps in a trace went, by rank, and against a simulation of "
                      "the schedule with the medians of its actions",
                      {**_TRACE, "--svg": dict(metavar="FILE", help="draw the middle step into FILE"),
                       "--html": dict(metavar="FILE", help="one page, for a browser, with that step and the "
                                      "simulation in it")}),
    "trace costs": (_trace, "print what the actions in a trace cost, by stage and kind",
                    {**_TRACE, "--out": dict(metavar="FILE.json", help="write them as dualpipe schedule --costs takes "
                                             "them")}),
    "doctor": (_doctor, "say what is installed here, and what of it will be used or missed; exit status 1 if training "
               "cannot run", {}),
}


def _parser() -> argparse.ArgumentParser:
    text = "mixture-of-experts training on a V-shaped bidirectional pipeline"
    parser = argparse.ArgumentParser(prog="dualpipe", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dualpipe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    schedule.add_parser(commands)
    groups = {"": commands}
    for names, (run, text, arguments) in _COMMANDS.items():
        group, _, name = names.rpartition(" ")
        if group not in groups:
            of_group = commands.add_parser(group, help=_GROUPS[group])
            groups[group] = of_group.add_subparsers(required=True, metavar="COMMAND")
        command = groups[group].add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run, command=name, parser=command)
        _add_arguments(command, arguments)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, arguments: _Arguments) -> None:
    for name, options in arguments.items():
        argument = parser.add_argument(name, **options)
        if argument.nargs == argparse.REMAINDER:
            argument.required = False  # Python 3.11 calls them missing where what is before them is
