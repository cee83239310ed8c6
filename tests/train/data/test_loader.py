"""Packing text, reading it back, splitting it, and the order of the batches."""

import itertools
import json
import operator
import shutil
import threading

import numpy as np
import pytest
import torch

from dualpipe.train.config.schema import DataConfig
from dualpipe.train.data.loader import (
    Loader,
    PackedTokens,
    Splits,
    TokenStream,
    check_tokenizer,
    enough_of,
    evaluation_batches,
    open_splits,
    packed_directory,
    read_ahead,
    split_documents,
)
from dualpipe.train.data.pack import ByteTokenizer, FileTokenizer, find_sources, load_tokenizer, pack
from ranks import run_ranks

END = ByteTokenizer.end_of_document


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"bee")
    (folder / "a.txt").write_bytes(b"a\xff\x01")
    (folder / "sub" / "c.txt").write_bytes(b"sea")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"no")
    return folder


@pytest.fixture
def many(tmp_path):
    """200 documents of uneven lengths, packed in several shards."""
    folder = tmp_path / "many"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(200):
        (folder / f"{i:03d}").write_bytes(rng.integers(97, 123, rng.integers(1, 90)).astype(np.uint8).tobytes())
    pack(find_sources([folder]), ByteTokenizer(), tmp_path / "packed", shard_tokens=1000)
    return tmp_path / "packed"


def texts_of(stream):
    """The documents of a stream, which must end with the end of one."""
    tokens = stream.read(0, stream.num_tokens)
    pieces = np.split(tokens, np.flatnonzero(tokens == END) + 1)
    assert not len(pieces.pop())
    return [bytes(piece[:-1].tolist()) for piece in pieces]


def stream_of(path):
    stream = TokenStream(PackedTokens(path))
    return stream.read(0, stream.num_tokens).tolist()


def test_pack_bytes_in_order(texts, tmp_path):
    packed = pack(find_sources([texts]), ByteTokenizer(), tmp_path / "out")
    assert (packed["documents"], packed["tokens"]) == (3, 12)
    expected = [*b"a\xff\x01", END, *b"bee", END, *b"sea", END]
    assert stream_of(tmp_path / "out") == expected
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert (index["dtype"], index["vocab_size"], index["tokens"]) == ("uint16", 257, 12)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [], "no temporary left"


def test_order_of_arguments_is_kept(texts, tmp_path):
    pack(find_sources([texts / "sub/c.txt", texts / "b.txt"]), ByteTokenizer(), tmp_path / "out")
    assert stream_of(tmp_path / "out") == [*b"sea", END, *b"bee", END]


def test_repacking_gives_the_same_files_and_replaces_the_old(texts, tmp_path):
    def contents():
        pack(find_sources([texts]), ByteTokenizer(), tmp_path / "out", overwrite=True)
        return {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    first = contents()
    assert contents() == first
    (texts / "d.txt").write_bytes(b"new")
    assert contents() != first
    assert stream_of(tmp_path / "out")[8:12] == [*b"new", END], "d.txt comes before sub/c.txt"


def test_a_failed_repack_leaves_the_old(texts, tmp_path):
    class Broken(ByteTokenizer):
        def encode(self, text):
            if text == b"sea":
                raise ValueError("boom")
            return super().encode(text)

    pack(find_sources([texts]), ByteTokenizer(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"cannot tokenise .*c.txt: boom"):
        pack(find_sources([texts]), Broken(), tmp_path / "out", overwrite=True)
    assert len(stream_of(tmp_path / "out")) == 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "texts"]


def test_pack_refuses(texts, tmp_path):
    with pytest.raises(ValueError, match="there is no file or directory"):
        find_sources([tmp_path / "none"])
    with pytest.raises(ValueError, match="there is no text to pack"):
        pack(find_sources([texts / "empty.txt"]), ByteTokenizer(), tmp_path / "out")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="exists and is no packed directory"):
            pack(find_sources([texts]), ByteTokenizer(), texts, overwrite=overwrite)
    with pytest.raises(ValueError, match=r"b.txt/out cannot be written: .*; choose another place"):
        pack(find_sources([texts]), ByteTokenizer(), texts / "b.txt/out")
    assert not (tmp_path / "out").exists()


def test_packing_next_to_the_text_again_leaves_out_what_was_packed(texts):
    packed = [pack(find_sources([texts]), ByteTokenizer(), texts / "packed", overwrite=True) for _ in range(2)]
    assert packed[0] == packed[1]


def test_tokenizers_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "<|endoftext|>": 70000}
    hub = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    hub.pre_tokenizer = pre_tokenizers.Whitespace()
    hub.save(str(tmp_path / "tok.json"))
    (tmp_path / "t.txt").write_text("hello world hello what")
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ValueError, match=r"cannot read the tokenizer .*checkpoint/tokenizer.json: No such file"):
        load_tokenizer(str(tmp_path / "checkpoint"))
    hub.save(str(tmp_path / "checkpoint/tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tok.json"))
    assert load_tokenizer(str(tmp_path / "checkpoint")).identity == tokenizer.identity
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (70001, 70000)
    pack(find_sources([tmp_path / "t.txt"]), tokenizer, tmp_path / "out")
    assert stream_of(tmp_path / "out") == [1, 2, 1, 0, 70000]
    assert json.loads((tmp_path / "out/index.json").read_text())["dtype"] == "uint32"
    assert check_tokenizer(PackedTokens(tmp_path / "out"), str(tmp_path / "checkpoint")) == ""
    (tmp_path / "checkpoint/tokenizer.json").write_text("another")
    assert "was packed with another tokenizer, but the model begins with a checkpoint that has" in check_tokenizer(
        PackedTokens(tmp_path / "out"), str(tmp_path / "checkpoint"))
    with pytest.raises(ValueError, match="--end-of-document 'x': bytes have their own"):
        load_tokenizer("bytes", "x")
    with pytest.raises(ValueError, match="no token 'x'; name its end-of-document token"):
        FileTokenizer(tmp_path / "tok.json", end_of_document="x")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        FileTokenizer(tmp_path / "t.txt")
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        FileTokenizer(tmp_path / "none.json")
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        pack(find_sources([tmp_path / "t.txt"]), tokenizer, tmp_path / "out2")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("tokens-00001.bin", truncate, "tokens-00001.bin has .* bytes instead of"),
        ("tokens-00000.bin", flip, "the checksum of tokens-00000.bin is wrong"),
        ("tokens-00000.bin", lambda p: p.unlink(), "tokens-00000.bin is missing"),
        ("documents.npy", flip, "the checksum of documents.npy is wrong"),
        ("documents.npy", lambda p: p.unlink(), "documents.npy is missing"),
        ("index.json", truncate, "not valid JSON"),
        ("index.json", lambda p: p.unlink(), "there is no index.json"),
        ("index.json", lambda p: p.write_text("{}"), "not of the format"),
        ("index.json", lambda p: p.write_text('{"format": "dualpipe tokens 1"}'), "lacks or garbles"),
    ],
)
def test_damage_is_found(many, file, damage, message):
    damage(many / file)
    with pytest.raises(ValueError, match=f"not a complete packed directory: .*{message}"):
        PackedTokens(many)
    assert packed_directory(str(many), tokenizer="bytes", cache=many.parent) == many, "not taken for text"


def test_split_is_by_document_and_stable(many):
    packed = PackedTokens(many)
    train, held_out = split_documents(packed, 0.2)
    assert train.num_documents + held_out.num_documents == 200
    assert 20 <= held_out.num_documents <= 60
    documents = [texts_of(s) for s in (train, held_out)]
    assert [len(d) for d in documents] == [train.num_documents, held_out.num_documents]
    assert sorted(documents[0] + documents[1]) == sorted(texts_of(TokenStream(packed)))
    assert [s.num_tokens for s in split_documents(packed, 0.2)] == [train.num_tokens, held_out.num_tokens]


def test_copies_of_a_document_are_on_one_side(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_bytes(b"copy %d" % (i % 20))
    pack(find_sources([tmp_path]), ByteTokenizer(), tmp_path / "out")
    for stream in split_documents(PackedTokens(tmp_path / "out"), 0.5):
        texts = texts_of(stream)
        assert texts and all(texts.count(t) == 2 for t in texts)


def test_no_split_and_an_impossible_one(many, texts, tmp_path):
    train, held_out = split_documents(PackedTokens(many), 0.0)
    assert (train.num_documents, held_out.num_documents) == (200, 0)
    pack(find_sources([texts / "b.txt"]), ByteTokenizer(), tmp_path / "one")
    with pytest.raises(ValueError, match=r"validation_fraction = 0\.1 holds out none of the 4 tokens"):
        split_documents(PackedTokens(tmp_path / "one"), 0.1)
    splits = open_splits(many, tmp_path / "one", 0.5)
    assert (splits.train.num_documents, splits.held_out.num_tokens) == (200, 4)
    other = ByteTokenizer()
    other.identity = "another"
    pack(find_sources([texts / "b.txt"]), other, tmp_path / "other")
    with pytest.raises(ValueError, match=r"was packed with the tokenizer 'bytes', .* with 'another'"):
        open_splits(many, tmp_path / "other", 0.5)


def check_last_tokens(packed, fraction):
    """The last of all tokens are held out, the same each time; returns how many documents are on each side."""
    whole, splits = TokenStream(packed), split_documents(packed, fraction)
    count = int(whole.num_tokens * fraction)
    assert [stream.num_tokens for stream in splits] == [whole.num_tokens - count, count]
    text = np.concatenate([stream.read(0, stream.num_tokens) for stream in splits])
    assert (text == whole.read(0, whole.num_tokens)).all()
    for stream, start in zip(splits, (0, whole.num_tokens - count)):
        positions = stream.positions(0, stream.num_tokens)
        assert (positions == whole.positions(start, start + stream.num_tokens)).all()
        middle = stream.num_tokens // 2
        assert (stream.read(middle, stream.num_tokens) == stream.read(0, stream.num_tokens)[middle:]).all()
    again, other = split_documents(packed, fraction), split_documents(packed, fraction / 2)
    assert again.train.fingerprint == splits.train.fingerprint != other.train.fingerprint != whole.fingerprint
    return [stream.num_documents for stream in splits]


def test_a_single_file_is_held_out_by_its_last_tokens(tmp_path):
    """Whether a hash of its content would hold it out, and leave nothing to train on, or not."""
    seen = set()
    for i in range(40):
        (tmp_path / "input.txt").write_text(f"{i:999}")
        pack(find_sources([tmp_path / "input.txt"]), ByteTokenizer(), tmp_path / "out", overwrite=True)
        packed = PackedTokens(tmp_path / "out")
        seen.add(bool(packed.documents["hash"][0] < 2**62))
        assert check_last_tokens(packed, 0.25) == [1, 1]
        if len(seen) == 2:
            break
    assert len(seen) == 2
    splits = open_splits(tmp_path / "out", None, DataConfig().validation_fraction)
    assert [stream.num_tokens for stream in splits] == [980, 20]


@pytest.mark.parametrize("hashed", [0, 2**64 - 1])
def test_so_are_a_few_files_of_which_a_hash_holds_out_none_or_all(tmp_path, hashed):
    for i, size in enumerate((9, 19, 39, 9)):  # 80 tokens with the ends
        (tmp_path / f"{i}.txt").write_bytes(b"%d" % i * size)
    pack(find_sources([tmp_path]), ByteTokenizer(), tmp_path / "out", shard_tokens=25)
    packed = PackedTokens(tmp_path / "out")
    packed.documents = np.array(packed.documents)
    packed.documents["hash"] = hashed
    assert check_last_tokens(packed, 0.5) == [3, 2], "within the third"
    assert check_last_tokens(packed, 0.625) == [2, 2], "between two"
    assert check_last_tokens(packed, 0.05) == [4, 1], "within the last"
    assert check_last_tokens(packed, 0.95) == [1, 4], "within the first"


def test_streams_of_whole_documents_have_the_fingerprints_that_checkpoints_have(many):
    assert split_documents(PackedTokens(many), 0.2).train.fingerprint == "c771769c856f97cd"


def test_stream_reads_across_documents_and_shards(many):
    packed = PackedTokens(many)
    assert len(list(many.glob("*.bin"))) > 3
    stream = split_documents(packed, 0.3).train
    whole = stream.read(0, stream.num_tokens)
    for start in range(0, stream.num_tokens - 150, 37):
        assert (stream.read(start, start + 150) == whole[start : start + 150]).all()


def make_loader(path, seed=0, batch_size=6, sequence_length=10):
    return Loader(TokenStream(PackedTokens(path)), sequence_length=sequence_length, batch_size=batch_size, seed=seed)


def test_positions_start_anew_with_each_document_and_each_sequence(many):
    stream = TokenStream(PackedTokens(many))
    lengths = stream.packed.documents["length"].tolist()
    whole = np.concatenate([np.arange(length) for length in lengths])
    assert (stream.positions(0, stream.num_tokens) == whole).all()
    start = lengths[0] + 2  # in the second document
    expected = np.concatenate((np.arange(lengths[1] - 2), np.arange(5)))
    assert (stream.positions(start, start + len(expected)) == expected).all()
    batch = stream.read_windows([0, 63], 21)
    assert batch.positions.shape == batch.tokens.shape and (batch.positions[0].numpy() == whole[:20]).all()


def test_every_epoch_reads_every_window_once_in_an_order_of_its_own(many):
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


def test_batches_that_are_passed_over(many):
    loader, resumed = make_loader(many), make_loader(many)
    loader.step, loader.passed_over = 2, 3
    with loader.batches(4) as batches:
        assert torch.equal(next(batches).tokens, make_loader(many).batch(5).tokens)
    state = loader.state_dict()
    resumed.load_state_dict(state)
    assert (resumed.step, resumed.passed_over) == (3, 3)
    del state["passed_over"]  # as before there was such a thing
    resumed.load_state_dict(state)
    assert (resumed.step, resumed.passed_over) == (3, 0)


def test_a_state_of_another_order_goes_on_and_says_so_once(many):
    loader, resumed = make_loader(many), make_loader(many)
    loader.step = 3
    state = loader.state_dict()
    assert resumed.load_state_dict(state) == ""
    del state["order"]  # as versions wrote it that kept a permutation in memory
    assert "drew the order of the data in another way" in resumed.load_state_dict(state)
    assert resumed.step == 3 and resumed.load_state_dict(resumed.state_dict()) == ""
    with pytest.raises(ValueError, match=r"of another run: order 'feistel 9' \(now 'feistel 1'\)"):
        resumed.load_state_dict(state | {"order": "feistel 9"})


def test_a_rank_reads_its_rows_only(many):
    stream, read = TokenStream(PackedTokens(many)), []
    whole = make_loader(many).batch(70)
    for rows in (range(2, 4), range(5, 6), range(0)):
        loader = Loader(stream, sequence_length=10, batch_size=6, seed=0, rows=rows)
        stream.read = lambda *span: (read.append(span), TokenStream.read(stream, *span))[1]
        batch = loader.batch(70)
        assert all(torch.equal(part, all_rows[rows.start : rows.stop]) for part, all_rows in zip(batch, whole))
        assert batch.tokens.shape == (len(rows), 10) and len(read) == len(rows)
        assert loader.state_dict() == make_loader(many).state_dict(), "of the global batch, in any layout"
        sizes = dict(sequence_length=10, batch_size=6, limit=2)
        expected = [batch[rows.start : rows.stop] for batch in evaluation_batches(stream, **sizes)]
        assert evaluation_batches(stream, **sizes, rows=rows) == expected
        read.clear()


def test_one_is_read_ahead_in_a_thread_that_ends():
    read, done = [], threading.Semaphore(0)

    def times_ten(key):
        assert threading.current_thread() is not threading.main_thread()
        read.append(key)
        done.release()
        return key * 10

    with read_ahead(times_ten, range(100)) as results:
        assert not read, "nothing before it is wanted"
        assert next(results) == 0
        assert done.acquire(timeout=10) and done.acquire(timeout=10), "the next is read while this one is used"
        assert next(results) == 10
    assert read in ([0, 1], [0, 1, 2]), "one ahead of what was taken, and no more after leaving"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]
    with read_ahead(times_ten, range(3)) as results:
        assert list(results) == [0, 10, 20]
    with read_ahead(times_ten, []) as results:
        assert list(results) == []


def test_an_error_of_the_thread_is_raised_where_its_batch_is_due(many):
    def broken(start, stop):
        if reads.count(None) == 12:
            raise OSError(5, "Input/output error")
        reads.append(None)
        return TokenStream.read(loader._stream, start, stop)

    loader, reads = make_loader(many), []
    loader._stream.read = broken
    with pytest.raises(OSError, match="Input/output error"), loader.batches(9) as batches:
        for taken, _ in enumerate(batches, 1):
            assert loader.step == taken <= 2, "12 rows are two batches"
    assert loader.step == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]


def test_other_data_is_noticed(many, tmp_path):
    """As many windows, but one document has other words."""
    half = make_loader(many).state_dict()
    text = tmp_path / "many" / "007"
    text.write_bytes(text.read_bytes().upper())
    pack(find_sources([tmp_path / "many"]), ByteTokenizer(), tmp_path / "other")
    loader = make_loader(tmp_path / "other")
    assert loader.num_windows == half["num_windows"]
    with pytest.raises(ValueError, match=r"of another run: data '\w+' \(now '\w+'\); use"):
        loader.load_state_dict(half)


def test_too_little_text(many, texts):
    with pytest.raises(ValueError, match=r"the text has .* tokens, but a sequence needs .* = 100001"):
        make_loader(many, sequence_length=100000)
    stream = TokenStream(PackedTokens(many))
    tokens = stream.num_tokens
    sizes = dict(sequence_length=tokens, batch_size=50)
    with pytest.raises(ValueError, match=f"the held-out text has {tokens} tokens, but a sequence needs "
                       rf"train.sequence_length \+ 1 = {tokens + 1}; give more text .* set train.eval_batches = 0"):
        evaluation_batches(stream, **sizes, limit=1)
    with pytest.raises(ValueError, match=r"the whole text has 9000, and .* train.sequence_length to at most 4499"):
        evaluation_batches(stream, **sizes, limit=1, fraction_of=9000)
    assert evaluation_batches(stream, **sizes, limit=0) == []


@pytest.mark.parametrize("total, tokens", [(30_000, 129), (1000, 129), (100, 29), (10**13, 4097), (258, 129)])
def test_the_fraction_that_is_asked_for_is_enough_and_little_more(total, tokens, tmp_path):
    fraction = enough_of(total, tokens)
    assert tokens <= int(total * float(f"{fraction:g}")) <= 1.1 * tokens + 1


def test_a_short_held_out_text_is_evaluated_in_windows_that_overlap(tmp_path):
    (tmp_path / "short.txt").write_text("0123456789" * 200)
    pack(find_sources([tmp_path / "short.txt"]), ByteTokenizer(), tmp_path / "out")
    _, held_out = split_documents(PackedTokens(tmp_path / "out"), 0.02)  # 40 of 2001 tokens
    sizes = dict(sequence_length=16, batch_size=4, limit=8)
    starts = evaluation_batches(held_out, **sizes)
    assert starts == [[0, 7, 15, 23]], "from the first token to the last"
    assert evaluation_batches(held_out, **sizes, rows=range(1, 3)) == [[7, 15]]
    batch = held_out.read_windows(starts[0], 17)
    assert batch.targets[-1, -1] == END and batch.tokens[1].tolist() == held_out.read(7, 23).tolist()
    with pytest.raises(ValueError, match=r"raise data.validation_fraction to at least 0\.0325, as the whole text has "):
        evaluation_batches(held_out, sequence_length=64, batch_size=4, limit=8, fraction_of=2001)


def test_a_short_text_gives_one_sequence_to_evaluate_on_where_there_are_two(tmp_path):
    (tmp_path / "short.txt").write_text("0123456789" * 200)
    pack(find_sources([tmp_path / "short.txt"]), ByteTokenizer(), tmp_path / "one")
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(50):
        (texts / f"{i}.txt").write_text(f"{i:39}")
    pack(find_sources([texts]), ByteTokenizer(), tmp_path / "some")
    for name, total in (("one", 2001), ("some", 2000)):
        packed = PackedTokens(tmp_path / name)
        whole = TokenStream(packed)
        for at_least, held_out in ((129, 129), (1000, 1000), (1001, None), (20, None)):
            splits = split_documents(packed, 0.02, at_least=at_least)
            if held_out is None:  # too long for the text, or less than there is anyway
                assert splits.held_out.fingerprint == split_documents(packed, 0.02).held_out.fingerprint
            else:
                assert [stream.num_tokens for stream in splits] == [total - held_out, held_out]
                assert (splits.held_out.read(0, held_out) == whole.read(total - held_out, total)).all()
        assert split_documents(packed, 0.0, at_least=129).held_out.num_documents == 0
    assert len(evaluation_batches(split_documents(packed, 0.02, at_least=129).held_out, sequence_length=128,
                                  batch_size=4, limit=8)) == 1


def test_evaluation_batches_are_whole_and_distinct(many):
    stream = TokenStream(PackedTokens(many))
    batches = evaluation_batches(stream, sequence_length=20, batch_size=4, limit=5)
    starts = [start for rows in batches for start in rows]
    assert len(batches) == 5 and len(set(starts)) == 20 and all(start % 21 == 0 for start in starts)
    assert stream.read_windows(batches[-1], 21).tokens.shape == (4, 20)


def test_vocabulary(many):
    packed = PackedTokens(many)
    packed.check_vocabulary(257)
    with pytest.raises(ValueError, match=r"holds the token 256, but the model's vocab_size is 256; .* at least 257"):
        packed.check_vocabulary(256)


def test_text_is_packed_on_first_use_and_again_when_it_changes(texts, tmp_path):
    first = packed_directory(str(texts), tokenizer="bytes", cache=tmp_path / "cache")
    stamp = (first / "index.json").stat().st_mtime_ns
    assert packed_directory(str(texts), tokenizer="bytes", cache=tmp_path / "cache") == first
    assert (first / "index.json").stat().st_mtime_ns == stamp
    (texts / "b.txt").write_bytes(b"changed")
    assert packed_directory(str(texts), tokenizer="bytes", cache=tmp_path / "cache") != first
    shutil.rmtree(texts)
    texts.mkdir()
    with pytest.raises(ValueError, match="holds no text"):
        packed_directory(str(texts), tokenizer="bytes", cache=tmp_path / "cache")


def test_stdlib_is_code_without_tests_or_packages():
    names = [s.name for s in find_sources(["stdlib"])]
    assert "argparse.py" in names and names == sorted(names)
    assert not [n for n in names if n.startswith(("site-packages/", "test/")) or "/tests/" in n]


def test_unigram_loss_of_a_known_text(tmp_path):
    (tmp_path / "t").write_bytes(b"aab")
    pack(find_sources([tmp_path / "t"]), ByteTokenizer(), tmp_path / "out")
    stream = TokenStream(PackedTokens(tmp_path / "out"))
    p = np.array([3, 3, 2, 2]) / (4 + 257)  # add-one counts of a, a, b and the end
    assert Splits(stream, stream).unigram_loss(257) == pytest.approx(-np.log(p).mean(), rel=1e-12)


def _prepare(rank, folder, tokenizer):
    from pathlib import Path

    import torch.distributed as dist

    from dualpipe.runtime.ranks.rank_sync import RankSync

    def work():
        assert rank == 0, "only one rank packs"
        return packed_directory(folder, tokenizer=tokenizer, cache=Path(folder).parent / "cache")

    return RankSync(dist.group.WORLD).first(work)


def test_one_rank_packs_and_its_failure_reaches_all(texts):
    paths = run_ranks(_prepare, 2, str(texts), "bytes")
    assert paths[0] == paths[1] and (paths[0] / "index.json").exists()
    errors = run_ranks(_prepare, 2, str(texts), "no/such.json", check=False)
    assert [type(e) for e in errors] == [ValueError, ValueError]
    assert all("cannot read the tokenizer no/such.json" in str(e) for e in errors)
