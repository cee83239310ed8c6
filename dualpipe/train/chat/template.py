"""Chat templates, rendered by transformers: `apply_chat_template` of the tokenizer.

It chooses one of several templates (`tool_use` for conversations with tools), drops keys that are null, and knows the
names of reasoning. Added here are the bounds of `{% generation %}` blocks in the text.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tools = list[Any]
# Unicode noncharacters, which no text contains, mark generation blocks in a rendered text.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# The line end behind the macro is removed, as behind any block.
_MACRO = f"{{% macro mark_generation() %}}{_BEGIN}{{{{ caller() }}}}{_END}{{% endmacro %}}\n"


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

    def names(self, role: str, tools: Tools | None = None) -> bool:
        """Return True if the text of the template contains a role as a string."""
        source = self._source(tools)
        return f"'{role}'" in source or f'"{role}"' in source

    def render(
        self, messages: list[dict[str, Any]], tools: Tools | None = None, *, prompts: bool = False
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

    def _source(self, tools: Tools | None) -> str:
        """Return the template for a conversation. Raises ValueError if there are several and none is the default."""
        try:
            return self._tokenizer.get_chat_template(self._own, tools)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot be chosen: {_one_line(error)}") from error

    def _apply(
        self, source: str, messages: list[dict[str, Any]], tools: Tools | None, *, prompts: bool
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


def _one_line(error: Exception) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _remove_marks(marked: str) -> Rendered:
    """Remove the marks from a text, and return it with the bounds of the marked parts."""
    pieces = _MARKS.split(marked)
    marks = _MARKS.findall(marked)
    if marks != [_BEGIN, _END] * (len(marks) // 2):
        raise ValueError("the conversation contains U+FDD0 or U+FDD1, which are not characters, or a generation block "
                         "is inside another; remove them from the text, or the inner block from the template")
    bounds = list(accumulate(map(len, pieces[:-1])))
    return Rendered("".join(pieces), list(zip(bounds[::2], bounds[1::2])))
