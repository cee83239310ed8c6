"""Tokens and loss masks of conversations, against transformers' own."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer

from chats import CHATML, MARKED, random_chats, save_chat_tokenizer, turns
from dualpipe.train.chat.messages import Conversation
from dualpipe.train.tokenization.chat_tokenizer import ChatTokenizer


def test_tokens_and_masks_are_those_of_transformers(tmp_path):
    hub = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "marked", MARKED))
    marked = ChatTokenizer(str(tmp_path / "marked"))
    plain = ChatTokenizer(str(save_chat_tokenizer(tmp_path / "plain", CHATML) / "tokenizer.json"))
    for chat in [*random_chats(30), turns("a", "b", system="c")]:
        expected = hub.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        for tokenizer in (marked, plain):
            tokens, counts = tokenizer.encode(Conversation(chat))
            assert tokens.tolist() == expected["input_ids"]
            assert counts.tolist() == list(map(bool, expected["assistant_masks"])) and counts.any()
    assert marked.identity != plain.identity and marked.vocab_size == plain.vocab_size == 266


def test_a_character_of_several_tokens_and_an_answer_of_one(tmp_path):
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path)))
    tokens, counts = tokenizer.encode(Conversation(turns("a", "\U0001f600")))
    assert counts.sum() == 5, "four bytes and the end of the turn"
    assert np.flatnonzero(counts).tolist() == list(range(len(tokens) - 6, len(tokens) - 1))
    assert tokenizer.encode(Conversation(turns("a", ""))).loss_mask.sum() == 1


def test_the_first_token_never_counts(tmp_path):
    """Nothing predicts it."""
    bare = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path, bare)))
    assert tokenizer.encode(Conversation(turns("xyz", role="assistant"))).loss_mask.tolist() == [False, True, True]
    assert tokenizer.encode(Conversation(turns("x", role="assistant"))).loss_mask.tolist() == [False]
    assert len(tokenizer.encode(Conversation(turns("", role="assistant"))).tokens) == 0


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'bytes' has no chat template; give the directory of a model's tokenizer"):
        ChatTokenizer("bytes")
    with pytest.raises(ValueError, match=r"cannot read the tokenizer .*tokenizer.json: No such file"):
        ChatTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"has no chat template: no chat_template.jinja"):
        ChatTokenizer(str(save_chat_tokenizer(tmp_path, None)))


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=r"it has '\\ud83d', one half of a character that JSON writes as a pair"):
        tokenizer.encode(Conversation(turns("a \ud83d", "b")))


def test_white_space_counts_with_a_tokenizer_that_trims_offsets(tmp_path):
    """A byte-level post-processor gives a token of white space an empty span, unless it keeps all characters."""
    unmarked_end = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}" \
                   "{% if add_generation_prompt %}assistant:{% endif %}"
    path = save_chat_tokenizer(tmp_path, unmarked_end) / "tokenizer.json"
    plain = ChatTokenizer(str(path))
    saved = Tokenizer.from_file(str(path))
    saved.post_processor = ByteLevel(trim_offsets=True)
    saved.save(str(path))
    trimming = ChatTokenizer(str(path))
    for answer in (" ", "\n\n", "hello \n the", " hello "):
        tokens, loss_mask = trimming.encode(Conversation(turns("a", answer)))
        expected_tokens, expected_mask = plain.encode(Conversation(turns("a", answer)))
        assert tokens.tolist() == expected_tokens.tolist()
        assert loss_mask.tolist() == expected_mask.tolist() and loss_mask.any()
