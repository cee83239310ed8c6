"""The order of the batches, resuming, and reading ahead."""

import itertools
import json
import operator
import threading

import pytest
import torch

from dualpipe.train.data.loader import Loader, read_ahead
from dualpipe.train.data.pack import pack
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ByteTokenizer


def make_loader(path, seed=0, batch_size=6, sequence_length=10):
    stream = TokenStream(PackedTokens(path))
    return Loader([stream], sequence_length=sequence_length, batch_size=batch_size, seed=seed)


def test_every_epoch_reads_every_window_once_in_another_order(many):
    loader = make_loader(many)
    stream = TokenStream(PackedTokens(many))
    windows = {tuple(stream.read(w * 11, w * 11 + 11).tolist()) for w in range(loader.num_windows)}
    count = loader.num_windows
    assert len(windows) == count > 100 and count % 6, "an epoch ends within a batch"
    rows = [(*t, y[-1]) for step in range(3 * count // 6 + 1)
            for t, y, _ in zip(*(x.tolist() for x in loader.batch(step)))]
    epochs = [rows[epoch * count : (epoch + 1) * count] for epoch in range(3)]
    assert all(set(epoch) == windows for epoch in epochs)
    for one, other in itertools.combinations([sorted(windows), *epochs], 2):
        assert sum(map(operator.eq, one, other)) < 10, "orders have nothing in common"


def test_targets_are_tokens_shifted(many):
    tokens, targets, _ = make_loader(many).batch(3)
    assert tokens.shape == targets.shape == (6, 10)
    assert (tokens[:, 1:] == targets[:, :-1]).all()


def test_batches_are_a_function_of_step_and_seed(many):
    one, two = make_loader(many), make_loader(many)
    assert (one.batch(50).tokens == two.batch(50).tokens).all()
    assert not (one.batch(0).tokens == make_loader(many, seed=1).batch(0).tokens).all()
    wide = make_loader(many, batch_size=12).batch(4).tokens
    assert (wide[:6] == one.batch(8).tokens).all() and (wide[6:] == one.batch(9).tokens).all()


def test_resume(many):
    with make_loader(many).batches(9) as batches:
        straight = [batch.tokens for batch in batches]
    half, resumed = make_loader(many), make_loader(many)
    with half.batches(9) as batches:
        for _ in range(4):
            next(batches)
        state = json.loads(json.dumps(half.state_dict()))
    assert state["step"] == half.step == 4, "those that were taken"
    resumed.load_state_dict(state)
    with resumed.batches(9) as batches:
        rest = [batch.tokens for batch in batches]
    assert torch.equal(torch.stack(rest), torch.stack(straight[4:])) and resumed.step == 9
    with pytest.raises(ValueError, match=r"of another run: seed 0 \(now 1\)"):
        make_loader(many, seed=1).load_state_dict(half.state_dict())


def test_skipped_batches(many):
    loader, resumed = make_loader(many), make_loader(many)
    loader.step, loader.skipped_batches = 2, 3
    with loader.batches(4) as batches:
        assert torch.equal(next(batches).tokens, make_loader(many).batch(5).tokens)
    state = loader.state_dict()
    resumed.load_state_dict(state)
    assert (resumed.step, resumed.skipped_batches) == (3, 3)


def test_a_state_of_another_order_is_refused(many):
    state = make_loader(many).state_dict()
    resumed = make_loader(many)
    assert resumed.load_state_dict(state) == ""
    with pytest.raises(ValueError, match=r"of another run: order 'feistel 9' \(now 'feistel 1'\)"):
        resumed.load_state_dict(state | {"order": "feistel 9"})


def test_a_rank_reads_its_rows_only(many):
    stream, read = TokenStream(PackedTokens(many)), []
    whole = make_loader(many).batch(70)
    for rows in (range(2, 4), range(5, 6), range(0)):
        loader = Loader([stream], sequence_length=10, batch_size=6, seed=0, rows=rows)
        stream.read = lambda *span: (read.append(span), TokenStream.read(stream, *span))[1]
        batch = loader.batch(70)
        assert all(torch.equal(part, all_rows[rows.start : rows.stop]) for part, all_rows in zip(batch, whole))
        assert batch.tokens.shape == (len(rows), 10) and len(read) == len(rows)
        assert loader.state_dict() == make_loader(many).state_dict(), "of the global batch, in any layout"
        read.clear()


def test_one_batch_is_read_ahead_in_a_thread_that_ends():
    read, done = [], threading.Semaphore(0)

    def times_ten(key):
        assert threading.current_thread() is not threading.main_thread()
        read.append(key)
        done.release()
        return key * 10

    with read_ahead(times_ten, range(100)) as results:
        assert not read, "nothing before the first is taken"
        assert next(results) == 0
        assert done.acquire(timeout=10) and done.acquire(timeout=10), "the next is read while this one is used"
        assert next(results) == 10
    assert read in ([0, 1], [0, 1, 2]), "one ahead of what was taken, and no more after leaving"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]
    with read_ahead(times_ten, range(3)) as results:
        assert list(results) == [0, 10, 20]
    with read_ahead(times_ten, []) as results:
        assert list(results) == []


def test_an_error_in_the_thread_is_raised_when_its_batch_is_taken(many):
    def broken(start, stop):
        if reads.count(None) == 12:
            raise OSError(5, "Input/output error")
        reads.append(None)
        return TokenStream.read(loader._streams[0], start, stop)

    loader, reads = make_loader(many), []
    loader._streams[0].read = broken
    with pytest.raises(OSError, match="Input/output error"), loader.batches(9) as batches:
        for taken, _ in enumerate(batches, 1):
            assert loader.step == taken <= 2, "12 rows are two batches"
    assert loader.step == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]


def test_other_data_is_refused(many, tmp_path):
    """With as many windows, but another text in one document."""
    half = make_loader(many).state_dict()
    text = tmp_path / "many" / "007"
    text.write_bytes(text.read_bytes().upper())
    pack(find_sources([tmp_path / "many"]), ByteTokenizer(), tmp_path / "other")
    loader = make_loader(tmp_path / "other")
    assert loader.num_windows == half["num_windows"]
    with pytest.raises(ValueError, match=r"of another run: data '\w+' \(now '\w+'\); use"):
        loader.load_state_dict(half)


def test_too_little_text(many):
    with pytest.raises(ValueError, match=r"the text has .* tokens, but a sequence needs .* = 100001"):
        make_loader(many, sequence_length=100000)
