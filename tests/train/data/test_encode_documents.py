"""Encoding in batches: order, the same tokens as one by one, and errors that name the document."""

import json
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from chats import random_chats, save_chat_tokenizer
from dualpipe.train.data import pack as module
from dualpipe.train.data.chat import Conversation
from dualpipe.train.data.pack import encode_documents
from dualpipe.train.data.tokenizer import ByteTokenizer, ChatTokenizer, FileTokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return FileTokenizer(save_chat_tokenizer(tmp_path) / "tokenizer.json")


def numbered(documents):
    return [(document, f"document {number}") for number, document in enumerate(documents)]


def one_by_one(tokenizer, document):
    return tokenizer.convert(*pair_of(tokenizer, document))


def pair_of(tokenizer, document):
    text = tokenizer.prepare(document)
    return text, tokenizer.encode_texts([text])[0]


@pytest.mark.parametrize("size", [1, 50, 1000, 1 << 20])
@pytest.mark.parametrize("is_chat", [False, True])
def test_documents_keep_their_order_and_have_the_tokens_of_each_alone(tokenizer, tmp_path, monkeypatch, size, is_chat):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", size)
    chats = random_chats(40)
    if is_chat:
        tokenizer = ChatTokenizer(str(tmp_path))
        documents = [Conversation(chat) for chat in chats]
    else:
        documents = [json.dumps(chat).encode() for chat in chats]
    encoded = list(encode_documents(numbered(documents), tokenizer))
    assert [(each.document, each.place) for each in encoded] == numbered(documents)
    for each in encoded:
        tokens, loss_mask = one_by_one(tokenizer, each.document)
        assert np.array_equal(each.tokens, tokens) and each.tokens.dtype == np.uint32
        assert (each.loss_mask is None) == (not is_chat)
        assert not is_chat or np.array_equal(each.loss_mask, loss_mask)


def test_bytes_are_their_own_tokens():
    (encoded,) = encode_documents(numbered([b"ab"]), ByteTokenizer())
    assert encoded.tokens.tolist() == [97, 98] and encoded.loss_mask is None


def test_batches_end_at_the_number_of_characters_or_documents(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 10)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 3)
    sizes = []
    encode_texts = tokenizer.encode_texts
    tokenizer.encode_texts = lambda texts: sizes.append(len(texts)) or encode_texts(texts)
    assert len(list(encode_documents(numbered([b"abcdef"] * 3 + [b"x"] * 4), tokenizer))) == 7
    assert sizes == [2, 3, 2]


def test_the_caller_reads_only_a_few_batches_ahead(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1)
    num_read = 0

    def read():
        nonlocal num_read
        for document in numbered([b"abc"] * 100):
            num_read += 1
            yield document

    for num_yielded, _ in enumerate(encode_documents(read(), tokenizer)):
        assert num_read <= num_yielded + 1 + module.BATCHES_AHEAD


def test_a_document_that_is_not_utf8_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"^cannot tokenize document 2: not UTF-8 \("):
        list(encode_documents(numbered([b"a", b"b", b"\xff"]), tokenizer))


class Panic(BaseException):
    """Stand-in for a panic in Rust, whose exception is no `Exception` either."""


@pytest.mark.parametrize("error", [Exception, Panic])
def test_a_document_that_the_tokenizers_package_refuses_is_named(tokenizer, error):
    encode_texts = tokenizer.encode_texts

    def refuse(texts):
        if any(text.text == "bad" for text in texts):
            raise error("it is bad")
        return encode_texts(texts)

    tokenizer.encode_texts = refuse
    with pytest.raises(ValueError, match=r"^cannot tokenize document 3: it is bad$"):
        list(encode_documents(numbered([b"a", b"b", b"c", b"bad", b"d"]), tokenizer))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode_documents")]


def test_an_error_of_the_package_itself(tmp_path):
    """A vocabulary without a token for unknown words."""
    hub = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="[UNK]"))
    hub.pre_tokenizer = pre_tokenizers.Whitespace()
    hub.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"^cannot tokenize document 1: .*WordLevel error: Missing \[UNK\]"):
        list(encode_documents(numbered([b"a", b"a b", b"a"]), FileTokenizer(tmp_path / "tokenizer.json")))


def test_an_error_of_a_whole_batch_names_its_range(tokenizer):
    encode_texts = tokenizer.encode_texts

    def refuse(texts):
        if len(texts) > 1:
            raise Exception("too many")
        return encode_texts(texts)

    tokenizer.encode_texts = refuse
    with pytest.raises(ValueError, match="cannot tokenize the documents from document 0 to document 1 at once: too"):
        list(encode_documents(numbered([b"a", b"b"]), tokenizer))
