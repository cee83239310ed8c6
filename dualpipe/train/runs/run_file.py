"""`run.json` in the output directory of a run: its settings, at every start.

    {"starts": [{"step": 0, "time": ..., "versions": {"torch": ...}, "settings": {"run": {...}, "model": {...}}}, ...]}
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dualpipe
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.printing import warn

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Start:
    """A start of a run.

    step: steps that were done before. time: in UTC, ISO 8601. versions: of packages. settings: the description of a
    checkpoint's origin, see `dualpipe.train.checkpointing.training_state.describe`.
    """

    step: int
    time: str
    versions: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def now(cls, step: int, settings: Mapping[str, Any]) -> Start:
        """Return a start with the versions of this process."""
        versions = {
            "dualpipe": dualpipe.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return cls(step, datetime.now(UTC).isoformat(timespec="seconds"), versions, dict(settings))


def record_start(folder: Path, start: Start) -> None:
    """Add a start to `run.json`; the first start of a run replaces the file. A failure is a warning."""
    path = folder / RUN_FILE
    try:
        earlier = read_starts(folder) if start.step else []
        content = {"starts": [asdict(each) for each in (*earlier, start)]}
        replace_file(path, json.dumps(content, indent=1, default=str) + "\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        warn(f"{path} cannot be written: {reason}; `dualpipe compare` will not know the settings of this run")


def read_starts(folder: Path) -> list[Start]:
    """Return the starts of a run, the last one last; none without `run.json`.

    Raises ValueError if the file is damaged.
    """
    path = folder / RUN_FILE
    if not path.exists():
        return []
    try:
        return [Start(**start) for start in json.loads(path.read_text(encoding="utf-8"))["starts"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); expected the file that `dualpipe "
                         "train` writes: remove it to compare without settings") from error
