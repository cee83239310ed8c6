"""Chat templates: the jinja2 templates of a tokenizer that render a conversation as text.

Templates are rendered the way transformers renders them: sandboxed, with trimmed blocks, `break` and `continue`, a
`tojson` that does not escape HTML, `raise_exception`, `strftime_now`, and `{% generation %}` blocks around the
assistant's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"  # beside a tokenizer.json; used before the entry in the configuration
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
# Unicode noncharacters, which no text contains, mark generation blocks in a rendered text.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")


class Rendered(NamedTuple):
    """A rendered conversation.

    text: the output of the template.
    generated: bounds, in characters, of the generation blocks.
    """

    text: str
    generated: list[tuple[int, int]]


class ChatTemplate:
    """A chat template.

    Attributes:
        name: origin of the template, for messages.
        marks_generation: True if the template has generation blocks.
        content: the template and its variables as bytes, to hash.

    Args:
        source: the text of the template.
        variables: special tokens by name, such as bos_token.
        name: see above.

    Raises:
        ValueError: the template is not valid.
    """

    def __init__(self, source: str, variables: Mapping[str, str], name: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"{name} is not a valid template: {error}") from error
        self._source = source
        self._variables = dict(variables)
        self.name = name
        self.marks_generation = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        self.content = json.dumps([source, sorted(self._variables.items())]).encode()

    def names(self, role: str) -> bool:
        """Return True if the text of the template contains a role as a string."""
        return f"'{role}'" in self._source or f'"{role}"' in self._source

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, prompts: bool = False
    ) -> Rendered:
        """Render messages.

        Args:
            messages: in OpenAI's form.
            tools: schemas of functions.
            prompts: end with the generation prompt, the start of an assistant turn (add_generation_prompt).

        Raises:
            ValueError: the template refuses the messages, or they contain a character that marks generation blocks.
        """
        try:
            marked = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **self._variables
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{self.name} refuses the conversation: {error}") from error
        return _remove_marks(marked)


def _remove_marks(marked: str) -> Rendered:
    """Remove the marks from a text, and return it with the bounds of the marked parts."""
    pieces = _MARKS.split(marked)
    marks = _MARKS.findall(marked)
    if marks != [_BEGIN, _END] * (len(marks) // 2):
        raise ValueError("the conversation contains U+FDD0 or U+FDD1, which are not characters, or a generation block "
                         "is inside another; remove them from the text, or the inner block from the template")
    bounds = list(accumulate(map(len, pieces[:-1])))
    return Rendered("".join(pieces), list(zip(bounds[::2], bounds[1::2])))


class _GenerationBlock(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, rendered with a mark at each end."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block into a call of `_mark` with its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text, with the arguments that transformers' `tojson` takes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    """Refuse a conversation with the template's own message."""
    raise TemplateError(message)


def find_template(folder: Path, path: str = "") -> ChatTemplate:
    """Return the chat template of a tokenizer.

    Args:
        folder: directory of the tokenizer's files. `chat_template.jinja` is used before the entry in
            `tokenizer_config.json`. Of a list of templates there, the one with the name "default" is used.
        path: a file to use instead. "": the template of the tokenizer.

    Raises:
        ValueError: there is no template, or a file cannot be read.
    """
    settings = _read_object(folder / TOKENIZER_CONFIG)
    variables = _special_tokens(_read_object(folder / SPECIAL_TOKENS) | settings)
    file = Path(path) if path else folder / TEMPLATE_FILE
    if path or file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the chat template {file}: {error}") from error
        return ChatTemplate(source, variables, f"the chat template {file}")
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        by_name = {named.get("name"): named.get("template") for named in entry if isinstance(named, Mapping)}
        entry = by_name.get("default")
    if not isinstance(entry, str):
        raise ValueError(f"the tokenizer in {folder} has no chat template: no {TEMPLATE_FILE}, and no chat_template in "
                         f"{TOKENIZER_CONFIG}; use the tokenizer of a model that was trained to chat, or give a "
                         "template with --chat-template or data.chat_template")
    return ChatTemplate(entry, variables, f"the chat template in {folder / TOKENIZER_CONFIG}")


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if the file is missing. Raises ValueError for anything else."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}; it must hold a JSON object")
    return values


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in a tokenizer's settings, by name, such as bos_token."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
