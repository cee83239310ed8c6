"""Conversations in records, chat templates, and the assistant's text in a rendered conversation."""

import json
import warnings

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chats import CHATML, FORGETFUL, MARKED, SPECIAL, save_chat_tokenizer, turns
from dualpipe.train.data.chat import ChatTemplate, Conversation, UnreadKeys, find_spans, read_conversation

ROUND = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_both_forms_are_the_same_conversation():
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    one, other = read_conversation({"messages": ROUND}, "messages"), read_conversation(sharegpt, "conversations")
    assert one == other and one.messages == ROUND and one.tools is None
    assert one.content() == other.content() != read_conversation({"messages": ROUND[:1]}, "messages").content()


@pytest.mark.parametrize("record", [{"messages": []}, {"messages": None}])
def test_an_empty_conversation_is_none(record):
    assert read_conversation(record, "messages") is None


def test_content_in_parts_nulls_and_tools():
    """Nulls go, as in transformers, and parts stay, for the template."""
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    tool = {"role": "tool", "content": "3", "tool_calls": None}
    found = read_conversation({"messages": [parts, call, tool], "tools": '[{"type": "function"}]'}, "messages")
    call = {"role": "assistant", "tool_calls": [{"id": 1}]}
    assert found.messages == [parts, call, {"role": "tool", "content": "3"}]
    assert found.tools == [{"type": "function"}]


def test_tools_and_tool_calls_as_json_texts_are_objects():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for tools, calls in ((['{"name": "f"}'], [json.dumps(call)]), ('[{"name": "f"}]', json.dumps([call])),
                         ([{"name": "f"}], [call])):
        messages = [ROUND[0], {"role": "assistant", "tool_calls": calls}]
        found = read_conversation({"messages": messages, "tools": tools}, "messages")
        assert found.tools == [{"name": "f"}] and found.messages[1]["tool_calls"] == [call]
    for tools in ([], "[]", None):
        assert read_conversation({"messages": ROUND, "tools": tools}, "messages").tools is None


def test_other_keys_of_a_message_stay():
    message = {"from": "gpt", "value": "b", "reasoning": "c", "weight": 1}
    found = read_conversation({"conversations": [message]}, "conversations")
    assert found.messages == [{"role": "assistant", "content": "b", "reasoning": "c"}]


def test_a_system_prompt_beside_the_messages_is_the_first_message():
    system = {"role": "system", "content": "Be brief."}
    beside = {"system": "Be brief.", "messages": [ROUND[0], ROUND[1] | {"weight": 0}]}
    found = read_conversation(beside, "messages")
    assert found.messages == [system, *ROUND] and found.uncounted == {2}
    sharegpt = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}]}
    assert read_conversation(sharegpt, "conversations").messages == [system, ROUND[0]]
    for empty in (None, ""):
        assert read_conversation({"system": empty, "messages": ROUND}, "messages").messages == ROUND
    twice = {"system": "Be brief.", "messages": [system, *ROUND]}
    assert read_conversation(twice, "messages").messages == [system, *ROUND]
    for other, text in (("Be long.", "its 'system' differs from its first message"), (3, "its 'system' is not a str")):
        with pytest.raises(ValueError, match=text):
            read_conversation(twice | {"system": other}, "messages")


def test_messages_with_the_weight_0():
    messages = [ROUND[0], ROUND[1] | {"weight": 0}, ROUND[0], ROUND[1] | {"weight": 1}]
    found = read_conversation({"messages": messages}, "messages")
    assert found.messages == ROUND * 2 and found.uncounted == {1}


@pytest.mark.parametrize(("messages", "text"), [
    ("Hi", "its 'messages' is not a list of messages but of type str"),
    (["Hi"], "message 1 of its 'messages' is not an object but of type str"),
    ([ROUND[0], {"content": "Hi"}], "message 2 of its 'messages' has no 'role' or 'from' that is a string, but 'con"),
    ([{"role": "user"}], "message 1 of its 'messages' of the role 'user' has no 'content'"),
    ([{"role": "user", "content": None}], "of the role 'user' has no 'content'"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "of the role 'assistant' has no 'content'"),
    ([{"role": "user", "content": 3}], "neither a string nor a list, but of type int"),
    ([{"role": "user", "content": [{"type": "image"}]}], "has a part of type 'image' in its 'content'; only text"),
    ([{"from": "alien", "value": "Hi"}], "is from 'alien'; give one of human, user, gpt"),
    ([{"from": ["gpt"], "value": "Hi"}], "is from ['gpt']; give one of human, user, gpt"),
    ([{"from": "gpt"}], "from 'gpt' has no 'value' that is a string"),
    ([ROUND[1] | {"weight": 0.5}], "has the weight 0.5; give 0 or 1"),
    ([ROUND[1] | {"tool_calls": "f()"}], "has 'tool_calls' that is a string that is not JSON"),
    ([ROUND[1] | {"tool_calls": ["1"]}], "has 'tool_calls' that has an item that is not an object but of type int"),
])
def test_what_is_no_conversation_is_refused(messages, text):
    with pytest.raises(ValueError) as raised:
        read_conversation({"messages": messages}, "messages")
    assert text in str(raised.value)


def test_tools_that_are_no_list_are_refused():
    with pytest.raises(ValueError, match="its 'tools' is not a list but of type dict"):
        read_conversation({"messages": ROUND, "tools": {"a": 1}}, "messages")
    with pytest.raises(ValueError, match="its 'tools' is a string that is not JSON"):
        read_conversation({"messages": ROUND, "tools": "search"}, "messages")


TOOLS = [{"type": "function", "function": {"name": "f", "description": "<&>\u00e9"}}]
MANY_FEATURES = """
{%- if messages[0].role == 'system' %}
    {{- bos_token ~ messages[0].content }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {{ message | tojson }}{{ eos_token }}
{% endfor %}
{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}{% endfor %}
{% set state = namespace(count=0) %}{% for message in messages %}{% set state.count = state.count + 1 %}{% endfor %}
{{ state.count }} {{ documents is none }}
"""
WHITE_SPACE = """   {% for m in messages %}
    {%- if m.role == 'assistant' -%}
      {%- generation -%}
        {{ m.content }}
      {%- endgeneration -%}
    {%- else %}
    {% generation %}
    {{ m.role }}
    {% endgeneration %}
    {% endif %}
{% endfor %}"""
IN_A_MACRO = (
    "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
)


def template_of(folder, source, **settings):
    save_chat_tokenizer(folder, source)
    if settings:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return ChatTemplate(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("template", [CHATML, MARKED, MANY_FEATURES, WHITE_SPACE, IN_A_MACRO])
@pytest.mark.parametrize("prompts", [False, True])
def test_renders_as_transformers(tmp_path, template, prompts):
    found = template_of(tmp_path, template)
    hub = AutoTokenizer.from_pretrained(tmp_path)
    messages = turns("Hi <b>", "Hello\n 'you' \u00e9", system="Be brief.")
    expected = hub.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompts)
    assert found.render(messages, TOOLS, prompts=prompts).text == expected


def test_generation_blocks_give_their_bounds(tmp_path):
    for name, template, expected in (
        ("marked", MARKED, ["bc<|im_end|>", "e<|im_end|>"]), ("plain", CHATML, None),
        ("space", WHITE_SPACE, ["    user\n", "bc", "    user\n", "e"]),
        ("macro", IN_A_MACRO, ["a<|im_end|>", "bc<|im_end|>", "d<|im_end|>", "e<|im_end|>"]),
    ):
        text, generated = template_of(tmp_path / name, template).render(turns("a", "bc", "d", "e"))
        assert (generated and [text[begin:end] for begin, end in generated]) == expected
    assert template_of(tmp_path / "marked", MARKED).render(turns("a")).generated == []


def test_where_a_template_is_found(tmp_path):
    chat = turns("a")
    assert template_of(tmp_path, "in the configuration").render(chat).text == "in the configuration"
    (tmp_path / "chat_template.jinja").write_text("in a file, {{ bos_token }}")
    hub = AutoTokenizer.from_pretrained(tmp_path)
    assert ChatTemplate(hub).render(chat).text == "in a file, <|endoftext|>"
    (tmp_path / "other").write_text("another")
    assert ChatTemplate(hub, str(tmp_path / "other")).render(chat).text == "another"
    assert len({ChatTemplate(hub).content, ChatTemplate(hub, str(tmp_path / "other")).content}) == 2


@pytest.mark.parametrize("has_files", [False, True])
def test_the_template_for_tools_renders_conversations_with_tools(tmp_path, has_files):
    if has_files:
        save_chat_tokenizer(tmp_path, None)
        (tmp_path / "chat_template.jinja").write_text("no tools")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools | length }} tools")
        found = ChatTemplate(AutoTokenizer.from_pretrained(tmp_path))
    else:
        named = [{"name": "tool_use", "template": "{{ tools | length }} tools"},
                 {"name": "default", "template": "no tools"}]
        found = template_of(tmp_path, None, chat_template=named)
    assert found.render(turns("a"), TOOLS).text == "1 tools" and found.render(turns("a")).text == "no tools"


def test_what_is_refused(tmp_path):
    def refusal(source, messages, **settings):
        with pytest.raises(ValueError) as raised:
            template_of(tmp_path, source, **settings).render(messages)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "has no chat template; use the tokenizer of a model that was trained to chat" in refusal(None, turns("a"))
    with pytest.raises(ValueError, match="cannot read the chat template none: "):
        ChatTemplate(AutoTokenizer.from_pretrained(tmp_path), "none")
    chat = turns("a", "b\ufdd0")
    assert "refuses the conversation: Expected an expression, got" in refusal("{% for %}", chat)
    assert "refuses the conversation: roles must al" in refusal("{{ raise_exception('roles must al') }}", chat)
    assert "refuses the conversation: access to attribute '__class__'" in refusal("{{ messages.__class__.x }}", chat)
    assert "contains U+FDD0" in refusal(MARKED, chat)
    assert "changes the text of its generation blocks" in refusal(
        "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}", turns("a"))
    assert "cannot be chosen: This model has multiple chat templates" in refusal(
        None, chat, chat_template=[{"name": "x", "template": "a"}])


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
