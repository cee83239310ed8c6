"""Tokens and loss masks of conversations, against transformers' own."""

import json

import numpy as np
import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer

from chats import CHATML, MARKED, SPECIAL, encode, random_chats, save_chat_tokenizer, turns
from dualpipe.train.data.chat import Conversation, read_conversation
from dualpipe.train.data.tokenizer import ChatTokenizer


def test_tokens_and_masks_are_those_of_transformers(tmp_path):
    hub = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "marked", MARKED))
    marked = ChatTokenizer(str(tmp_path / "marked"))
    plain = ChatTokenizer(str(save_chat_tokenizer(tmp_path / "plain", CHATML) / "tokenizer.json"))
    for chat in [*random_chats(30), turns("a", "b", system="c")]:
        expected = hub.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        for tokenizer in (marked, plain):
            *_, tokens, counts = encode(tokenizer, Conversation(chat))
            assert tokens.tolist() == expected["input_ids"]
            assert counts.tolist() == list(map(bool, expected["assistant_masks"])) and counts.any()
    assert marked.identity != plain.identity and marked.vocab_size == plain.vocab_size == 266


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome", "days": None}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "<d>", "parameters": {}}}
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = ("<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% endif %}")
SHAPES = {
    "printed": HEAD + "{{ m.content }}" + TAIL,
    "trimmed": HEAD + "{{ m.content | trim }}" + TAIL,
    "defined": HEAD + "{% if m.content is defined %}{{ m.content }}{% endif %}" + TAIL,
    "calls": HEAD + "{{ m['content'] }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}" + TAIL,
    "tools": "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}" + HEAD + "{{ m.content }}" + TAIL,
    "reasoning": HEAD + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
                 "{{ m.content }}" + TAIL,
    "thinking": HEAD + "{{ m.thinking }}{{ m.content }}" + TAIL,
    "names": "{{ bos_token }}" + HEAD + "{{ m.name }} {{ m.content }}" + TAIL,
    "parts": HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
             "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}" + TAIL,
    "marked": MARKED,
    "marked parts": HEAD + "{% generation %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
                    "{% endgeneration %}" + TAIL,
}
USER = {"role": "user", "content": " what is\nthe weather? "}
RECORDS = [
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "3"},
                  {"role": "assistant", "content": "warm"}], "tools": [TOOL]},
    {"messages": [USER, {"role": "assistant", "content": "warm", "reasoning_content": "a", "tool_calls": None}]},
    {"messages": [USER, {"role": "assistant", "content": "warm", "reasoning": "b"}, USER,
                  {"role": "assistant", "content": " cold ", "thinking": "c"}]},
    {"messages": [{"role": "developer", "content": "be brief", "name": "x"}, USER,
                  {"role": "assistant", "content": ""}]},
    {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [
        {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}, {"role": "assistant", "content": "d"}]},
]


@pytest.mark.filterwarnings("ignore:.* does not read ")
@pytest.mark.parametrize("shape", SHAPES)
def test_conversations_of_any_shape_have_the_tokens_of_transformers(tmp_path, shape):
    hub = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path, SHAPES[shape]))
    tokenizer = ChatTokenizer(str(tmp_path))
    num_equal = 0
    for record in RECORDS:
        conversation = read_conversation(record, "messages")
        try:
            expected = hub.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=True)
        except (TypeError, TemplateError):  # this template needs content, or a string
            with pytest.raises(ValueError, match="refuses the conversation"):
                encode(tokenizer, conversation)
            continue
        if "[{'type': 'text'" in hub.decode(expected["input_ids"]):
            with pytest.raises(ValueError, match="prints the content"):
                encode(tokenizer, conversation)
            continue
        num_equal += 1
        *_, tokens, loss_mask = encode(tokenizer, conversation)
        assert tokens.tolist() == expected["input_ids"] and loss_mask.any()
        if shape in ("printed", "parts") and not any("tool_calls" in m for m in conversation.messages):
            said = [m["content"] + "<|im_end|>" for m in conversation.messages if m["role"] == "assistant"]
            assert hub.decode(tokens[loss_mask].tolist()) == "".join(said)
    assert num_equal >= (3 if shape == "marked" else 5)


def test_tokens_that_are_only_in_the_settings(tmp_path):
    """As one id each, with the tokens of transformers, by the directory or by its tokenizer.json."""
    expected = encode(ChatTokenizer(str(save_chat_tokenizer(tmp_path / "all"))), Conversation(turns("a", "b"))).tokens
    folder = save_chat_tokenizer(tmp_path / "few")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    content["added_tokens"] = content["added_tokens"][:1]
    file.write_text(json.dumps(content))
    (folder / "added_tokens.json").write_text(json.dumps({name: ids[name] for name in SPECIAL[1:]}))
    for name in (folder, file):
        tokenizer = ChatTokenizer(str(name))
        assert encode(tokenizer, Conversation(turns("a", "b"))).tokens.tolist() == expected.tolist()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "added_tokens.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_special_tokens": ["<|im_start|>"]}))
    other = encode(ChatTokenizer(str(folder)), Conversation(turns("a", "b"))).tokens
    assert len(other) == len(expected)


def test_a_character_of_several_tokens_and_an_answer_of_one(tmp_path):
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path)))
    *_, tokens, counts = encode(tokenizer, Conversation(turns("a", "\U0001f600")))
    assert counts.sum() == 5, "four bytes and the end of the turn"
    assert np.flatnonzero(counts).tolist() == list(range(len(tokens) - 6, len(tokens) - 1))
    assert encode(tokenizer, Conversation(turns("a", ""))).loss_mask.sum() == 1


def test_the_first_token_never_counts(tmp_path):
    """Nothing predicts it."""
    bare = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path, bare)))
    assert encode(tokenizer, Conversation(turns("xyz", role="assistant"))).loss_mask.tolist() == [False, True, True]
    assert encode(tokenizer, Conversation(turns("x", role="assistant"))).loss_mask.tolist() == [False]
    assert len(encode(tokenizer, Conversation(turns("", role="assistant"))).tokens) == 0


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'bytes' has no chat template; give the directory of a model's tokenizer"):
        ChatTokenizer("bytes")
    with pytest.raises(ValueError, match=r"transformers cannot load the tokenizer in .*; give 'bytes', the directory"):
        ChatTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"has no chat template; use the tokenizer of"):
        ChatTokenizer(str(save_chat_tokenizer(tmp_path, None)))


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=r"it has '\\ud83d', one half of a character that JSON writes as a pair"):
        encode(tokenizer, Conversation(turns("a \ud83d", "b")))


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
        *_, tokens, loss_mask = encode(trimming, Conversation(turns("a", answer)))
        *_, expected_tokens, expected_mask = encode(plain, Conversation(turns("a", answer)))
        assert tokens.tolist() == expected_tokens.tolist()
        assert loss_mask.tolist() == expected_mask.tolist() and loss_mask.any()
