"""JSON report of a session, rewritten after every row, and its summary."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PACKAGES = ("dualpipe", "torch", "triton", "numpy", "transformers", "flash-attn-4")
STATES = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw",
          "power.limit", "temperature.gpu", "memory.used", "memory.total")
RUNNING = "running"
ENDED = "ended"
SHOWN = 5  # failures of a part in the summary; the JSON has all


class SessionReport:
    """Results of all parts by name, in a file that is complete after every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, Row] = {}
        self._facts: Row = {}
        if path.exists():
            saved = json.loads(path.read_text())
            self.parts = saved.pop("parts")
            self._facts = saved
        self._note_interrupted()

    def describe_machine(self) -> None:
        """Record the versions, and append the time and every device's clocks and power to the list of calls."""
        calls = [*self._facts.get("calls", ()), {"date": now(), "devices": device_states()}]
        self._facts = {"versions": package_versions(), "calls": calls}
        self.flush()

    def begin(self, name: str, question: str, seconds: float) -> None:
        """Start the entry of a part, which may take `seconds` at most."""
        self.parts[name] = {
            "question": question, "status": RUNNING, "started": now(), "limit_s": seconds,
            "rows": [], "failures": [], "skipped": [], "goals": {},
        }
        self.flush()

    def add(self, name: str, message: Row) -> None:
        """Book one message of a part: {"row" or "failure" or "skip": its fields}, or {"goal": text, ...}."""
        part = self.parts[name]
        if "row" in message:
            part["rows"].append(message["row"])
        if "failure" in message:
            part["failures"].append(message["failure"])
        if "skip" in message:
            part["skipped"].append(message["skip"])
        if "goal" in message:
            part["goals"][message["goal"]] = {"measured": message["measured"], "missed": message["missed"]}
        self.flush()

    def end(self, name: str, status: str, seconds: float) -> None:
        """Close the entry of a part. status: `ENDED`, or the reason why it was stopped."""
        part = self.parts[name]
        part["status"] = status
        part["seconds"] = round(seconds, 1)
        part["devices"] = device_states()
        if status != ENDED:
            part["failures"].append({"error": status})
        self.flush()

    def flush(self) -> None:
        """Write the file atomically: it is complete for a reader, and also if this process is killed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(self._facts | {"parts": self.parts}, indent=1) + "\n")
        os.replace(written, self.path)

    def _note_interrupted(self) -> None:
        """Mark a part that was running at a kill as failed, so that it is not rerun: it may have ended the session."""
        for part in self.parts.values():
            if part["status"] == RUNNING:
                part["status"] = "the session ended while it ran"
                part["failures"].append({"error": part["status"]})


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def package_versions() -> Row:
    """Return the versions of the packages that the results depend on; None for a package that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_states() -> list[Row]:
    """Return name, clocks, power and memory of every GPU from nvidia-smi; an empty list without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(STATES)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [dict(zip(STATES, line.split(", "))) for line in lines]


# ---------------------------------------------------------------------------------------------------------- the summary


def summary(report: SessionReport, names: Iterable[str]) -> list[str]:
    """Return the lines of the summary of each part. names: of all parts, in their order."""
    lines: list[str] = []
    left: list[str] = []
    for name in names:
        if name in report.parts:
            lines += part_lines(name, report.parts[name])
        else:
            left.append(name)
    if left:
        lines.append(f"not run yet: {', '.join(left)}; the same command goes on with them")
    return lines


def part_lines(name: str, part: Row) -> list[str]:
    """Return the lines of a part: its counts, its goals met and missed, and its first failures."""
    counts = ", ".join(f"{len(part[kind])} {kind}" for kind in ("rows", "failures", "skipped"))
    lines = [f"{name}: {part['status']} after {part.get('seconds', 0)} s of {part['limit_s']:.0f}; {counts}"]
    lines += [f"    goal {goal_verdict(goal)}: {text}" for text, goal in part["goals"].items()]
    lines += [f"    FAILED: {describe_failure(failure)}" for failure in part["failures"][:SHOWN]]
    if len(part["failures"]) > SHOWN:
        lines.append(f"    and {len(part['failures']) - SHOWN} more failures")
    return lines


def goal_verdict(goal: Row) -> str:
    if not goal["measured"]:
        return "not measured"
    if goal["missed"]:
        return f"MISSED on {goal['missed']} of {goal['measured']} rows"
    return f"met on all {goal['measured']} rows"


def describe_failure(failure: Row) -> str:
    """Return the fields of a failure on one line, the last line of an error only."""
    short = {key: str(value).strip().rpartition("\n")[2][:160] for key, value in failure.items()}
    return ", ".join(f"{key} {value}" for key, value in short.items())


def is_good(report: SessionReport, names: Iterable[str]) -> bool:
    """Return True if all parts have run to their end without a failure and no goal was missed."""
    parts = [report.parts.get(name) for name in names]
    return all(
        part is not None and not part["failures"] and not any(goal["missed"] for goal in part["goals"].values())
        for part in parts
    )
