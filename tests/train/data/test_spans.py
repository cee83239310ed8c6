"""The assistant's text in a rendered conversation."""

import warnings

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from chats import CHATML, FORGETFUL, MARKED, SPECIAL, turns
from dualpipe.train.data.chat import ChatTemplate, Conversation, UnreadKeys, find_spans

FIRST_ROLE = "{{ messages[0].role }}" + CHATML


def chat_template(source):
    return ChatTemplate(PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=source, name_or_path="it"))


def says(template, conversation):
    text, spans = find_spans(chat_template(template), conversation, SPECIAL)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_several_turns_up_to_the_token_that_ends_them(template):
    """Not the line end behind it, which the template adds."""
    messages = turns("hi", "hello", "and?", " spaces \n", system="be brief")
    assert says(template, Conversation(messages)) == ["hello<|im_end|>", " spaces \n<|im_end|>"]
    assert says(template, Conversation(turns("a", ""))) == ["<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_edges(template):
    assert says(template, Conversation(turns("hi"))) == []
    assert says(template, Conversation(turns(system="be brief"))) == []
    assert says(template, Conversation(turns("hello", "hi", role="assistant"))) == ["hello<|im_end|>"]
    assert says(template, Conversation(turns("a", "b", "c", "d"), uncounted=frozenset({1}))) == ["d<|im_end|>"]


def test_white_space_counts_where_no_special_token_ends_a_turn():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}" \
            "{% if add_generation_prompt %}assistant: {% endif %}"
    assert says(plain, Conversation(turns("a", "b"))) == ["b\n\n"]


def test_templates_whose_prefixes_do_not_agree_are_refused():
    with pytest.raises(ValueError) as raised:
        says(FORGETFUL, Conversation(turns("a", "b", "c", "d")))
    assert str(raised.value) == (
        "the chat template in it does not show which text is the assistant's: message 2 is rendered differently once "
        "other messages "
        "follow ('<think></think>b<|im_end|>\\n' against 'b<|im_end|>\\n<|im_start|>user\\nc<|im_end|>'); give a "
        "template with {% generation %} blocks around the assistant's text, with --chat-template or data.chat_template")
    assert says(FORGETFUL, Conversation(turns("a", "b"))) == ["<think></think>b<|im_end|>"]
    prompted = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
    with pytest.raises(ValueError, match="message 2 does not start with the generation prompt"):
        says(prompted, Conversation(turns("a", "b")))
    with pytest.raises(ValueError, match=r"\(the first 0 of 1 messages alone, rendered to find the assistant\'s turn"):
        says(FIRST_ROLE, Conversation(turns("a", role="assistant")))


@pytest.mark.parametrize(("role", "hint"), [
    ("asistant", "; give 'assistant'"), ("model", "; give 'assistant'"), ("human", "; give 'user'"), ("bot", "")])
def test_an_unknown_role_is_refused(role, hint):
    """The turns of a misspelled assistant would not count, and nothing would say so."""
    template = CHATML + "{# model #}{{ 'model' if false }}"
    with pytest.raises(ValueError) as raised:
        says(template, Conversation([*turns("a", "b", "c"), {"role": role, "content": "d"}]))
    assert str(raised.value) == (
        f"message 4 has the role {role!r}; expected one of system, developer, user, assistant, tool, function, or "
        f"another that the chat template in it names{hint}")


def test_a_role_that_the_template_names_is_accepted():
    template = "{% if messages[0].role == 'ipython' %}{% endif %}" + CHATML
    assert says(template, Conversation([{"role": "ipython", "content": "3"}, *turns("a", "b")])) == ["b<|im_end|>"]
    with pytest.raises(ValueError, match="has the role 'ipython'; expected one of"):
        says(CHATML, Conversation([{"role": "ipython", "content": "3"}]))


def test_weights_need_a_block_for_each_turn():
    twice = MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}{% generation %}")
    with pytest.raises(ValueError, match="has 4 generation blocks for 2 assistant turns, so the block of"):
        says(twice, Conversation(turns("a", "b", "c", "d"), uncounted=frozenset({1})))
    assert says(twice, Conversation(turns("a", "b"))) == ["", "b<|im_end|>"]


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}" \
        "{% endfor %}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


def test_what_would_be_printed_as_python_or_twice_as_json_is_refused():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert find_spans(chat_template(PARTS), Conversation(parts))[0] == "ab"
    with pytest.raises(ValueError, match=r"prints the content of message 1, a list of parts, as Python \(\[\{'type'"):
        find_spans(chat_template(CALLS), Conversation(parts))
    calls = [[{"function": {"name": "f", "arguments": arguments}}] for arguments in ({"a": "x"}, '{"a": "x"}')]
    right, twice = ([{"role": "assistant", "content": "", "tool_calls": call}] for call in calls)
    assert find_spans(chat_template(CALLS), Conversation(right))[0] == '{"a": "x"}'
    with pytest.raises(ValueError, match="the arguments of a tool call in message 1, which are JSON text, as"):
        find_spans(chat_template(CALLS), Conversation(twice))


def warned(template, *conversations):
    unread = UnreadKeys(chat_template(template))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for conversation in conversations:
            unread.check(conversation)
    return [str(warning.message).split("does not read ")[1].split(":")[0] for warning in said]


def test_keys_that_a_template_does_not_read_are_named_once():
    chat = turns("a", "b", "c", "d")
    chat[1] |= {"reasoning": "e", "id": 1, "name": ""}
    chat[3] |= {"id": 2, "train": False, "tool_calls": []}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert sorted(warned(CHATML, *[Conversation(chat, tools)] * 2)) == ["'id'", "'reasoning'", "'tools'", "'train'"]
    whole = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"
    assert warned(whole, Conversation(chat, tools)) == []


def test_reasoning_that_is_dropped_in_earlier_turns_is_read():
    """Under any of the names that transformers knows."""
    last = "{% for m in messages %}{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endfor %}"
    chat = turns("a", "b", "c", "d")
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert warned(last, Conversation([chat[0], chat[1] | {key: "e"}, *chat[2:]])) == []
