"""Read conversations from records in OpenAI's or ShareGPT's form.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

A record in either form may have its system prompt beside the messages, as a string under `system`: it becomes the first
message. Messages may have more keys, such as `tool_calls`, which the chat template receives; those that are null are
left out. Content may be a list of text parts. Tools and tool calls may be JSON texts. An assistant message with weight
0 does not count for the loss.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

MESSAGE_KEYS = ("messages", "conversations")  # keys of the messages; the first one with messages is read
TOOLS_KEY = "tools"
SYSTEM_KEY = "system"
ASSISTANT = "assistant"
SYSTEM = "system"
ROLES = (SYSTEM, "developer", "user", ASSISTANT, "tool", "function")  # roles of OpenAI's form
# Keys of a question and its answer in records that are no conversations.
QUESTION_KEYS = ("prompt", "instruction", "question")
ANSWER_KEYS = ("completion", "answer", "response", "output")
FORM = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT,
    "model": ASSISTANT, "system": SYSTEM, "tool": "tool", "observation": "tool",
}


def conversion_hint(keys: Collection[str]) -> str:
    """Return the remedy for records with a question and an answer instead of messages; "" for other keys.

    keys: those of a record.
    """
    question = next((key for key in QUESTION_KEYS if key in keys), None)
    answer = next((key for key in ANSWER_KEYS if key in keys), None)
    if question is None or answer is None:
        return ""
    return f"convert the records to {FORM}, with {question!r} as the user's content and {answer!r} as the assistant's"


class Conversation(NamedTuple):
    """A conversation in OpenAI's form.

    messages: each has a role and any keys that the template reads.
    tools: schemas of functions. None: the template gets no tools.
    uncounted: indices of the assistant messages that do not count for the loss.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    uncounted: frozenset[int] = frozenset()

    def content(self) -> bytes:
        """Return the conversation as canonical bytes to hash: equal conversations give equal bytes."""
        values = {"messages": self.messages, "tools": self.tools, "uncounted": sorted(self.uncounted)}
        return json.dumps(values, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")


def read_conversation(record: Mapping[str, Any], key: str, *, fills_nulls: bool = False) -> Conversation | None:
    """Return the conversation of a record, or None if it has no messages.

    Args:
        record: an object with the messages under `key`, and optional tools and system prompt.
        key: key of the messages.
        fills_nulls: the record is from a format that gives all objects in a column the same keys, and null to those
            that an object lacks: drop such keys from tool calls and tools. Otherwise, a null there is a value.

    Raises:
        ValueError: a message has neither form, or there are two system prompts. Names the message, counted from 1.
    """
    values = record.get(key)
    if values is None:
        return None
    if not isinstance(values, list):
        raise ValueError(f"its {key!r} is not a list of messages but of type {type(values).__name__}; convert the "
                         f"records to {FORM}")
    messages = []
    uncounted = set()
    for index, value in enumerate(values):
        try:
            message = _read_message(value)
            if fills_nulls:
                message = {name: _drop_nulls(part) for name, part in message.items()}
            if not _pop_weight(message):
                uncounted.add(index)
        except ValueError as error:
            raise ValueError(f"message {index + 1} of its {key!r} {error}") from error
        messages.append(message)
    if not messages:
        return None
    system = _read_system(record, messages[0])
    if system is not None:
        messages.insert(0, system)
        uncounted = {index + 1 for index in uncounted}
    tools = record.get(TOOLS_KEY) or None
    if fills_nulls:
        tools = _drop_nulls(tools)
    try:
        tools = _read_objects(tools) if tools is not None else None
    except ValueError as error:
        raise ValueError(f"its {TOOLS_KEY!r} {error}") from error
    return Conversation(messages, tools, frozenset(uncounted))


def _read_system(record: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the message of the system prompt beside the messages of a record, or None if there is nothing to add.

    first: the first of the messages.
    """
    text = record.get(SYSTEM_KEY) or None
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"its {SYSTEM_KEY!r} is not a string but of type {type(text).__name__}")
    if first["role"] != SYSTEM:
        return {"role": SYSTEM, "content": text}
    if first.get("content") != text:
        raise ValueError(f"its {SYSTEM_KEY!r} differs from its first message, which is of the role {SYSTEM!r} too; "
                         "expected one system prompt: leave one of them out")
    return None


def _read_objects(value: Any) -> list[dict[str, Any]] | None:
    """Return a list of objects, each of which or all of which may be JSON text; None if it is empty.

    Some data sets have tools and tool calls as text, because their schemas differ. Raises ValueError with a text that
    continues the name of the list.
    """
    values = _parse_text(value)
    if not isinstance(values, list):
        raise ValueError(f"is not a list but of type {type(values).__name__}")
    objects = [_parse_text(item) for item in values]
    for item in objects:
        if not isinstance(item, dict):
            raise ValueError(f"has an item that is not an object but of type {type(item).__name__}")
    return objects or None


def _parse_text(value: Any) -> Any:
    """Return the value of a JSON text, or any other value as it is. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"is a string that is not JSON ({error})") from error


def _drop_nulls(value: Any) -> Any:
    """Return nested lists and objects without the keys of objects whose value is None."""
    if isinstance(value, Mapping):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read_message(value: Any) -> dict[str, Any]:
    """Return a message in OpenAI's form. Raises ValueError with a text that continues "message N"."""
    if not isinstance(value, Mapping):
        raise ValueError(f"is not an object but of type {type(value).__name__}")
    message = {key: part for key, part in value.items() if part is not None}  # Parquet fills absent keys with None
    if "role" not in message and "from" in message:
        return _from_sharegpt(message)
    role = message.get("role")
    if not isinstance(role, str):
        keys = ", ".join(map(repr, message)) or "no keys"
        raise ValueError(f"has no 'role' or 'from' that is a string, but {keys}; give OpenAI's or ShareGPT's form")
    if "content" in message:
        _check_content(message["content"])
    if "tool_calls" in message:
        try:
            message["tool_calls"] = _read_objects(message["tool_calls"]) or []
        except ValueError as error:
            raise ValueError(f"has 'tool_calls' that {error}") from error
    others = message.keys() - {"role", "content", "name", "weight"}
    if message.get("content") is None and not any(message[key] for key in others):
        raise ValueError(f"of the role {role!r} has no 'content'")
    return message


def _from_sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message from ShareGPT's form to OpenAI's."""
    sender = message["from"]
    text = message.get("value")
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        raise ValueError(f"is from {sender!r}; give one of {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(text, str):
        raise ValueError(f"from {sender!r} has no 'value' that is a string")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[sender], "content": text} | others


def _check_content(content: Any) -> None:
    """Raise ValueError unless a message's content is a string or a list of text parts."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError(f"has a 'content' that is neither a string nor a list, but of type {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind!r} in its 'content'; only text parts are supported")


def _pop_weight(message: dict[str, Any]) -> bool:
    """Remove the weight of a message and return it. Raises ValueError unless it is 0 or 1."""
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"has the weight {weight!r}; give 0 or 1")
    return bool(weight)
