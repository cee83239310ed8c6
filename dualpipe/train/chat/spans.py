"""The parts of a rendered conversation that the assistant says, which alone count for the loss.

A template with generation blocks says them itself. Of any other, each turn of the assistant is found by rendering the
conversation up to it, with the prompt for a turn, and up to its end:

    messages before the turn, with the prompt    <user>Hi<end><assistant>
    messages with the turn                       <user>Hi<end><assistant>Hello<end>
    the turn                                                            Hello<end>

Each must be a prefix of the next and of the whole conversation. A template that renders earlier turns in another way
once later ones follow (such as one that drops their reasoning) is refused.
"""

from __future__ import annotations

from collections.abc import Collection

from dualpipe.train.chat.messages import ASSISTANT, Conversation
from dualpipe.train.chat.template import ChatTemplate, Rendered

_SHOWN = 40  # characters of texts that differ
_REMEDY = ("give a template with {% generation %} around what the assistant says, by --chat-template or "
           "data.chat_template")


def find_spans(template: ChatTemplate, conversation: Conversation, ends: Collection[str] = ()) -> Rendered:
    """Render a conversation, and return the assistant's turns that count as its generated parts.

    Args:
        template: the chat template.
        conversation: with any number of turns of the assistant.
        ends: special tokens of the tokenizer. White space behind one of them at the end of a turn belongs to the
            template and does not count: no model is asked for it.

    Raises:
        ValueError: the template refuses the conversation, or does not say what the assistant's turns are.
    """
    whole = template.render(conversation.messages, conversation.tools)
    turns = [number for number, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    if not template.marks_generation:
        spans = [_span_of_turn(template, conversation, turn, whole.text) for turn in turns]
        spans = [(begin, _trim(whole.text, begin, end, ends)) for begin, end in spans]
    else:
        spans = whole.generated
        if conversation.uncounted and len(spans) != len(turns):
            raise ValueError(f"{template.name} has {len(spans)} generation blocks for {len(turns)} turns of the "
                             "assistant, so that it is not known which of them has the weight 0; leave out weights")
    counted = [span for turn, span in zip(turns, spans) if turn not in conversation.uncounted]
    return Rendered(whole.text, counted if len(spans) == len(turns) else spans)


def _span_of_turn(template: ChatTemplate, conversation: Conversation, turn: int, whole: str) -> tuple[int, int]:
    """Return the bounds of the assistant's message number `turn` in the rendered conversation."""
    messages, tools, _ = conversation
    try:
        before = template.render(messages[:turn], tools, prompts=True).text
        after = template.render(messages[: turn + 1], tools).text
    except ValueError as error:
        raise ValueError(f"{error}, of which only the first {turn} of {len(messages)} messages were rendered, to find "
                         f"the assistant's turn behind them; {_REMEDY}") from error
    for shorter, longer, what in (
        (before, after, f"the prompt for message {turn + 1} is not how that message begins"),
        (after, whole, f"message {turn + 1} is rendered in another way once other messages follow"),
    ):
        if not longer.startswith(shorter):
            pairs = zip(shorter, longer)
            same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(longer))
            shown = (repr(text[same : same + _SHOWN]) for text in (shorter, longer))
            raise ValueError(f"{template.name} does not tell which text is the assistant's: {what} "
                             f"({' against '.join(shown)}); {_REMEDY}")
    return len(before), len(after)


def _trim(text: str, begin: int, end: int, ends: Collection[str]) -> int:
    """Return the end of a turn without white space behind a special token."""
    turn = text[begin:end].rstrip()
    return begin + len(turn) if turn.endswith(tuple(ends)) else end
