"""The `dualpipe` command: its parser, and its subcommands, which import their modules when they run."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe import __version__
from dualpipe import _cli_arguments as tables
from dualpipe.runtime.errors import ONE_LINE_ERRORS, error_line, exit_status, nearest
from dualpipe.schedule import command as schedule  # pure Python

if TYPE_CHECKING:
    from dualpipe.train.config.schema import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dualpipe *arguments` (default: those of the process) and return the exit status.

    0: success; 1: failure; 2: an error that the user can put right, printed as one line to stderr.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    default_format = warnings.formatwarning
    library = os.path.dirname(__file__) + os.sep

    def format_warning(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> str:
        """Format a warning of this library, which is meant for the user, without the line of code."""
        if category is UserWarning and filename.startswith(library):
            return f"warning: {message}\n"
        return default_format(message, category, filename, *place)

    warnings.formatwarning = format_warning  # type: ignore[assignment]
    try:
        _check_command(arguments)
        args = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
        status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:  # the reader of stdout has gone (`dualpipe schedule | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ONE_LINE_ERRORS as error:
        print(error_line(error), file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        return 130
    finally:
        warnings.formatwarning = default_format


# -- subcommands


def _train(args: argparse.Namespace) -> int:
    """Train as a rank of the job, or start the ranks of this machine if torchrun or SLURM did not."""
    from dualpipe.runtime.rank_process import LAUNCHER, RankInfo, as_rank
    from dualpipe.train.config.load import check_data_paths, load_config
    from dualpipe.train.launch.environment import launcher_config, raising_on_all_ranks
    from dualpipe.train.launch.start import start_ranks

    args, overrides = _parse_after_config(args)
    with raising_on_all_ranks() as info:
        config = launcher_config() or load_config(args.config, overrides)
    restarts = 0 if LAUNCHER in os.environ else args.max_restarts
    if restarts and info is not None:
        raise ValueError(f"--max-restarts {restarts} is for ranks that this command starts itself; give it to "
                         "torchrun instead, or let SLURM requeue the job")
    if info is None and (restarts or config.parallel.world_size > 1):
        check_data_paths(config)  # before ranks start, which takes them seconds
        return start_ranks(args.arguments, config, restarts=restarts, watched=True)
    info = info or RankInfo()
    with as_rank(info, config.parallel.sizes) as ending:
        from dualpipe.train.profile import parse_steps
        from dualpipe.train.trainer import train

        trace = parse_steps(args.trace, config.train.steps, "--trace", with_file=True)
        profile = parse_steps(args.profile, config.train.steps, "--profile")
        ending.status = train(config, info, trace, profiled=profile, snapshot=args.memory_snapshot)
    return ending.status


def _parity(args: argparse.Namespace) -> int:
    """Compare as a rank of the job, or start all ranks if nothing has started them."""
    from dualpipe.runtime.rank_process import RankInfo, as_rank
    from dualpipe.train.config.load import load_config
    from dualpipe.train.launch.environment import launcher_config, raising_on_all_ranks
    from dualpipe.train.launch.start import start_ranks

    args, overrides = _parse_after_config(args)
    if args.model is None and args.config is None:
        args.parser.error("--model is not given, so the following arguments are required: CONFIG")
    for name in ("pp", "dp", "dp_replicate", "cp", "ep"):
        if args.model is None and getattr(args, name) is not None:
            overrides += [f"--parallel.{name}", str(getattr(args, name))]
    with raising_on_all_ranks() as info:
        config = launcher_config()
        if config is None:
            config = load_config(args.config, overrides) if args.model is None else _config_for_model(args, overrides)
    if info is None and config.parallel.world_size > 1:
        return start_ranks(args.arguments, config)
    info = info or RankInfo()
    with as_rank(info, config.parallel.sizes) as ending:
        from dualpipe.train.parity.command import check_parity

        ending.status = check_parity(
            config, info, model=args.model, dtype=args.dtype, tolerance=args.tolerance, worst=args.worst)
    return ending.status


def _config_for_model(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the configuration of `parity --model`, which has nothing but the numbers of ranks."""
    from dualpipe.train.config.schema import Config, ParallelConfig

    if args.config is not None or overrides:
        rest = list(overrides) if args.config is None else [args.config, *overrides]
        raise ValueError(f"--model {args.model}: got {' '.join(rest)} as well; a custom model takes neither CONFIG nor "
                         "settings, leave them out")
    for name in ("cp", "dp_replicate"):
        if getattr(args, name) not in (None, 1):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {getattr(args, name)} is not for --model, which compares pp, dp and ep; "
                             "leave it out")
    sizes = {"pp": 1, "dp": 1, "ep": 1}
    for name in sizes:
        size = getattr(args, name)
        if size is not None:
            sizes[name] = size
    too_small = [f"--{name} {size}" for name, size in sizes.items() if size < 1]
    if too_small:
        raise ValueError(f"{' and '.join(too_small)} must be at least 1")
    return Config(parallel=ParallelConfig(pp=sizes["pp"], dp=sizes["dp"], ep=sizes["ep"]))


def _replay(args: argparse.Namespace) -> int:
    """Replay a step as a rank of the job, or start all ranks if nothing has started them."""
    from dualpipe.runtime.rank_process import RankInfo, as_rank
    from dualpipe.train.launch.environment import launcher_config, raising_on_all_ranks
    from dualpipe.train.launch.start import start_ranks
    from dualpipe.train.replay import read_bundle, replay

    with raising_on_all_ranks() as info:
        config = launcher_config() or read_bundle(args.bundle)
    if info is None and config.parallel.world_size > 1:
        return start_ranks(args.arguments, config)
    info = info or RankInfo()
    with as_rank(info, config.parallel.sizes) as ending:
        ending.status = replay(config, info)
    return ending.status


def _pack(args: argparse.Namespace) -> None:
    """Tokenise text into a packed directory."""
    from dualpipe.train.data.pack import pack
    from dualpipe.train.data.sources import find_sources
    from dualpipe.train.data.tokenizer import load_tokenizer

    sources = find_sources(args.paths)
    if args.chat_template and not args.chat:
        raise ValueError(f"--chat-template {args.chat_template}: plain text has no template; add --chat to pack "
                         "conversations, or leave it out")
    if args.end_of_document is not None and args.chat:
        raise ValueError(f"--end-of-document {args.end_of_document!r}: with --chat, the chat template ends a "
                         "conversation; leave it out")
    tokenizer = load_tokenizer(args.tokenizer, args.end_of_document or "", chat=args.chat,
                               chat_template=args.chat_template)
    index = pack(sources, tokenizer, args.out, text_key=args.text_key, overwrite=args.overwrite)
    note = f", each ended by {index['end_token']!r}" if index.get("end_token") else ""
    if args.chat:
        note = f", {index['counted']:,} of them count for the loss"
    print(f"{Path(args.out)}: {index['tokens']:,} tokens in {index['documents']:,} documents{note}")


def _show_data(args: argparse.Namespace) -> None:
    """Print documents of a packed directory token by token."""
    from dualpipe.train.data.show import show

    show(args.path, tokenizer=args.tokenizer, first=args.document, count=args.count)


def _dtypes(args: argparse.Namespace) -> None:
    """Print the dtypes of all tensors of a run."""
    from dualpipe.train.config.fit import resolve
    from dualpipe.train.config.load import load_config
    from dualpipe.train.saver import find_source
    from dualpipe.train.step import resolve_run_dtypes

    config = load_config(args.config, args.overrides)
    resolved = resolve(config, config.parallel.world_size)
    config = resolved.config
    source = find_source(config)
    print(resolve_run_dtypes(resolved, source.compute_dtypes).table())
    start = source.path or config.init.from_hf
    origin = f", from {start}" if start else ""
    print(f"for {config.parallel}{origin}", file=sys.stderr)


def _memory(args: argparse.Namespace) -> None:
    """Print an estimate of the memory of every rank, and draw it over time if asked to."""
    from dualpipe.models import HubConfig
    from dualpipe.plan import memory_timeline
    from dualpipe.plan.counted_stages import uncounted_layers
    from dualpipe.plan.memory import approximations, check_run, describe_head, estimate, table
    from dualpipe.runtime import device as cuda
    from dualpipe.train.config.load import load_config
    from dualpipe.train.config.model_config import read_model
    from dualpipe.train.config.schema import replace_field
    from dualpipe.train.optim.optimizer import check_optimizer

    args, overrides = _parse_after_config(args)
    if args.timeline:
        memory_timeline.check_picture(Path(args.timeline))
    config = load_config(args.config, overrides)
    is_on_cpu = config.parallel.device == "auto" and not cuda.count()
    if is_on_cpu:
        config = replace_field(config, "parallel", "device", "cpu")
    model = read_model(config).config
    check_run(config, model)
    check_optimizer(config.optimizer, model, config.lora)
    if is_on_cpu:
        print("for the CPU, as torch finds no CUDA device here; --parallel.device cuda estimates GPUs", file=sys.stderr)
    memory = estimate(config, model)
    notes = (*describe_head(config, model), *uncounted_layers(model), *approximations(config))
    for line in (*table(memory, config.memory.capacity), *notes):
        print(line)
    if args.timeline:
        ranks = memory_timeline.timeline(config, model)
        memory_timeline.draw(ranks, Path(args.timeline))
        for line in (*memory_timeline.table(ranks), f"wrote {args.timeline}"):
            print(line)
    num_layers = len(model.carried_layers) if isinstance(model, HubConfig) else 0
    if num_layers:
        layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        are = "it is" if num_layers == 1 else "they are"
        print(f"{layers} for multi-token prediction: without mtp.weight > 0 {are} not trained and not in memory; an "
              "export copies the weights of its source")


def _plan(args: argparse.Namespace) -> None:
    """Print the layouts that fit, best first."""
    args, overrides = _parse_after_config(args)
    from dualpipe.plan.command import run

    for line in run(args, overrides):
        print(line)


def _checkpoint(args: argparse.Namespace) -> None:
    """List, verify, describe or clean up checkpoints."""
    from dualpipe.checkpoint import commands

    functions = {"ls": commands.ls, "verify": commands.check, "show": commands.show, "clean": commands.clean}
    for line in functions[args.command](args.path):
        print(line)


def _hf_check(args: argparse.Namespace) -> None:
    """Check that a Hugging Face checkpoint can be loaded."""
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
            raise ValueError(f"--mtp is for this library's own models; {model.model_type} is trained with "
                             "transformers' implementation: leave --mtp out")
        from dualpipe.hf.check import check_checkpoint

        lines = check_checkpoint(args.path, model, mesh)
    for line in lines:
        print(line)


def _hf_import(args: argparse.Namespace) -> None:
    """Import a Hugging Face checkpoint as step 0 of a run."""
    from dualpipe.checkpoint.hub.commands import import_hf

    print(f"{import_hf(args.source, args.target, mtp=args.mtp)}: written")


def _hf_export(args: argparse.Namespace) -> None:
    """Export a checkpoint in Hugging Face's format."""
    from dualpipe.checkpoint.hub.commands import export, export_checkpoint, is_native_checkpoint
    from dualpipe.runtime.dtypes import dtype_of
    from dualpipe.runtime.printing import parse_bytes

    dtype = dtype_of(args.dtype)
    max_shard_bytes = parse_bytes(args.max_shard_size)
    note = ""
    if is_native_checkpoint(args.path):
        export_checkpoint(args.path, args.target, dtype, max_shard_bytes, args.source)
        if args.source is None:
            note = ", without a tokenizer: --source CHECKPOINT copies that of the model that the run began with"
    elif not Path(args.path).exists():
        raise ValueError(f"there is no file or directory {args.path}; give a checkpoint of a run, the directory of its "
                         "checkpoints, or a checkpoint of Hugging Face")
    elif args.source is not None:
        raise ValueError(f"--source is for a run's checkpoint; {args.path} is one of Hugging Face's: leave it out")
    else:
        export(args.path, args.target, dtype, max_shard_bytes)
    print(f"{args.target}: written{note}")


def _why(args: argparse.Namespace) -> None:
    """Print the rank on which a run waits or waited."""
    from dualpipe.train.launch.diagnose import report

    for line in report(Path(args.path), as_json=args.json):
        print(line)


def _trace(args: argparse.Namespace) -> None:
    """Print a summary of a trace, or the costs of its actions."""
    from dualpipe.trace import costs, summary

    if args.command == "costs":
        text = costs.report(args.file, args.out)
    else:
        text = summary.report(args.file, args.svg, args.html)
    print(text, end="")


def _doctor(args: argparse.Namespace) -> int:
    """Report the installed software and hardware."""
    from dualpipe.runtime.doctor import run

    return run()


# -- the parser

_GROUPS = {
    "data": "prepare training data",
    "checkpoint": "inspect the checkpoints of a run",
    "hf": "check, import and export Hugging Face checkpoints",
    "trace": "analyse a trace of some steps",
}


class _Command(NamedTuple):
    """A subcommand: its function, which returns an exit status or None for 0, its help, and its arguments."""

    run: Callable[[argparse.Namespace], int | None]
    help: str
    arguments: tables.Arguments


_COMMANDS = {
    "train": _Command(
        _train, "train a model; starts the ranks of this machine unless torchrun or SLURM did",
        {**tables.TRAIN, **tables.CONFIG}),
    "data pack": _Command(_pack, "tokenise text into memory-mapped shards", tables.PACK),
    "data show": _Command(
        _show_data, "print documents of a packed directory token by token, with the tokens that count for the loss in "
        "colour, or in brackets if stdout is not a terminal", tables.SHOW),
    "parity": _Command(
        _parity, "compare loss and gradients of the pipelined model with the unpipelined one",
        {**tables.PARITY, **tables.CONFIG_OR_MODEL}),
    "replay": _Command(
        _replay, "run a step with non-finite numbers again, from its bundle, and compare bit for bit", tables.REPLAY),
    "dtypes": _Command(
        _dtypes, "print the dtypes in which every tensor of the model is stored, computed, reduced and saved, with the "
        "reasons", tables.CONFIG),
    "memory": _Command(
        _memory, "print the memory of every rank of a run in GiB, by use; nothing is allocated",
        {**tables.MEMORY, **tables.CONFIG}),
    "plan": _Command(
        _plan, "list the layouts of a model on N GPUs that fit in memory, best first, by predicted time",
        {**tables.PLAN, **tables.CONFIG}),
    "checkpoint ls": _Command(
        _checkpoint, "list the checkpoints of a directory: step, size, layout, dtypes, complete or not",
        tables.CHECKPOINT),
    "checkpoint verify": _Command(
        _checkpoint, "read every byte of a checkpoint, or of all in a directory, and report damage",
        tables.CHECKPOINT),
    "checkpoint show": _Command(
        _checkpoint, "describe a checkpoint: its tensors, and how and by whom it was saved", tables.CHECKPOINT),
    "checkpoint clean": _Command(
        _checkpoint, "remove the unfinished saves of jobs that died", tables.CHECKPOINT),
    "hf check": _Command(
        _hf_check, "check that a checkpoint can be loaded; print its content, and the part that every rank reads "
        "(headers only)", tables.CHECK),
    "hf import": _Command(
        _hf_import, "make a checkpoint of this library from one of Hugging Face's, as step 0 of a run", tables.IMPORT),
    "hf export": _Command(
        _hf_export, "write a run's checkpoint, or one of Hugging Face's, in Hugging Face's format, dequantized",
        tables.EXPORT),
    "why": _Command(
        _why, "name the rank on which a run waits or waited, from the states that its ranks have written", tables.WHY),
    "trace summary": _Command(
        _trace, "print the parts of the step times in a trace, by rank, and a simulation of the schedule with the "
        "medians of its actions", tables.TRACE_SUMMARY),
    "trace costs": _Command(
        _trace, "print the costs of the actions in a trace, by stage and kind", tables.TRACE_COSTS),
    "doctor": _Command(
        _doctor, "report the installed software and hardware, and the consequences of everything missing; exit status "
        "1 if training cannot run", {}),
}


def _check_command(arguments: Sequence[str]) -> None:
    """Raise ValueError, which names the nearest command, if the arguments begin with one that does not exist."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    typed = " ".join(words[:2] if words[:1] and words[0] in _GROUPS else words[:1])
    full_names = ["schedule", *_GROUPS, *_COMMANDS]
    if not typed or typed in full_names:
        return
    candidates = {name.rpartition(" ")[2]: name for name in full_names} | {name: name for name in full_names}
    near = [f"did you mean `dualpipe {candidates[name]}`?" for name in nearest(typed, candidates)]
    raise ValueError(f"there is no command {typed!r}; {near[0] if near else '`dualpipe` alone lists all'}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command, which loads no torch."""
    description = "mixture-of-experts training on a V-shaped bidirectional pipeline"
    parser = argparse.ArgumentParser(prog="dualpipe", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dualpipe {__version__}")
    parser.set_defaults(run=lambda args: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")
    schedule.add_parser(commands)
    groups = {"": commands}
    for full_name, command in _COMMANDS.items():
        group, _, name = full_name.rpartition(" ")
        if group not in groups:
            group_parser = commands.add_parser(group, help=_GROUPS[group])
            group_parser.set_defaults(run=lambda args, group_parser=group_parser: group_parser.print_help())
            groups[group] = group_parser.add_subparsers(metavar="COMMAND")
        subparser = groups[group].add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False)
        subparser.set_defaults(run=command.run, command=name, parser=subparser)
        _add_arguments(subparser, command.arguments)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, arguments: tables.Arguments) -> None:
    """Add the arguments of a table to a parser."""
    for name, options in arguments.items():
        argument = parser.add_argument(name, **options)
        if argument.nargs == argparse.REMAINDER:
            argument.required = False  # Python 3.11 reports it as missing when an argument before it is


def _parse_after_config(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of a command that stand after CONFIG; return them with the other arguments, the settings."""
    parser = argparse.ArgumentParser(prog=f"dualpipe {args.command} CONFIG", allow_abbrev=False, add_help=False)
    _add_arguments(parser, tables.OPTIONS_AFTER_CONFIG[args.command])
    return parser.parse_known_args(args.overrides, namespace=args)
