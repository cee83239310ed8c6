"""Conversations in records, in the forms of OpenAI and of ShareGPT.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

A message of OpenAI's form may have other keys, such as `tool_calls`: the chat template gets them. Of content in parts,
the text is taken. An assistant's message with the weight 0 does not count for the loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

MESSAGE_KEYS = ("messages", "conversations")  # keys of a record's messages, the first that it has
TOOLS_KEY = "tools"
ASSISTANT = "assistant"
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT,
    "model": ASSISTANT, "system": "system", "tool": "tool", "observation": "tool",
}


class Conversation(NamedTuple):
    """A conversation in OpenAI's form.

    messages: each with a role and what the template takes.
    tools: schemas of functions. None: the template gets none.
    uncounted: numbers of the assistant's messages that do not count for the loss.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    uncounted: frozenset[int] = frozenset()

    def content(self) -> bytes:
        """Return the conversation as bytes that are equal for equal conversations, for a hash."""
        values = {"messages": self.messages, "tools": self.tools, "uncounted": sorted(self.uncounted)}
        return json.dumps(values, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")


def read_conversation(record: Mapping[str, Any], key: str) -> Conversation | None:
    """Return the conversation of a record, or None if it has no messages.

    Args:
        record: an object with the messages under `key`, and perhaps tools.
        key: key of the messages.

    Raises:
        ValueError: a message is of neither form. Names the message, counted from 1.
    """
    listed = record.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise ValueError(f"its {key!r} is not a list of messages but of type {type(listed).__name__}")
    messages = []
    uncounted = set()
    for number, value in enumerate(listed):
        try:
            message = _read_message(value)
            if not _takes_weight(message):
                uncounted.add(number)
        except ValueError as error:
            raise ValueError(f"message {number + 1} of its {key!r} {error}") from error
        messages.append(message)
    if not messages:
        return None
    tools = record.get(TOOLS_KEY) or None
    if isinstance(tools, str):  # as some Parquet files have them
        tools = json.loads(tools) or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"its {TOOLS_KEY!r} is not a list but of type {type(tools).__name__}")
    return Conversation(messages, tools, frozenset(uncounted))


def _read_message(value: Any) -> dict[str, Any]:
    """Return a message in OpenAI's form. Raises ValueError, to be read after "message N"."""
    if not isinstance(value, Mapping):
        raise ValueError(f"is not an object but of type {type(value).__name__}")
    message = {key: part for key, part in value.items() if part is not None}  # Parquet has all keys in all messages
    if "role" not in message and "from" in message:
        return _from_sharegpt(message)
    role = message.get("role")
    if not isinstance(role, str):
        keys = ", ".join(map(repr, message)) or "no keys"
        raise ValueError(f"has no 'role' or 'from' that is a string, but {keys}; give OpenAI's or ShareGPT's form")
    if "content" in message:
        message["content"] = _read_content(message["content"])
    elif "content" in value:
        message["content"] = None  # as OpenAI has it beside tool calls
    if message.get("content") is None and len(message.keys() - {"content", "name", "weight"}) == 1:
        raise ValueError(f"of the role {role!r} has no 'content'")
    return message


def _from_sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of ShareGPT's form in OpenAI's."""
    sender = message["from"]
    text = message.get("value")
    if sender not in SHAREGPT_ROLES:
        raise ValueError(f"is from {sender!r}; give one of {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(text, str):
        raise ValueError(f"from {sender!r} has no 'value' that is a string")
    rest = {key: part for key, part in message.items() if key == "weight"}
    return {"role": SHAREGPT_ROLES[sender], "content": text, **rest}


def _read_content(content: Any) -> str:
    """Return the text of a message's content, a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"has a 'content' that is neither a string nor a list, but of type {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind!r} in its 'content'; text alone can be trained on")
        texts.append(part["text"])
    return "".join(texts)


def _takes_weight(message: dict[str, Any]) -> bool:
    """Remove the weight of a message; return False if it is 0. Raises ValueError for any other than 0 and 1."""
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"has the weight {weight!r}; give 0 or 1")
    return bool(weight)
