"""Look up documents by bisection, in memory that does not grow with the text."""

import itertools
import json
import tracemalloc

import numpy as np
import pytest

from dualpipe.runtime.files import checksum_of
from dualpipe.train.data import document_index
from dualpipe.train.data.document_index import TextPart, scan
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.pack import DOCUMENT_TYPE, FORMAT, INDEX
from dualpipe.train.data.splits import open_splits, scan_splits, split_documents
from dualpipe.train.data.token_stream import PackedTokens


def documents_of(lengths, seed=0):
    """Records of documents of these lengths, one after the other in a shard."""
    documents = np.zeros(len(lengths), dtype=DOCUMENT_TYPE)
    documents["length"] = lengths
    documents["offset"] = np.cumsum(lengths) - lengths
    documents["hash"] = np.random.default_rng(seed).integers(0, 2**64, len(lengths), dtype=np.uint64)
    return documents


def pretend(folder, count, length):
    """A packed directory with a sparse shard: `count` documents of `length` tokens, of which most are never written."""
    folder.mkdir()
    documents = documents_of(np.full(count, length))
    np.save(folder / "documents.npy", documents)
    with open(folder / "tokens-00000.bin", "wb") as file:
        file.truncate(2 * count * length)
    is_checked = count * length < 10**9
    files = [{"file": path.name, "bytes": path.stat().st_size,
              "sha256": checksum_of(path, "sha256") if is_checked else "not looked at"}
             for path in (folder / "documents.npy", folder / "tokens-00000.bin")]
    (folder / INDEX).write_text(json.dumps({
        "format": FORMAT, "tokenizer": "bytes", "tokenizer_file": "", "vocab_size": 257, "dtype": "uint16",
        "end_of_document": 256, "largest": 256, "documents": count, "tokens": count * length,
        "document_index": files[0], "shards": files[1:],
    }))
    return folder


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("border", [0, 2**62, 2**63])
def test_spans_equal_those_of_a_cumulative_sum(monkeypatch, count, border):
    monkeypatch.setattr(document_index, "BLOCK", 8)
    monkeypatch.setattr(document_index, "_SCAN_CHUNK", 32)
    documents = documents_of(np.random.default_rng(1).integers(1, 6, count))
    part = TextPart(range(count), range(border, 2**64))
    chosen = documents[documents["hash"] >= border]
    ends = np.cumsum(chosen["length"], dtype=np.int64)
    index = scan(documents, part, "bytes")
    assert (index.num_documents, index.num_tokens) == (len(chosen), chosen["length"].sum())
    for start, stop in itertools.combinations(range(0, index.num_tokens + 1, 3), 2):
        records, bounds = index.span(start, stop)
        first = np.searchsorted(ends, start, side="right")
        last = np.searchsorted(ends, stop, side="left") + 1
        assert (records == chosen[first:last]).all()
        assert bounds.tolist() == [0, *ends.tolist()][first : last + 1]
    if not border:
        assert [index.number_at(token) for token in range(index.num_tokens)] == np.repeat(
            np.arange(count), documents["length"].astype(int)).tolist()


def test_ten_billion_tokens_take_little_memory_and_a_batch_a_few_records(tmp_path, monkeypatch):
    """For few long documents and for many; an order in memory would take 5 GB."""

    def noting(part, records):
        read.append(len(records))
        return select(part, records)

    peaks, read, select = [], [], TextPart.select
    monkeypatch.setattr(TextPart, "select", noting)
    for count, length in ((10_000, 1_000_000), (200_000, 50_000)):
        folder = pretend(tmp_path / f"{count}", count, length)
        tracemalloc.start()
        text, validation = open_splits(folder, None, 0.01)
        loader = Loader([text], sequence_length=16, batch_size=4, seed=0)
        assert text.num_tokens + validation.num_tokens == count * length >= 10**10
        assert loader.num_windows > 5 * 10**8
        read.clear()
        for step in (0, loader.num_windows // 4, 3 * loader.num_windows // 4):  # the last two where an epoch ends
            assert loader.batch(step).tokens.shape == (4, 16)
        assert len(read) <= 3 * 4 * 2 and max(read) <= 2 * document_index.BLOCK
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A number for each document would be 8 bytes; the interpreter's own objects differ by some 10 kB.
    assert peaks[1] - peaks[0] < 190_000 * 0.25, f"bytes for each document: {peaks}"
    assert max(peaks) < 4e6, peaks


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A packed directory with so many documents that scans are cached, and an empty folder for the scans."""
    monkeypatch.setattr(document_index, "CACHED_FROM", 100)
    (tmp_path / "cache").mkdir()
    return pretend(tmp_path / "packed", 5000, 10), tmp_path / "cache"


def scans_of(splits):
    """Return the results of the scans."""
    return [(stream.index.starts.tolist(), *stream.index[3:]) for stream in splits]


def test_a_scan_of_many_documents_is_cached_for_all_ranks_and_later_starts(many, monkeypatch):
    folder, cache = many
    expected = scans_of(split_documents(PackedTokens(folder), 0.1))
    scan_splits(folder, None, 0.1, cache=cache)
    assert len(list(cache.glob("documents-*.npy"))) == 2
    monkeypatch.setattr(document_index, "scan", None)
    cached = open_splits(folder, None, 0.1, cache=cache)
    assert scans_of(cached) == expected and isinstance(cached.train.index.starts, np.memmap)
    with pytest.raises(TypeError):
        open_splits(folder, None, 0.2, cache=cache)  # another split is scanned


def test_a_damaged_cached_scan_is_replaced(many):
    folder, cache = many
    expected = scans_of(open_splits(folder, None, 0.1, cache=cache))
    for pattern in ("*.npy", "*.json"):
        for path in cache.glob(pattern):
            path.write_bytes(path.read_bytes()[:-9])
        assert scans_of(open_splits(folder, None, 0.1, cache=cache)) == expected


def test_a_scan_that_cannot_be_cached_is_used_with_a_warning(many):
    folder, cache = many
    cache.rmdir()
    with pytest.warns(UserWarning, match="cannot be written: No such file or directory; each rank scans"):
        splits = open_splits(folder, None, 0.1, cache=cache)
    assert scans_of(splits) == scans_of(split_documents(PackedTokens(folder), 0.1))


def test_few_documents_leave_no_scan(tmp_path):
    folder = pretend(tmp_path / "packed", 5000, 10)
    scan_splits(folder, None, 0.1, cache=tmp_path)
    open_splits(folder, None, 0.1, cache=tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
