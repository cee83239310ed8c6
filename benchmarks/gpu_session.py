"""Run all GPU checks and benchmarks, on one card or on a machine of eight, in ten minutes.

Parts run in the order of their importance, each in its own process with a share of the time. The JSON is written after
every row. A second call continues with the parts that the JSON does not have yet. See docs/gpu.md.

    python -P benchmarks/gpu_session.py [--seconds 570] [--folder out/gpu] [--only PART ...] [--again PART ...]
    python -P benchmarks/gpu_session.py --node        all GPUs of this machine
    python -P benchmarks/gpu_session.py --dry         tiny sizes on the CPU, to see it run

Exit status: 0 if every part has run to its end, nothing failed and every goal is met; 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
if str(FOLDER) not in sys.path:  # -P leaves it out
    sys.path.insert(0, str(FOLDER))

from gpu.report import SessionReport, is_good, summary  # noqa: E402 - found in the folder of this script
from gpu.session import Part, Session, run_in_process  # noqa: E402

OUT = FOLDER.parent / "out"

# Correctness before times, and the parts that most depends on first, because the time may run out.
CARD = (
    Part("startup", "does it start, and what do allocator and loading of kernels cost?", "gpu.startup:measure", 10),
    Part("kernel-tests", "do the kernels compute what their references do?", "gpu.kernel_tests:measure", 20),
    Part("rates", "how fast are copies and dense products here?", "gpu.kernels:rates", 5),
    Part("grouped-gemm", "how fast are grouped products beside torch's?", "gpu.kernels:grouped_gemm", 14),
    Part("memory-bound", "how near to a copy are the other kernels?", "gpu.kernels:memory_bound", 10),
    Part("attention", "which attention is the fastest?", "gpu.kernels:attention", 8),
    Part("overlap", "what is hidden, and what do NCCL's blocks take?", "gpu.kernels:overlap", 10),
    Part("host-time", "does the host keep ahead of a layer?", "gpu.layer:host_time", 6),
    Part("fp8", "what does FP8 gain at 2048 and 7168?", "gpu.kernels:quantized", 8),
    Part("small-step", "is a step right, and as large as is counted?", "gpu.small_step:measure", 12),
    Part("launches", "does the pretend device list what the profiler sees?", "gpu.layer:launches", 6),
)
NODE = (
    Part("parity", "is a pipeline of 2 x 4 ranks the model itself?", "gpu.node:parity", 20),
    Part("all-to-all", "how fast are all-to-alls, alone and beside products?", "gpu.node:all_to_all", 15),
    Part("training", "how fast are whole steps over meshes?", "gpu.node:training", 70),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--node", action="store_true", help="what all GPUs of a machine can answer")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=570.0, help="time of all parts together: 9.5 minutes")
    parser.add_argument("--folder", type=Path, help="of session.json and a log of each part; default: out/gpu or "
                                                    "out/gpu-node, and -dry behind it in a dry session")
    parser.add_argument("--only", nargs="+", metavar="PART", help="of these parts alone")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART", help="forget what is known of these parts")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen_parts(args: argparse.Namespace) -> list[Part]:
    """Return the parts that the command line selects. Raises SystemExit for an unknown name."""
    parts = NODE if args.node else CARD
    names = [part.name for part in parts]
    for name in (*(args.only or ()), *args.again):
        if name not in names:
            raise SystemExit(f"there is no part {name!r}; give some of: {' '.join(names)}")
    return [part for part in parts if args.only is None or part.name in args.only]


def folder_of(args: argparse.Namespace) -> Path:
    if args.folder is not None:
        return args.folder
    return OUT / ("gpu" + "-node" * args.node + "-dry" * args.dry)


def run_session(args: argparse.Namespace) -> int:
    """Run the remaining parts, print the summary, write it beside the JSON, and return the exit status."""
    parts = chosen_parts(args)
    report = SessionReport(folder_of(args) / "session.json")
    for name in args.again:
        report.parts.pop(name, None)
    report.describe_machine()
    Session(report, args.seconds, ["--dry"] if args.dry else []).run(parts)
    names = [part.name for part in parts]
    lines = [*summary(report, names), f"all rows: {report.path}"]
    report.path.with_name("summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if is_good(report, names) else 1


def main() -> int:
    args = parse()
    if args.part is not None:
        run_in_process(args.part, args.pipe, dry=args.dry, seconds=args.seconds)
        return 0
    if not args.dry:
        from gpu_bench import require_gpu

        require_gpu()
    return run_session(args)


if __name__ == "__main__":
    sys.exit(main())
