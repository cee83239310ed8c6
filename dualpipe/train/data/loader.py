"""Batches in an order that depends on the seed alone, and batches read one step ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from dualpipe.runtime.device import Event, Stream, record, record_stream, use_stream, wait
from dualpipe.train.data.mixture import Mixture, join_spans, read_spans
from dualpipe.train.data.sequences import ORDER, ConversationWindows, Windows, find_windows, shuffle
from dualpipe.train.data.token_stream import TokenBatch, TokenStream

# Value of "windows" in the state of a loader of conversations. The state of a loader of text has no "windows".
CONVERSATIONS = "whole conversations 1"


class Loader:
    """Loader of the windows of a stream or of a mixture of streams, in a new random order each epoch.

    The batch of a step is a pure function of the streams, their weights, the sizes and the seed: neither the number of
    ranks nor resuming changes it.

    Attributes:
        step: number of batches that were taken.
        skipped_batches: number of batches that the following steps skip, beyond their own number.
        mixture: chooses the sources of sequences. None: there is one stream.
        num_windows: windows in all streams.
        num_conversation_windows: windows in the streams of conversations.
        num_left_out: windows that are not read, because no target in them counts for the loss.

    Args:
        streams: the training text alone, or the sources of a mixture.
        sequence_length: T.
        batch_size: sequences of the global batch.
        seed: selects the random orders.
        rows: sequences of the global batch that this rank reads. None: all.
        columns: as in `TokenStream.read_windows`.
        depth: as in `TokenStream.read_windows`.
        separate_documents: as in `TokenStream.read_windows`.
        weights: weights of the sources of a mixture. (): there is one stream.

    Raises:
        ValueError: a stream is shorter than one window, or no target in it counts for the loss.
    """

    def __init__(
        self, streams: Sequence[TokenStream], *, sequence_length: int, batch_size: int, seed: int,
        rows: range | None = None, columns: torch.Tensor | None = None, depth: int = 0,
        separate_documents: bool = False, weights: Sequence[float] = (),
    ) -> None:
        self._streams = streams
        self._window = sequence_length + 1
        self._windows = [_find_windows(stream, self._window) for stream in self._streams]
        self.mixture = Mixture(weights, seed) if weights else None
        self._batch_size = batch_size
        self._seed = seed
        self._rows = range(batch_size) if rows is None else rows
        self._read = partial(read_spans, self._streams, window=self._window, columns=columns, depth=depth,
                             separate_documents=separate_documents)
        self.num_windows = sum(windows.num_windows for windows in self._windows)
        self.num_conversation_windows = sum(
            windows.num_windows for windows in self._windows if isinstance(windows, ConversationWindows))
        self.num_left_out = sum(windows.num_left_out for windows in self._windows)
        self.step = 0
        self.skipped_batches = 0

    def windows(self, step: int) -> np.ndarray:
        """Return the numbers of the windows that this rank reads in the batch of `step`, int64 (B,).

        For a loader of one stream.
        """
        return self._order(0, self._numbers(step))

    def batch(self, step: int) -> TokenBatch:
        """Return this rank's part of the batch of `step`, counted from 0, in a run that skips no batches."""
        if self.mixture is None:
            return self._read(self._windows[0].span(self.windows(step)))
        sources, draws = self.mixture.draws(self._numbers(step))
        spans = [windows.span(self._order(source, draws[sources == source]))
                 for source, windows in enumerate(self._windows)]
        return self._read(join_spans(sources, spans, self._window))

    def _numbers(self, step: int) -> np.ndarray:
        """Return the numbers of this rank's sequences in the batch of `step`, counted through the run, int64 (B,)."""
        return step * self._batch_size + np.array(self._rows, np.int64)

    def _order(self, source: int, draws: np.ndarray) -> np.ndarray:
        """Return the windows that sequences of a source read, by their `draws` (see `Draws`), int64 in that shape."""
        size = self._windows[source].num_windows
        epochs, places = np.divmod(draws, size)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():  # more than one if an epoch ends within the batch
            windows[epochs == epoch] = shuffle(places[epochs == epoch], size, self._seed + source, epoch)
        return windows

    def num_drawn(self, step: int) -> list[int]:
        """Return the number of sequences of each source in all batches before that of `step`, also the skipped ones."""
        number = (step + self.skipped_batches) * self._batch_size
        return [number] if self.mixture is None else self.mixture.num_drawn(number)

    @contextmanager
    def batches(self, stop: int, stream: Stream | None = None) -> Iterator[Iterator[TokenBatch]]:
        """Yield an iterator over the batches of the steps from `step` to before `stop`, read one ahead.

        Args:
            stop: number of steps of the run.
            stream: as in `read_ahead`.
        """

        def count_steps() -> Iterator[TokenBatch]:
            for batch in ahead:
                self.step += 1
                yield batch

        numbers = range(self.step + self.skipped_batches, stop + self.skipped_batches)
        with read_ahead(self.batch, numbers, stream) as ahead:
            yield count_steps()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and all that the order depends on, as JSON."""
        fingerprints = [stream.fingerprint for stream in self._streams]
        sizes = [windows.num_windows for windows in self._windows]
        state: dict[str, Any] = {
            "step": self.step, "data": fingerprints if self.mixture else fingerprints[0],
            "num_windows": sizes if self.mixture else sizes[0], "window": self._window,
            "batch_size": self._batch_size, "seed": self._seed, "passed_over": self.skipped_batches, "order": ORDER,
        }
        if any(stream.has_loss_mask for stream in self._streams):
            state["windows"] = CONVERSATIONS
        if self.mixture is not None:
            state["mixture"] = self.mixture.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Continue from a state; return a note to print, or "".

        Raises:
            ValueError: data, sizes or seed differ, or the state names another order.
        """
        differences = [f"{key} {state.get(key)!r} (now {value!r})" for key, value in self.state_dict().items()
                       if key not in ("step", "passed_over", "mixture") and state.get(key) != value]
        if differences:
            raise ValueError(f"the loader's state is of another run: {', '.join(differences)}; use the same data, "
                             "sizes and seed")
        self.step = int(state["step"])
        self.skipped_batches = int(state["passed_over"])
        if self.mixture is not None:
            return self._resume_mixture(state["mixture"])
        return ""

    def _resume_mixture(self, state: dict[str, Any]) -> str:
        """Continue from a saved mixture; return a note to print if the weights have changed, else ""."""
        assert self.mixture is not None, "a loader of one stream has no mixture"
        number = (self.step + self.skipped_batches) * self._batch_size
        weights = self.mixture.weights
        self.mixture = self.mixture.continue_from(state, number)
        if list(weights) == list(state["weights"]):
            return ""
        return (f"data.sources has new weights from step {self.step + 1} on: {_list_weights(weights)} (before: "
                f"{_list_weights(state['weights'])})")


def _list_weights(weights: Sequence[float]) -> str:
    """Return weights as text."""
    return ", ".join(f"{weight:g}" for weight in weights)


def _find_windows(stream: TokenStream, size: int) -> Windows:
    """Return the windows of a stream. Raises ValueError if there is none."""
    windows = find_windows(stream, size)
    if not windows.num_windows and windows.num_left_out:
        raise ValueError(f"no token of the {stream.num_documents} conversations in {stream.packed.path} counts for the "
                         "loss after they are cut; raise train.sequence_length, or give other conversations")
    if not windows.num_windows:
        lower = f", or lower train.sequence_length to at most {stream.num_tokens - 1}" if stream.num_tokens > 1 else ""
        raise ValueError(
            f"the text has {stream.num_tokens} tokens, but a sequence needs train.sequence_length + 1 = {size}; give "
            f"more text{lower}"
        )
    return windows


def state_has_loss_mask(state: Mapping[str, Any]) -> bool:
    """Return True if a loader with this state reads data with a loss mask."""
    return "windows" in state


@contextmanager
def read_ahead(
    read: Callable[[Any], TokenBatch], keys: Iterable[Any], stream: Stream | None = None
) -> Iterator[Iterator[TokenBatch]]:
    """Yield an iterator over `read(key)` for all keys, in order. A thread reads one result ahead.

    An exception in `read` is raised when its result is taken. Leaving the context waits for a `read` in progress.

    Args:
        read: called in the thread.
        keys: consumed one ahead.
        stream: side stream that copies results to its device as they are read. They must have equal shapes. None: do
            not copy.
    """
    uploader = None if stream is None else _Uploader(read, stream)
    with ThreadPoolExecutor(1, thread_name_prefix="read_ahead") as thread:
        if uploader is None:
            yield _results_ahead(thread, read, keys)
        else:
            yield map(uploader.finish, _results_ahead(thread, uploader.start, keys))


def _results_ahead(thread: ThreadPoolExecutor, read: Callable[[Any], Any], keys: Iterable[Any]) -> Iterator[Any]:
    """Yield `read(key)` for all keys. Starts the next one before it waits for the current one."""
    current: Future[Any] | None = None
    for key in keys:
        following = thread.submit(read, key)
        if current is not None:
            yield current.result()
        current = following
    if current is not None:
        yield current.result()


class _Uploader:
    """Copies batches to a device, through pinned memory.

    The memory is pinned once, before the first batch is used: pinning takes a lock of the driver, and was seen to delay
    a host that launches kernels by 12 ms (vllm-project/vllm#37006).

    Args:
        read: reads a batch.
        stream: side stream for the copies.
    """

    def __init__(self, read: Callable[[Any], TokenBatch], stream: Stream) -> None:
        self._read = read
        self._stream = stream
        self._pinned: torch.Tensor | None = None  # int64, the tensors of a batch one after the other
        self._copied: Event | None = None

    def start(self, key: Any) -> tuple[TokenBatch, Event | None]:
        """Read a batch and start its copy; return it with the event after the copy. Called in the reading thread."""
        batch = self._read(key)
        with use_stream(self._stream, None):
            sizes = [tensor.numel() for tensor in batch]
            if self._pinned is None:
                self._pinned = torch.empty(sum(sizes), dtype=torch.int64, device="cpu", pin_memory=True)
            if self._copied is not None:
                # Orders: the copy of the previous batch before this thread overwrites the pinned memory.
                self._copied.synchronize()
            torch.cat([tensor.flatten() for tensor in batch], out=self._pinned)
            copies = self._pinned.to(self._stream.device, non_blocking=True).split(sizes)
            self._copied = record(self._stream.device)
        return TokenBatch(*(copy.view(tensor.shape) for copy, tensor in zip(copies, batch))), self._copied

    def finish(self, started: tuple[TokenBatch, Event | None]) -> TokenBatch:
        """Make a started batch usable on the current stream and return it. Called in the computing thread."""
        batch, copied = started
        wait(copied, self._stream.device)  # orders: the copy before its readers
        record_stream(*batch)
        return batch
