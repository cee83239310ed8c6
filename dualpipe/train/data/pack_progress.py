"""Progress bar of packing, on stderr if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dualpipe.train.tokenization.encode_documents import EncodedDocument

INTERVAL = 0.2  # seconds between updates


class PackProgress:
    """Progress of packing: the share of the files that is read, and tokens per second. Used in a `with` statement.

    Prints nothing unless stderr is a terminal. The bar disappears at the end.

    Args:
        files: the files to pack.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._is_shown = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("packing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(), console=Console(stderr=True), transient=True, disable=not self._is_shown,
        )
        total = sum(map(_size_of, files)) if self._is_shown else None
        self._task = self._bar.add_task("", total=total, rate="")
        self._started = time.monotonic()
        self._next_update = 0.0
        self._finished_bytes = 0  # of the files before the current one
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def set_position(self, position: int) -> None:
        """Record that the current file is read up to `position`, in bytes."""
        now = time.monotonic()
        if not self._is_shown or now < self._next_update:
            return
        self._next_update = now + INTERVAL
        rate = self._num_tokens / (now - self._started + 1e-9)
        text = f"{self._num_tokens:,} tokens, {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=self._finished_bytes + position, rate=text)

    def finish_file(self, file: Path) -> None:
        """Record that all of a file is read."""
        if self._is_shown:
            self._finished_bytes += _size_of(file)
            self.set_position(0)

    def count_tokens(self, documents: Iterable[EncodedDocument]) -> Iterator[EncodedDocument]:
        """Yield the documents, and add their tokens to the rate."""
        for document in documents:
            self._num_tokens += len(document.tokens)
            yield document


def _size_of(file: Path) -> int:
    """Return the size of a file in bytes, 0 if it has gone."""
    try:
        return file.stat().st_size
    except OSError:  # reading the file reports it
        return 0
