"""Load tokenizers from files, and refuse files that are not tokenizers."""

import json

import pytest

from dualpipe.train.data.pack import pack
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.splits import check_tokenizer
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import FileTokenizer, load_tokenizer


def stream_of(path):
    stream = TokenStream(PackedTokens(path))
    return stream.read(0, stream.num_tokens).tolist()


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
    assert "was packed with another tokenizer, but the model starts from a checkpoint with its own" in check_tokenizer(
        PackedTokens(tmp_path / "out"), str(tmp_path / "checkpoint"))
    with pytest.raises(ValueError, match="--end-of-document 'x': the tokenizer 'bytes' has an end-of-document id"):
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
