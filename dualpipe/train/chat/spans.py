"""Find the assistant's turns in a rendered conversation: only their tokens count for the loss.

A template with generation blocks marks them. For any other template, each assistant turn is found by rendering the
conversation up to the turn, with the generation prompt, and up to its end:

    messages before the turn, with the prompt    <user>Hi<end><assistant>
    messages with the turn                       <user>Hi<end><assistant>Hello<end>
    the turn                                                            Hello<end>

Each text must be a prefix of the next one and of the whole conversation. A template that renders earlier turns
differently once later ones follow (for example, one that drops their reasoning) is refused.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from typing import Any

from dualpipe.runtime.errors import nearest
from dualpipe.train.chat.messages import ASSISTANT, ROLES, SHAREGPT_ROLES, Conversation
from dualpipe.train.chat.template import ChatTemplate

_ALWAYS_READ = ("role", "content")
_EMPTY: tuple[Any, ...] = ("", [], {})
_SHOWN = 40  # characters of texts that differ
_REMEDY = ("give a template with {% generation %} blocks around the assistant's text, with --chat-template or "
           "data.chat_template")


def find_spans(
    template: ChatTemplate, conversation: Conversation, ends: Collection[str] = ()
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation; return the text, and the bounds of the assistant turns in it that count for the loss.

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


def _check_role(template: ChatTemplate, conversation: Conversation, role: str, number: int) -> None:
    """Raise ValueError if neither OpenAI's form nor the template has the role of message `number`, counted from 1.

    Most templates render any role, so that the turns of a misspelled assistant would silently not count. Other names of
    the assistant, such as "model", are refused even if the template has them.
    """
    is_other_name = role != ASSISTANT and SHAREGPT_ROLES.get(role) == ASSISTANT
    if role in ROLES or (template.names(role, conversation.tools) and not is_other_name):
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
