"""Split text into training and validation text."""

import re

import numpy as np
import pytest

from dualpipe.train.config.schema import DataConfig
from dualpipe.train.data.pack import pack
from dualpipe.train.data.sequences import choose_evaluation_windows
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.splits import Splits, open_splits, split_documents
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ByteTokenizer

END = ByteTokenizer.end_of_document


def texts_of(stream):
    """Return the documents of a stream that ends with a whole document."""
    tokens = stream.read(0, stream.num_tokens)
    pieces = np.split(tokens, np.flatnonzero(tokens == END) + 1)
    assert not len(pieces.pop())
    return [bytes(piece[:-1].tolist()) for piece in pieces]


def test_split_is_by_document_and_stable(many):
    packed = PackedTokens(many)
    train, validation = split_documents(packed, 0.2)
    assert train.num_documents + validation.num_documents == 200
    assert 20 <= validation.num_documents <= 60
    documents = [texts_of(s) for s in (train, validation)]
    assert [len(d) for d in documents] == [train.num_documents, validation.num_documents]
    assert sorted(documents[0] + documents[1]) == sorted(texts_of(TokenStream(packed)))
    assert [s.num_tokens for s in split_documents(packed, 0.2)] == [train.num_tokens, validation.num_tokens]


def test_copies_of_a_document_are_on_one_side(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_bytes(b"copy %d" % (i % 20))
    pack(find_sources([tmp_path]), ByteTokenizer(), tmp_path / "out")
    for stream in split_documents(PackedTokens(tmp_path / "out"), 0.5):
        texts = texts_of(stream)
        assert texts and all(texts.count(t) == 2 for t in texts)


def test_fraction_0_and_impossible_splits(many, texts, tmp_path):
    train, validation = split_documents(PackedTokens(many), 0.0)
    assert (train.num_documents, validation.num_documents) == (200, 0)
    pack(find_sources([texts / "b.txt"]), ByteTokenizer(), tmp_path / "one")
    with pytest.raises(ValueError, match=r"validation_fraction = 0\.1 reserves none of the 4 tokens"):
        split_documents(PackedTokens(tmp_path / "one"), 0.1)
    splits = open_splits(many, tmp_path / "one", 0.5)
    assert (splits.train.num_documents, splits.validation.num_tokens) == (200, 4)


def check_last_tokens(packed, fraction):
    """Check that the last tokens are the validation text, every time; return the number of documents per side."""
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
    repeated, other = split_documents(packed, fraction), split_documents(packed, fraction / 2)
    assert repeated.train.fingerprint == splits.train.fingerprint != other.train.fingerprint != whole.fingerprint
    return [stream.num_documents for stream in splits]


def test_validation_text_of_a_single_file_is_its_last_tokens(tmp_path):
    """For both sides that the hash of its content may select."""
    sides = set()
    for i in range(40):
        (tmp_path / "input.txt").write_text(f"{i:999}")
        pack(find_sources([tmp_path / "input.txt"]), ByteTokenizer(), tmp_path / "out", overwrite=True)
        packed = PackedTokens(tmp_path / "out")
        sides.add(bool(packed.documents["hash"][0] < 2**62))
        assert check_last_tokens(packed, 0.25) == [1, 1]
        if len(sides) == 2:
            break
    assert len(sides) == 2
    splits = open_splits(tmp_path / "out", None, DataConfig().validation_fraction)
    assert [stream.num_tokens for stream in splits] == [980, 20]


@pytest.mark.parametrize("hashed", [0, 2**64 - 1])
def test_validation_text_is_the_last_tokens_if_the_hash_selects_none_or_all(tmp_path, hashed):
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


def test_fingerprints_of_whole_documents_equal_those_in_checkpoints(many):
    assert split_documents(PackedTokens(many), 0.2).train.fingerprint == "c771769c856f97cd"


def test_a_short_text_gives_one_sequence_for_validation_if_it_has_two(tmp_path):
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
        for at_least, validation in ((129, 129), (1000, 1000), (20, None)):
            splits = split_documents(packed, 0.02, at_least=at_least)
            if validation is None:  # less than there is anyway
                assert splits.validation.fingerprint == split_documents(packed, 0.02).validation.fingerprint
            else:
                assert [stream.num_tokens for stream in splits] == [total - validation, validation]
                assert (splits.validation.read(0, validation) == whole.read(total - validation, total)).all()
        assert split_documents(packed, 0.0, at_least=129).validation.num_documents == 0
        assert split_documents(packed, 0.9, at_least=900).train.num_tokens == 900, "training has one sequence too"
    assert len(choose_evaluation_windows(split_documents(packed, 0.02, at_least=129).validation, sequence_length=128,
                                  batch_size=4, limit=8)) == 1


@pytest.mark.parametrize("size", [3, 5, 12, 34, 50, 65, 66])
@pytest.mark.parametrize("fraction", [0.0005, 0.05, 0.6])
def test_each_remedy_for_a_text_that_is_too_short_works(tmp_path, size, fraction):
    (tmp_path / "short.txt").write_text("x" * (size - 1))
    pack(find_sources([tmp_path / "short.txt"]), ByteTokenizer(), tmp_path / "out")
    packed = PackedTokens(tmp_path / "out")

    def tokens(fraction, length):
        return [stream.num_tokens for stream in split_documents(packed, fraction, at_least=length + 1)]

    if size >= 66:
        assert min(tokens(fraction, 32)) >= 33
        return
    with pytest.raises(ValueError, match=f"has {size} tokens, but training and validation need .* = 33; give") as error:
        tokens(fraction, 32)
    length = re.search(r"lower train.sequence_length to at most (\d+)", str(error.value))
    if length:
        assert min(tokens(fraction, int(length[1]))) > int(length[1])
    assert bool(length) == (size >= 4)
    assert ("set data.validation_fraction = 0" in str(error.value)) == (size >= 33), "all of it is then for training"


def test_unigram_loss_of_a_known_text(tmp_path):
    (tmp_path / "t").write_bytes(b"aab")
    pack(find_sources([tmp_path / "t"]), ByteTokenizer(), tmp_path / "out")
    stream = TokenStream(PackedTokens(tmp_path / "out"))
    p = np.array([3, 3, 2, 2]) / (4 + 257)  # add-one counts of a, a, b and the end
    assert Splits(stream, stream).unigram_loss(257) == pytest.approx(-np.log(p).mean(), rel=1e-12)
