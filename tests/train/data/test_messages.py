"""Conversations of records in the forms of OpenAI and ShareGPT, and records that are neither."""

import json

import pytest

from dualpipe.train.data.chat import read_conversation

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
