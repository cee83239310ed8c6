"""From a `[data]` path to batches: packing on first use, and a loader whose order depends on the seed alone.

B sequences that a rank reads of the global batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dualpipe.train.pack import DOCUMENTS, INDEX, find_sources, fingerprint, pack, stdlib_sources
from dualpipe.train.tables import TEXT_KEY
from dualpipe.train.tokenizer import load_tokenizer
from dualpipe.train.tokens import PackedTokens, Splits, TokenStream, all_documents, split_documents

K = TypeVar("K")
V = TypeVar("V")


class Batch(NamedTuple):
    """A global batch, or a rank's rows of it: `targets` are `tokens` shifted by one."""

    tokens: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64
    positions: torch.Tensor  # (B, T) int64: of each token in its document, or in what the sequence has of it


class Loader:
    """Windows of T + 1 tokens of a stream, in a new random order each epoch.

    Windows do not overlap; what is left at the end of the stream is not used. Batch `step` is a pure function of the
    stream, the sizes and the seed, so that it does not matter how many ranks there are or where a run was resumed.

    batch_size: sequences of the global batch. rows: those of them that are read here; without, all.

    Raises:
        ValueError: the stream is shorter than one window.
    """

    def __init__(
        self, stream: TokenStream, *, sequence_length: int, batch_size: int, seed: int, rows: range | None = None
    ) -> None:
        self._stream, self._window, self._batch_size, self._seed = stream, sequence_length + 1, batch_size, seed
        self._rows = range(batch_size) if rows is None else rows
        self.num_windows = stream.num_tokens // self._window
        if not self.num_windows:
            raise ValueError(
                f"the text has {stream.num_tokens} tokens, but a sequence needs train.sequence_length + 1 = "
                f"{self._window}; lower train.sequence_length or give more text"
            )
        self.step = 0
        self._order = lru_cache(maxsize=2)(self._epoch_order)  # of this and, within a batch, the next epoch

    def batch(self, step: int) -> Batch:
        """The batch of training step `step`, counted from 0."""
        numbers = [step * self._batch_size + row for row in self._rows]
        windows = [self._order(n // self.num_windows)[n % self.num_windows] for n in numbers]
        return read_windows(self._stream, windows, self._window)

    @contextmanager
    def batches(self, stop: int) -> Iterator[Iterator[Batch]]:
        """For a `with`: the batches from `step` to before `stop`, read ahead. `step` counts those that were taken."""

        def counted() -> Iterator[Batch]:
            for batch in ahead:
                self.step += 1
                yield batch

        with read_ahead(self.batch, range(self.step, stop)) as ahead:
            yield counted()

    def _epoch_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_windows)

    def state_dict(self) -> dict[str, Any]:
        """The next step, and what the order depends on."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: the data, the sizes or the seed are others, and the order would not be the same.
        """
        different = [f"{key} {state.get(key)!r} (now {value!r})" for key, value in self._identity().items()
                     if state.get(key) != value]
        if different:
            what = ", ".join(different)
            raise ValueError(f"the loader's state is of another run: {what}; use the same data, sizes and seed")
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._stream.fingerprint, "num_windows": self.num_windows, "window": self._window,
            "batch_size": self._batch_size, "seed": self._seed,
        }


@contextmanager
def read_ahead(read: Callable[[K], V], keys: Iterable[K]) -> Iterator[Iterator[V]]:
    """For a `with`: `read(key)` for each of `keys`, in order. While one is used, a thread reads the next.

    What `read` raises is raised where its result would have been taken. Leaving waits for a `read` that has begun.
    """

    def results() -> Iterator[V]:
        pending = []
        for key in keys:
            pending.append(thread.submit(read, key))
            if len(pending) > 1:
                yield pending.pop(0).result()
        for last in pending:
            yield last.result()

    with ThreadPoolExecutor(1, thread_name_prefix="read_ahead") as thread:
        yield results()


def read_windows(stream: TokenStream, windows: Sequence[int], window: int) -> Batch:
    """The batch made of the given windows of `window` tokens."""
    rows, positions = np.empty((2, len(windows), window), dtype=np.int64)
    for row, number in enumerate(windows):
        span = int(number) * window, (int(number) + 1) * window
        rows[row], positions[row] = stream.read(*span), stream.positions(*span)
    parts = rows[:, :-1], rows[:, 1:], positions[:, :-1]
    return Batch(*(torch.from_numpy(part.copy()) for part in parts))


def read_batches(
    stream: TokenStream, batches: Iterable[Sequence[int]], *, sequence_length: int, rows: range
) -> AbstractContextManager[Iterator[Batch]]:
    """For a `with`: these rows of each of `batches`, which are given by their windows; read ahead."""
    return read_ahead(lambda batch: read_windows(stream, [batch[row] for row in rows], sequence_length + 1), batches)


def evaluation_batches(stream: TokenStream, *, sequence_length: int, batch_size: int, limit: int) -> list[list[int]]:
    """The windows of up to `limit` whole batches, spread evenly over the held-out text; the same at every call.

    Raises:
        ValueError: the text does not fill one batch.
    """
    available = stream.num_tokens // (sequence_length + 1)
    count = min(limit, available // batch_size)
    if limit and not count:
        raise ValueError(
            f"the held-out text has {available} sequences of {sequence_length} tokens, but a batch needs {batch_size}; "
            "raise data.validation_fraction, give data.validation_path, or set train.eval_batches = 0"
        )
    spread = np.linspace(0, available - 1, count * batch_size, dtype=np.int64)
    return [rows.tolist() for rows in spread.reshape(count, batch_size)] if count else []


def packed_directory(path: str, *, tokenizer: str, cache: Path, text_key: str = TEXT_KEY) -> Path:
    """The packed directory of a `[data]` path, which is made below `cache` where the path is text.

    `path` is a packed directory, a file or folder of text or records, or "stdlib".
    """
    folder = Path(path)
    if folder.is_dir() and any((folder / name).exists() for name in (INDEX, DOCUMENTS)):
        return folder
    sources = stdlib_sources() if path == "stdlib" else find_sources([path])
    if not sources:
        raise ValueError(f"data.path = {path!r} holds no text; give a folder with files")
    loaded = load_tokenizer(tokenizer)
    target = cache / f"data-{fingerprint(sources, loaded, text_key)}"
    if not (target / INDEX).exists():
        pack(sources, loaded, target, text_key=text_key)
    return target


def open_splits(train: Path, held_out: Path | None, fraction: float) -> Splits:
    """Open packed data: `held_out` as it is where given, otherwise `fraction` of the documents of `train`.

    Raises:
        ValueError: the two were packed with different tokenizers, or `fraction` leaves one side empty.
    """
    packed = PackedTokens(train)
    if held_out is None:
        return split_documents(packed, fraction)
    other = PackedTokens(held_out)
    if other.tokenizer != packed.tokenizer:
        raise ValueError(
            f"{train} was packed with the tokenizer {packed.tokenizer!r}, {held_out} with {other.tokenizer!r}; "
            "pack both with the same"
        )
    return Splits(all_documents(packed), all_documents(other))
