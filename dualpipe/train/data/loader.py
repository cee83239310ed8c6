"""Batches of training data in an order that depends on the seed alone, read one step ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.device import Event, Stream, new_stream, record, record_stream, use_stream, wait
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train.config.load import check_data_paths
from dualpipe.train.config.schema import Config
from dualpipe.train.data.mixture import Mixture, join_spans, read_spans
from dualpipe.train.data.sequences import (
    ORDER,
    ConversationWindows,
    Span,
    Windows,
    choose_conversations,
    find_windows,
    shuffle,
)
from dualpipe.train.data.splits import Splits, choose_evaluation_windows, ensure_packed, open_splits, scan_splits
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
        streams: the training text, or the sources of a mixture.
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
        self, streams: TokenStream | Sequence[TokenStream], *, sequence_length: int, batch_size: int, seed: int,
        rows: range | None = None, columns: torch.Tensor | None = None, depth: int = 0,
        separate_documents: bool = False, weights: Sequence[float] = (),
    ) -> None:
        self._streams = [streams] if isinstance(streams, TokenStream) else list(streams)
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
        reads = (thread.submit(uploader.start if uploader else read, key) for key in keys)
        # Pairs submit the next read before they wait for the current one. The last read is paired with a dummy.
        results = (current.result() for current, _next in pairwise(chain(reads, [Future[Any]()])))
        yield map(uploader.finish, results) if uploader else results


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


class RunData:
    """Training and validation text of a run. Collective.

    Attributes:
        sources: training and validation text of each source; one, except in a mixture.
        evaluated: the sources whose validation text is read: only the first if data.validation_path is set, because all
            sources share that text.
        batch_size: sequences of a global batch.
        loader: loader of training batches.
        validation_windows: bounds of the windows of every validation batch.

    Args:
        config: configuration of the run.
        ranks: all ranks. Rank 0 packs the text.
        place: place of this rank in the mesh, which selects the rows of a global batch to read.
        split: selects the columns of a sequence to read.
        reads: False for a rank that needs no batches, between the first and the last stage.
        vocab_size: of the model.
        mtp_depth: of the model.
        device: device of the batches.

    Raises:
        ValueError: on all ranks, if text cannot be read, is too short, has tokens beyond `vocab_size`, or has a loss
            mask with a model with multi-token prediction.
    """

    def __init__(
        self, config: Config, ranks: RankSync, place: Mesh, split: SequenceSplit, *, reads: bool, vocab_size: int,
        mtp_depth: int, device: torch.device,
    ) -> None:
        train = config.train
        self._copy_stream = new_stream(device)  # side stream for copies of batches to the device; None on CPU
        min_validation_tokens = train.sequence_length + 1 if train.eval_batches else 0
        cache = Path(config.output.dir)
        paths = ranks.first(partial(_prepare, config))

        def open_sources() -> list[Splits]:
            fraction = config.data.validation_fraction
            return [
                open_splits(train_path, validation_path, fraction, at_least=min_validation_tokens, cache=cache,
                            is_mixed=len(paths) > 1)
                for train_path, validation_path in paths
            ]

        self.sources = ranks.agree(open_sources)  # one node alone may lack the files
        self.evaluated = self.sources[:1] if config.data.validation_path else self.sources
        _check_tokenizers(self.sources)
        if not self.has_loss_mask and self.evaluated[0].validation.has_loss_mask:
            path = self.evaluated[0].validation.packed.path
            raise ValueError(f"data.validation_path: {path} holds conversations, but all of data.sources hold text, "
                             "whose loss has no mask; give text, or a source with conversations")
        for stream in chain.from_iterable(self.sources):
            stream.packed.check_vocabulary(vocab_size)
        if self.has_loss_mask and mtp_depth:
            raise ValueError(f"mtp.weight: {self.sources[0].train.packed.path} holds conversations, and multi-token "
                             "prediction trains on text alone; set mtp.weight = 0")

        num_rows = train.micro_batch_size * train.num_chunks if reads else 0
        rows = range(num_rows * place.batch_shard, num_rows * (place.batch_shard + 1))
        columns = split.token_indices(train.sequence_length) if split.size > 1 else None
        separate_documents = config.data.separate_documents
        self.batch_size = train.micro_batch_size * train.num_chunks * config.parallel.batch_shards
        self.loader = Loader(
            [splits.train for splits in self.sources], sequence_length=train.sequence_length,
            batch_size=self.batch_size, seed=train.seed, rows=rows, columns=columns, depth=mtp_depth,
            separate_documents=separate_documents,
            weights=[source.weight for source in config.data.sources] if len(self.sources) > 1 else (),
        )
        self.validation_windows = self._choose_validation_windows(config, rows)
        self._read_validation = partial(
            read_spans, [splits.validation for splits in self.evaluated], window=train.sequence_length + 1,
            columns=columns, depth=mtp_depth, separate_documents=separate_documents,
        )

    @property
    def has_loss_mask(self) -> bool:
        """True if some tokens do not count for the loss, so that batches have different numbers of targets."""
        return any(splits.train.has_loss_mask for splits in self.sources)

    @property
    def num_validation_tokens(self) -> int:
        """The number of tokens of the validation text."""
        return sum(splits.validation.num_tokens for splits in self.evaluated)

    def _choose_validation_windows(self, config: Config, rows: range) -> list[Span]:
        """Return the bounds of the windows of every validation batch, for the rows of this rank."""
        num_batches = config.train.eval_batches
        if not num_batches or not any(splits.validation.num_documents for splits in self.evaluated):
            return []
        if len(self.evaluated) == 1:
            return self._choose_windows_of(self.evaluated[0], config, self.batch_size, num_batches, rows)
        # Batches of a mixture have sequences of all sources by weight, spread evenly over the text of each.
        numbers = np.arange(self.batch_size * num_batches)
        sources, _ = Mixture([source.weight for source in config.data.sources], config.train.seed).draws(numbers)
        spans = []
        for number, splits in enumerate(self.evaluated):
            count = int((sources == number).sum())
            at_least_one = max(1, count)  # there is no batch without sequences
            (span,) = self._choose_windows_of(splits, config, at_least_one, 1, range(at_least_one))
            spans.append(span.take(slice(count)))
        batches = join_spans(sources, spans, config.train.sequence_length + 1)
        batch_rows = np.array(rows, dtype=np.int64)
        return [batches.take(batch * self.batch_size + batch_rows) for batch in range(num_batches)]

    def _choose_windows_of(
        self, splits: Splits, config: Config, batch_size: int, limit: int, rows: range
    ) -> list[Span]:
        """Return the bounds of the windows of every validation batch in one source."""
        validation = splits.validation
        sequence_length = config.train.sequence_length
        batches = choose_evaluation_windows(
            validation, sequence_length=sequence_length, batch_size=batch_size, limit=limit, rows=rows)
        if validation.has_loss_mask and batches:
            return choose_conversations(validation, sequence_length + 1, batch_size, limit, rows)
        return [Span(np.array(starts, dtype=np.int64), None) for starts in batches]

    def source_shares(self, step: int) -> list[float] | None:
        """Return the share of the tokens of each source in the first `step` steps; None if there is one source."""
        num_drawn = self.loader.num_drawn(step)
        if len(num_drawn) == 1:
            return None
        return [count / sum(num_drawn) for count in num_drawn]

    def training_batches(self, stop: int) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Return a context with an iterator over the batches of the remaining steps up to `stop`, read one ahead."""
        return self.loader.batches(stop, self._copy_stream)

    def validation_batches(self) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Return a context with an iterator over the validation batches, read one ahead."""
        return read_ahead(self._read_validation, self.validation_windows, self._copy_stream)


def _prepare(config: Config) -> list[tuple[Path, Path | None]]:
    """Pack and scan the text on rank 0; return the packed directories of training and validation text, by source."""
    check_data_paths(config)
    data = config.data
    cache = Path(config.output.dir)
    pack_text = partial(ensure_packed, tokenizer=data.tokenizer, cache=cache, text_key=data.text_key, chat=data.chat,
                        chat_template=data.chat_template, end_token=data.end_token)
    paths = [source.path for source in data.sources] or [data.path]
    train_paths = [pack_text(path) for path in paths]
    validation_path = pack_text(data.validation_path) if data.validation_path else None
    for train_path in train_paths:
        scan_splits(train_path, validation_path, data.validation_fraction, cache=cache, is_mixed=len(train_paths) > 1)
    return [(train_path, validation_path) for train_path in train_paths]


def _check_tokenizers(sources: Sequence[Splits]) -> None:
    """Raise ValueError unless all sources have the same tokenizer. Chat templates and ends of documents may differ."""
    first, *others = [splits.train.packed for splits in sources]
    for packed in others:
        if not packed.has_vocabulary_of(first):
            raise ValueError(f"data.sources: {first.path} was packed with the tokenizer {first.tokenizer!r}, "
                             f"{packed.path} with {packed.tokenizer!r}; pack all with the same")
