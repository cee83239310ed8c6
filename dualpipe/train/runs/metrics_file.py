"""The lines of `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def json_line(values: Mapping[str, object]) -> str:
    """Return a line of valid JSON; numbers that are not finite, which JSON lacks, become null."""
    def clean(value: object) -> object:
        if isinstance(value, list):
            return [clean(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: clean(value) for name, value in values.items()}, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`, without lines that are incomplete or damaged."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]
