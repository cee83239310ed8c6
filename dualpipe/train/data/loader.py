"""From a `[data]` path to batches: packing on first use, packed tokens, which are memory-mapped and checked, documents
that are held out, and a loader whose order depends on the seed alone.

B sequences that a rank reads of the global batch, T tokens of a sequence, C those of them that it reads: all, unless
context-parallel ranks share it. D depths of multi-token prediction.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dualpipe.runtime.device import Event, Stream, record, record_stream, use_stream, wait
from dualpipe.runtime.files import checksum_of
from dualpipe.train.config.schema import BYTES, TEXT_KEY, TOKENIZER
from dualpipe.train.data.document_index import KEPT_FROM, TextPart, open_index
from dualpipe.train.data.pack import DOCUMENT_TYPE, DOCUMENTS, FORMAT, INDEX, find_sources, load_tokenizer, pack
from dualpipe.train.data.shuffle import ORDER, shuffle

NO_TARGET = -100  # which `cross_entropy_loss` ignores
CHECKSUM_LIMIT = 1 << 30  # bytes; larger data is checked by size only, so that a start does not read terabytes


class PackedTokens:
    """A packed directory, open for reading; ValueError for one that is incomplete or not what its index says."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if not (self.path / INDEX).is_file():
                raise ValueError(f"there is no {INDEX}")
            content = (self.path / INDEX).read_bytes()
            self.identity = hashlib.sha256(content).hexdigest()
            try:
                index = json.loads(content.decode("utf-8"))
            except ValueError as error:
                raise ValueError(f"{INDEX} is not valid JSON ({error})") from error
            if not isinstance(index, dict) or index.get("format") != FORMAT:
                raise ValueError(f"{INDEX} is not of the format {FORMAT!r}")
            self.vocab_size, self.largest = int(index["vocab_size"]), int(index["largest"])
            self.tokenizer, dtype = str(index["tokenizer"]), np.dtype(index["dtype"]).newbyteorder("<")
            records = [index["document_index"], *index["shards"]]
            files = [self.path / Path(record["file"]).name for record in records]
            total = sum(record["bytes"] for record in records)
            for file, record in zip(files, records):
                if not file.is_file():
                    raise ValueError(f"{file.name} is missing")
                if (size := file.stat().st_size) != record["bytes"]:
                    raise ValueError(f"{file.name} has {size} bytes instead of {record['bytes']}")
                if total <= CHECKSUM_LIMIT and checksum_of(file, "sha256") != record["sha256"]:
                    raise ValueError(f"the checksum of {file.name} is wrong")
            self.shards = [np.memmap(file, dtype=dtype, mode="r") for file in files[1:]]
            self.documents = np.load(files[0], mmap_mode="r", allow_pickle=False)
            if self.documents.dtype != DOCUMENT_TYPE or len(self.documents) != index["documents"]:
                raise ValueError(f"{DOCUMENTS} does not hold the {index['documents']} documents of the index")
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error}" if isinstance(error, ValueError) else f"{INDEX} lacks or garbles {error}"
            raise ValueError(f"{path} is not a complete packed directory: {what}; make it again with `dualpipe data "
                             "pack`") from error

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse tokens that a model with `vocab_size` entries cannot embed."""
        if self.largest >= vocab_size:
            raise ValueError(
                f"{self.path} holds the token {self.largest}, but the model's vocab_size is {vocab_size}; set it to at "
                f"least {max(self.vocab_size, self.largest + 1)} or pack the text with the model's tokenizer"
            )


class TokenBatch(NamedTuple):
    """A global batch, or a rank's part of it: `targets` are `tokens` shifted by one, see `shifted`."""

    tokens: torch.Tensor  # (B, C) int64
    targets: torch.Tensor  # (B, C) int64, or (B, C, 1 + D)
    positions: torch.Tensor  # (B, T) int64: of each token in its document, or in what the sequence has of it


class TokenStream:
    """Documents of a packed directory, read as one long sequence; no memory is taken for each of them.

    part: of the text; without, all. cache: where a scan of very many documents is kept; None: nowhere.
    """

    def __init__(self, packed: PackedTokens, part: TextPart | None = None, *, cache: Path | None = None) -> None:
        self.packed = packed
        self.part = TextPart(range(len(packed.documents))) if part is None else part
        self.index = open_index(packed.documents, self.part, packed.tokenizer, identity=packed.identity, cache=cache)
        self.num_documents = self.index.num_documents
        self.num_tokens = self.index.num_tokens

    @property
    def fingerprint(self) -> str:
        """A digest of the tokenizer, the content and order of the documents, and where they are cut."""
        return self.index.fingerprint

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream as int64."""
        skip = self.part.skip
        records, bounds = self.index.span(start + skip, stop + skip)
        out = np.empty(stop - start, dtype=np.int64)
        for document, (begin, end) in zip(records, pairwise((bounds - skip).tolist())):
            first, last = max(start, begin), min(stop, end)
            shift = int(document["offset"]) - begin  # from the stream to the shard
            out[first - start : last - start] = self.packed.shards[document["shard"]][first + shift : last + shift]
        return out

    def positions(self, start: int, stop: int) -> np.ndarray:
        """The position of tokens [start, stop) of the stream in their documents, as far as those are inside."""
        skip = self.part.skip
        _, bounds = self.index.span(start + skip, stop + skip)
        numbers = np.arange(start, stop)
        begins = bounds[np.searchsorted(bounds, numbers + skip, side="right") - 1] - skip
        return numbers - np.maximum(begins, start)

    def read_windows(
        self, starts: Sequence[int] | np.ndarray, window: int, columns: torch.Tensor | None = None, *, depth: int = 0,
        separate_documents: bool = False,
    ) -> TokenBatch:
        """The batch made of the windows of `window` tokens from `starts`. columns: the tokens of each that are read
        here (C,), of which targets are those behind; positions are of all. None: all. depth: of `shifted`, within
        documents where these are separate."""
        rows, positions = np.empty((2, len(starts), window), dtype=np.int64)
        for row, start in enumerate(starts):
            rows[row] = self.read(int(start), int(start) + window)
            positions[row] = self.positions(int(start), int(start) + window)
        own: Any = slice(None) if columns is None else columns.numpy()
        positions = positions[:, :-1]
        targets = shifted(rows, depth, positions if separate_documents else None)
        parts = rows[:, :-1][:, own], targets[:, own], positions
        return TokenBatch(*(torch.from_numpy(part.copy()) for part in parts))


def shifted(rows: np.ndarray, depth: int = 0, positions: np.ndarray | None = None) -> np.ndarray:
    """What is to be predicted at each token but the last of `rows` (B, T + 1): the one behind it (B, T), or with a
    depth that and so many behind that (B, T, 1 + depth). The tokens that depth k is told besides, those up to k behind,
    must be among the T and, with their `positions` (B, T), in the same document; else it is NO_TARGET."""
    targets, length = rows[:, 1:], rows.shape[1] - 1
    if not depth:
        return targets
    found = np.full((*targets.shape, 1 + depth), NO_TARGET)
    for k in range(min(1 + depth, length)):
        behind = targets[:, k:]
        if positions is not None:
            behind = np.where(positions[:, k:] == positions[:, : length - k] + k, behind, NO_TARGET)
        found[:, : length - k, k] = behind
    return found


class Splits(NamedTuple):
    """Training text and the text that evaluation uses."""

    train: TokenStream
    held_out: TokenStream

    def unigram_loss(self, vocab_size: int, max_tokens: int = 1 << 26) -> float:
        """Nats per token of `held_out` under the token frequencies of `train` (first `max_tokens` of each; add-one)."""
        block, counts = 1 << 22, np.zeros((2, vocab_size), dtype=np.int64)
        for stream, count in zip(self, counts):
            end = min(stream.num_tokens, max_tokens)
            for start in range(0, end, block):
                count += np.bincount(stream.read(start, min(end, start + block)), minlength=vocab_size)
        log_p = np.log(counts[0] + 1.0) - np.log(counts[0].sum() + vocab_size)
        return float(-(counts[1] * log_p).sum() / counts[1].sum())


def split_documents(
    packed: PackedTokens, fraction: float, *, at_least: int = 0, cache: Path | None = None
) -> Splits:
    """Hold out about `fraction` of the documents, chosen by a hash of their content.

    The choice depends on nothing else: it is the same in every run, and a copy of a document is on the same side. Where
    it leaves one side without a document, as of a single file, the last `fraction` of all tokens is held out instead;
    ValueError where that is not one token. Where less than `at_least` tokens are held out either way, the last
    `at_least` of all are, if as many are left to train on. cache: as in `TokenStream`.
    """
    everything = range(len(packed.documents))
    border = min(int(fraction * 2.0**64), 2**64 - 1)
    sides = TextPart(everything, range(border, 2**64)), TextPart(everything, range(border))
    splits = Splits(*(TokenStream(packed, part, cache=cache) for part in sides))
    total = splits.train.num_tokens + splits.held_out.num_tokens
    can_have_enough = 2 * at_least <= total
    has_enough = splits.held_out.num_tokens >= at_least or not can_have_enough
    if not fraction or (splits.train.num_documents and splits.held_out.num_documents and has_enough):
        return splits
    whole = TokenStream(packed, cache=cache)
    count = int(total * fraction)
    if can_have_enough:
        count = max(count, at_least)
    if not count:
        raise ValueError(
            f"data.validation_fraction = {fraction} holds out none of the {total} tokens in {packed.path}; give at "
            f"least {enough_of(total, 1):g}, more text, or data.validation_path"
        )
    cut = total - count
    last, first = whole.index.number_at(cut - 1), whole.index.number_at(cut)  # the same unless the cut is between two
    _, bounds = whole.index.span(cut, cut + 1)
    sides = (TextPart(everything[: last + 1], num_tokens=cut), TextPart(everything[first:], skip=cut - int(bounds[0])))
    return Splits(*(TokenStream(packed, part, cache=cache) for part in sides))


def enough_of(total: int, tokens: int) -> float:
    """Return a fraction of `total`, with few digits, that is at least `tokens`."""
    unit = 10 ** (math.ceil(math.log10(total / tokens)) + 2)
    numerator = -(-tokens * unit // total)
    while int(total * (numerator / unit)) < tokens:  # as floating point rounds
        numerator += 1
    return numerator / unit


def packed_directory(path: str, *, tokenizer: str, cache: Path, text_key: str = TEXT_KEY) -> Path:
    """The packed directory of a `[data]` path, which is made below `cache` where the path is text.

    `path` is a packed directory, a file or folder of text or records, or "stdlib".
    """
    folder = Path(path)
    if folder.is_dir() and any((folder / name).exists() for name in (INDEX, DOCUMENTS)):
        return folder
    sources = find_sources([path])
    if not sources:
        raise ValueError(f"data.path = {path!r} holds no text; give a folder with files")
    loaded = load_tokenizer(tokenizer)
    digest = hashlib.sha256(f"{FORMAT}\n{loaded.identity}\n{text_key}\n".encode())
    for source in sources:  # are the same where names, sizes and times are, without reading them
        stat = source.path.stat()
        digest.update(f"{source.path.resolve()}\0{source.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    target = cache / f"data-{digest.hexdigest()[:12]}"
    if not (target / INDEX).exists():
        pack(sources, loaded, target, text_key=text_key)
    return target


def scan_splits(train: Path, held_out: Path | None, fraction: float, *, cache: Path) -> None:
    """Scan very many documents for all ranks, whose `open_splits` then finds in `cache` what there is to know."""
    try:
        counts = [json.loads((path / INDEX).read_text(encoding="utf-8"))["documents"]
                  for path in (train, held_out) if path is not None]
        is_large = max(counts) >= KEPT_FROM
    except (OSError, ValueError, KeyError, TypeError):
        return  # what is wrong with the index is said where it is opened
    if is_large:
        open_splits(train, held_out, fraction, cache=cache)


def open_splits(
    train: Path, held_out: Path | None, fraction: float, *, at_least: int = 0, cache: Path | None = None
) -> Splits:
    """Open packed data: `held_out` as it is where given, otherwise `fraction` of the documents of `train`.

    Raises ValueError where the two were packed with different tokenizers, or `fraction` leaves one side empty.
    at_least: tokens to hold out, as in `split_documents`. cache: as in `TokenStream`.
    """
    packed = PackedTokens(train)
    if held_out is None:
        return split_documents(packed, fraction, at_least=at_least, cache=cache)
    other = PackedTokens(held_out)
    if other.tokenizer != packed.tokenizer:
        raise ValueError(
            f"{train} was packed with the tokenizer {packed.tokenizer!r}, {held_out} with {other.tokenizer!r}; "
            "pack both with the same"
        )
    return Splits(TokenStream(packed, cache=cache), TokenStream(other, cache=cache))


def check_tokenizer(packed: PackedTokens, checkpoint: str) -> str:
    """Return what to say of text that was packed with another tokenizer than the one beside a checkpoint, which a
    model begins with; "" where it was not, or there is none."""
    path = Path(checkpoint, TOKENIZER)
    if not checkpoint or not path.is_file() or packed.tokenizer.startswith(f"sha256:{checksum_of(path, 'sha256')}:"):
        return ""
    used = "as bytes" if packed.tokenizer == BYTES else "with another tokenizer"
    return (f"{packed.path} was packed {used}, but the model begins with a checkpoint that has a tokenizer of its own; "
            f"set data.tokenizer = {str(path)!r}, or pack the text with it")


# -- batches


class Loader:
    """Windows of T + 1 tokens of a stream, in a new random order each epoch.

    Windows do not overlap; what is left at the end of the stream is not used. Batch `step` is a pure function of the
    stream, the sizes and the seed, so that it does not matter how many ranks there are or where a run was resumed.

    batch_size: sequences of the global batch. rows: those of them that are read here; without, all. columns, depth,
    separate_documents: as in `TokenStream.read_windows`.

    Raises ValueError where the stream is shorter than one window.
    """

    def __init__(
        self, stream: TokenStream, *, sequence_length: int, batch_size: int, seed: int, rows: range | None = None,
        columns: torch.Tensor | None = None, depth: int = 0, separate_documents: bool = False,
    ) -> None:
        self._stream, self._window, self._batch_size, self._seed = stream, sequence_length + 1, batch_size, seed
        self._rows = range(batch_size) if rows is None else rows
        self._read = partial(stream.read_windows, window=self._window, columns=columns, depth=depth,
                             separate_documents=separate_documents)
        self.num_windows = count = stream.num_tokens // self._window
        if not count:
            raise ValueError(
                f"the text has {stream.num_tokens} tokens, but a sequence needs train.sequence_length + 1 = "
                f"{self._window}; lower train.sequence_length or give more text"
            )
        self.step = 0
        self.passed_over = 0  # batches that later steps leave out, before theirs

    def windows(self, step: int) -> np.ndarray:
        """The windows that are read here of the batch of step `step`, as `batch` counts it; int64."""
        epochs, places = np.divmod(step * self._batch_size + np.array(self._rows, np.int64), self.num_windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():  # two within a batch where one ends
            windows[epochs == epoch] = shuffle(places[epochs == epoch], self.num_windows, self._seed, epoch)
        return windows

    def batch(self, step: int) -> TokenBatch:
        """The batch of training step `step`, counted from 0, of a run that passes over none."""
        return self._read(self.windows(step) * self._window)

    @contextmanager
    def batches(self, stop: int, stream: Stream | None = None) -> Iterator[Iterator[TokenBatch]]:
        """For a `with`: the batches of steps from `step` to before `stop`, read ahead. `step` counts those that were
        taken.

        stream: as in `read_ahead`.
        """

        def counted() -> Iterator[TokenBatch]:
            for batch in ahead:
                self.step += 1
                yield batch

        with read_ahead(self.batch, range(self.step + self.passed_over, stop + self.passed_over), stream) as ahead:
            yield counted()

    def state_dict(self) -> dict[str, Any]:
        """The next step, and what the order depends on."""
        return {
            "step": self.step, "data": self._stream.fingerprint, "num_windows": self.num_windows,
            "window": self._window, "batch_size": self._batch_size, "seed": self._seed,
            "passed_over": self.passed_over, "order": ORDER,
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Continue where `state` was taken; returns what is to be said of that, "" for nothing.

        A state from before orders had a name goes on from its position, in the order of today. Raises ValueError where
        data, sizes or seed are others, or the order is one that has another name.
        """
        known = {"order": ORDER} | state
        different = [f"{key} {known.get(key)!r} (now {value!r})" for key, value in self.state_dict().items()
                     if key not in ("step", "passed_over") and known.get(key) != value]
        if different:
            raise ValueError(f"the loader's state is of another run: {', '.join(different)}; use the same data, sizes "
                             "and seed")
        self.step = int(state["step"])
        self.passed_over = int(state.get("passed_over", 0))
        if "order" in state:
            return ""
        return ("the checkpoint is from a version that drew the order of the data in another way: from here on batches "
                "are others than that version would have read, and of the epoch under way some sequences are read "
                "twice and some not at all")


@contextmanager
def read_ahead(
    read: Callable[[Any], TokenBatch], keys: Iterable[Any], stream: Stream | None = None
) -> Iterator[Iterator[TokenBatch]]:
    """For a `with`: `read(key)` for each of `keys`, in order. While one is used, a thread reads the next.

    stream: beside the computing one; it copies batches, which must be of one shape, to its device, as they are read.

    What `read` raises is raised where its result would have been taken. Leaving waits for a `read` that has begun.
    """
    copies = None if stream is None else _Copies(read, stream)
    with ThreadPoolExecutor(1, thread_name_prefix="read_ahead") as thread:
        reads = (thread.submit(copies.start if copies else read, key) for key in keys)
        results = (this.result() for this, _next in pairwise(chain(reads, [Future[Any]()])))
        yield map(copies.finish, results) if copies else results


class _Copies:
    """Batches on their way to a device, from pinned memory that each of them is copied to first.

    It is pinned once, before the first batch is used: pinning takes a lock of the driver's, and was seen to hold up a
    host that launches kernels for 12 ms (vllm-project/vllm#37006).
    """

    def __init__(self, read: Callable[[Any], TokenBatch], stream: Stream) -> None:
        self._read, self._stream = read, stream
        self._pinned: torch.Tensor | None = None  # int64: what a batch holds, one after the other
        self._copied: Event | None = None

    def start(self, key: Any) -> tuple[TokenBatch, Event | None]:
        """In the thread that reads: a batch of the device, and the event after which it is there."""
        batch = self._read(key)
        with use_stream(self._stream, None):
            sizes = [part.numel() for part in batch]
            if self._pinned is None:
                self._pinned = torch.empty(sum(sizes), dtype=torch.int64, device="cpu", pin_memory=True)
            if self._copied is not None:
                self._copied.synchronize()  # orders: the copy of the batch before, then this thread, which alone waits
            torch.cat([part.flatten() for part in batch], out=self._pinned)
            copied = self._pinned.to(self._stream.device, non_blocking=True).split(sizes)
            self._copied = record(self._stream.device)
        return TokenBatch(*(part.view(like.shape) for part, like in zip(copied, batch))), self._copied

    def finish(self, started: tuple[TokenBatch, Event | None]) -> TokenBatch:
        """In the thread that computes: the batch, for its current stream."""
        batch, copied = started
        wait(copied, self._stream.device)  # orders: the copy, then what reads it
        record_stream(*batch)
        return batch


def evaluation_batches(
    stream: TokenStream, *, sequence_length: int, batch_size: int, limit: int, rows: range | None = None,
    fraction_of: int = 0,
) -> list[list[int]]:
    """Where the windows of up to `limit` whole batches start, spread evenly over the held-out text; the same at every
    call. Of a text that has fewer windows than a batch, one batch of windows that overlap.

    rows: those of a batch that are read here; without, all. fraction_of: the tokens that the text is a fraction of; 0
    where it is a text by itself. Raises ValueError where the text is shorter than a window.
    """
    window = sequence_length + 1
    available = stream.num_tokens // window
    if limit and not available:
        raise ValueError(f"the held-out text has {stream.num_tokens} tokens, but a sequence needs train.sequence_length"
                         f" + 1 = {window}; {_more_held_out(window, fraction_of)}, or set train.eval_batches = 0")
    if available >= batch_size:
        count = min(limit, available // batch_size)
        starts = np.linspace(0, available - 1, count * batch_size, dtype=np.int64) * window
    else:
        count = min(limit, 1)
        starts = np.linspace(0, stream.num_tokens - window, count * batch_size, dtype=np.int64)
    return starts.reshape(count, batch_size)[:, range(batch_size) if rows is None else rows].tolist()


def _more_held_out(window: int, fraction_of: int) -> str:
    """What gives the held-out text as many tokens as a window has."""
    if not fraction_of:
        return "give more text in data.validation_path, lower train.sequence_length"
    if fraction_of < 2 * window:
        return (f"the whole text has {fraction_of}, and training needs as many: give more text, lower "
                f"train.sequence_length to at most {fraction_of // 2 - 1}, give data.validation_path")
    return (f"raise data.validation_fraction to at least {enough_of(fraction_of, window):g}, as the whole text has "
            f"{fraction_of}, give data.validation_path")
