"""Conversations: read from records, rendered by a chat template, with the assistant's turns found in the text.

A record has OpenAI's or ShareGPT's form:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be brief."}

The system prompt beside the messages becomes the first message. Messages may have more keys, such as `tool_calls`,
which the chat template receives; those that are null are left out. Content may be a list of text parts. Tools and tool
calls may be JSON texts. An assistant message with weight 0 does not count for the loss.

transformers renders a conversation. Its `apply_chat_template` chooses one of several templates (`tool_use` for
conversations with tools), drops keys that are null, knows the names of reasoning, and runs the template in a sandbox.
Added here are the bounds of the assistant's turns, whose tokens alone count for the loss.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe.runtime.errors import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
_ALWAYS_READ = ("role", "content")  # keys of messages that are in every text
_EMPTY: tuple[Any, ...] = ("", [], {})  # values of keys that would change no text
_SHOWN = 40  # characters of texts that differ
_REMEDY = ("give a template with {% generation %} blocks around the assistant's text, with --chat-template or "
           "data.chat_template")
# Unicode noncharacters, which no text contains, mark generation blocks in a rendered text.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# The line end behind the macro is removed, as behind any block.
_MACRO = f"{{% macro mark_generation() %}}{_BEGIN}{{{{ caller() }}}}{_END}{{% endmacro %}}\n"


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


def conversion_hint(keys: Collection[str]) -> str:
    """Return the remedy for records with a question and an answer instead of messages; "" for other keys.

    keys: those of a record.
    """
    question = next((key for key in QUESTION_KEYS if key in keys), None)
    answer = next((key for key in ANSWER_KEYS if key in keys), None)
    if question is None or answer is None:
        return ""
    return f"convert the records to {FORM}, with {question!r} as the user's content and {answer!r} as the assistant's"


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


def find_spans(
    template: ChatTemplate, conversation: Conversation, ends: Collection[str] = ()
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation; return the text, and the bounds of the assistant turns in it that count for the loss.

    A template with generation blocks marks the turns. For any other template, each assistant turn is found by rendering
    the conversation up to the turn, with the generation prompt, and up to its end:

        messages before the turn, with the prompt    <user>Hi<end><assistant>
        messages with the turn                       <user>Hi<end><assistant>Hello<end>
        the turn                                                            Hello<end>

    Each text must be a prefix of the next one and of the whole conversation. A template that renders earlier turns
    differently once later ones follow (for example, one that drops their reasoning) is refused.

    Args:
        template: the chat template.
        conversation: has any number of assistant turns.
        ends: special tokens of the tokenizer. White space after one of them at the end of a turn is the template's and
            does not count: a model never has to generate it.

    Raises:
        ValueError: the template refuses the conversation, prints parts of it as Python or as JSON in JSON, or does not
            show which text is the assistant's; or a message has an unknown role.
    """
    for number, message in enumerate(conversation.messages, start=1):
        _check_role(template, conversation, message["role"], number)
    text, spans = template.render(conversation.messages, conversation.tools)
    _check_printed(template, conversation, text)
    turns = [index for index, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    if spans is None:
        spans = [_find_turn(template, conversation, turn, text) for turn in turns]
        spans = [(begin, _trim(text, begin, end, ends)) for begin, end in spans]
    if not conversation.uncounted:
        return text, spans
    if len(spans) != len(turns):
        raise ValueError(f"{template.name} has {len(spans)} generation blocks for {len(turns)} assistant turns, so the "
                         "block of the turn with weight 0 is unknown; leave out the weights")
    return text, [span for turn, span in zip(turns, spans) if turn not in conversation.uncounted]


def _check_role(template: ChatTemplate, conversation: Conversation, role: str, number: int) -> None:
    """Raise ValueError if neither OpenAI's form nor the template has the role of message `number`, counted from 1.

    Most templates render any role, so that the turns of a misspelled assistant would silently not count. Other names of
    the assistant, such as "model", are refused even if the template has them.
    """
    is_other_name = role != ASSISTANT and SHAREGPT_ROLES.get(role) == ASSISTANT
    if role in ROLES or (template.names_role(role, conversation.tools) and not is_other_name):
        return
    meant = SHAREGPT_ROLES.get(role) or next(iter(nearest(role, ROLES)), None)
    hint = f"; give {meant!r}" if meant else ""
    raise ValueError(f"message {number} has the role {role!r}; expected one of {', '.join(ROLES)}, or another that "
                     f"{template.name} names{hint}")


def _check_printed(template: ChatTemplate, conversation: Conversation, text: str) -> None:
    """Raise ValueError if a template has printed content in parts as Python, or arguments in JSON as JSON once more."""
    for number, message in enumerate(conversation.messages, start=1):
        content = message.get("content")
        if isinstance(content, list) and str(content) in text:
            raise ValueError(f"{template.name} prints the content of message {number}, a list of parts, as Python "
                             f"({str(content)[:_SHOWN]}...); give the content as a string")
        for call in message.get("tool_calls") or ():
            arguments = (call.get("function") or call).get("arguments")
            if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in text:
                raise ValueError(f"{template.name} encodes the arguments of a tool call in message {number}, which are "
                                 "JSON text, as JSON once more; give them as an object")


def _find_turn(template: ChatTemplate, conversation: Conversation, turn: int, whole: str) -> tuple[int, int]:
    """Return the bounds, in the rendered conversation `whole`, of the assistant's message with the index `turn`."""
    messages, tools, _ = conversation
    try:
        before = template.render(messages[:turn], tools, prompts=True).text
        after = template.render(messages[: turn + 1], tools).text
    except ValueError as error:
        raise ValueError(f"{error} (the first {turn} of {len(messages)} messages alone, rendered to find the "
                         f"assistant's turn after them); {_REMEDY}") from error
    for shorter, longer, problem in (
        (before, after, f"message {turn + 1} does not start with the generation prompt"),
        (after, whole, f"message {turn + 1} is rendered differently once other messages follow"),
    ):
        if not longer.startswith(shorter):
            place = _first_difference(shorter, longer)
            raise ValueError(
                f"{template.name} does not show which text is the assistant's: {problem} "
                f"({shorter[place : place + _SHOWN]!r} against {longer[place : place + _SHOWN]!r}); {_REMEDY}")
    return len(before), len(after)


def _first_difference(text: str, other: str) -> int:
    """Return the index of the first character in which two texts differ."""
    length = min(len(text), len(other))
    return next((index for index in range(length) if text[index] != other[index]), length)


def _trim(text: str, begin: int, end: int, ends: Collection[str]) -> int:
    """Return the end of a turn without white space after its last special token."""
    turn = text[begin:end].rstrip()
    return begin + len(turn) if turn.endswith(tuple(ends)) else end


class UnreadKeys:
    """Keys of conversations that the template does not read. Warns of each once.

    template: the chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._seen: set[str] = set(_ALWAYS_READ)

    def check(self, conversation: Conversation) -> None:
        """Render a conversation without each of its keys that is new, and warn of those that change nothing.

        A key of messages is left out of the last one that has it, and later messages are left out too, since templates
        drop the reasoning of earlier turns.
        """
        messages, tools, _ = conversation
        if tools and "tools" not in self._seen:
            self._seen.add("tools")
            if self._template.render(messages, tools).text == self._template.render(messages).text:
                self._warn("tools")
        for number, message in reversed(list(enumerate(messages))):
            for key in [key for key, value in message.items() if value not in _EMPTY and key not in self._seen]:
                self._seen.add(key)
                rest = {name: value for name, value in message.items() if name != key}
                try:
                    whole = self._template.render(messages[: number + 1], tools).text
                    is_read = self._template.render([*messages[:number], rest], tools).text != whole
                except ValueError:  # the template requires what is left out
                    is_read = True
                if not is_read:
                    self._warn(key)

    def _warn(self, key: str) -> None:
        warnings.warn(f"{self._template.name} does not read {key!r}: it is not in the packed conversations",
                      stacklevel=1)


class Rendered(NamedTuple):
    """A rendered conversation.

    text: the output of the template.
    generated: bounds, in characters, of the generation blocks. None: the template has none.
    """

    text: str
    generated: list[tuple[int, int]] | None


class ChatTemplate:
    """The chat template of a tokenizer, or the templates of which transformers chooses one for each conversation.

    Attributes:
        name: origin of the template, for messages.
        content: the templates and their variables as bytes, to hash.

    Args:
        tokenizer: has the templates and the variables.
        path: a file with a template to use instead. "": those of the tokenizer.

    Raises:
        ValueError: there is no template, or the file cannot be read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, path: str = "") -> None:
        self._tokenizer = tokenizer
        self._own: str | None = None
        self.name = f"the chat template in {tokenizer.name_or_path}"
        if path:
            self.name = f"the chat template {path}"
            try:
                self._own = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read {self.name}: {error}") from error
        elif not tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {tokenizer.name_or_path} has no chat template; use the tokenizer of a "
                             "model that was trained to chat, or give a template with --chat-template or "
                             "data.chat_template")
        variables = sorted(tokenizer.special_tokens_map.items())
        self.content = json.dumps([self._own or tokenizer.chat_template, variables], default=str).encode()

    def names_role(self, role: str, tools: list[Any] | None = None) -> bool:
        """Return True if the text of the template contains a role as a string."""
        source = self._source(tools)
        return f"'{role}'" in source or f'"{role}"' in source

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompts: bool = False
    ) -> Rendered:
        """Render messages.

        Args:
            messages: in OpenAI's form.
            tools: schemas of functions.
            prompts: end with the generation prompt, the start of an assistant turn (add_generation_prompt).

        Raises:
            ValueError: the template refuses the messages, or they contain a character that marks generation blocks.
        """
        source = self._source(tools)
        text = self._apply(source, messages, tools, prompts=prompts)
        marked_source = _GENERATION.sub(_call_mark, source)
        if marked_source == source:
            return Rendered(text, None)
        rendered = _remove_marks(self._apply(_MACRO + marked_source, messages, tools, prompts=prompts))
        if rendered.text != text:
            raise ValueError(f"{self.name} changes the text of its generation blocks after rendering them, so their "
                             "bounds are unknown; print the blocks as they are")
        return rendered

    def _source(self, tools: list[Any] | None) -> str:
        """Return the template for a conversation. Raises ValueError if there are several and none is the default."""
        try:
            return self._tokenizer.get_chat_template(self._own, tools)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot be chosen: {_one_line(error)}") from error

    def _apply(
        self, source: str, messages: list[dict[str, Any]], tools: list[Any] | None, *, prompts: bool
    ) -> str:
        """Return the output of a template. Raises ValueError if it fails."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            if not messages:  # before a first turn of the assistant; `apply_chat_template` requires a message
                variables: dict[str, Any] = self._tokenizer.special_tokens_map
                texts: Any = render_jinja_template(
                    [[]], tools, chat_template=source, add_generation_prompt=prompts, **variables)
                return texts[0][0]
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=source, add_generation_prompt=prompts, tokenize=False)
            assert isinstance(text, str), "one conversation, not tokenized"
            return text
        except Exception as error:  # of any expression in the template
            raise ValueError(f"{self.name} refuses the conversation: {_one_line(error)}") from error


def _call_mark(tag: re.Match[str]) -> str:
    """Return the tag that calls the macro around a generation block, or ends the call, with the same white space."""
    before, end, after = tag.groups()
    return f"{{%{before} {'endcall' if end else 'call mark_generation()'} {after}%}}"


def _remove_marks(marked: str) -> Rendered:
    """Remove the marks from a text, and return it with the bounds of the marked parts."""
    pieces = _MARKS.split(marked)
    marks = _MARKS.findall(marked)
    if marks != [_BEGIN, _END] * (len(marks) // 2):
        raise ValueError("the conversation contains U+FDD0 or U+FDD1, which are not characters, or a generation block "
                         "is inside another; remove them from the text, or the inner block from the template")
    bounds = list(accumulate(map(len, pieces[:-1])))
    return Rendered("".join(pieces), list(zip(bounds[::2], bounds[1::2])))


def _one_line(error: Exception) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
