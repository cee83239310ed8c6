"""Chat templates: jinja2 templates of a tokenizer that make one text of a conversation.

Templates are rendered as transformers renders them: sandboxed, with blocks trimmed, `break` and `continue`, a `tojson`
that escapes no HTML, `raise_exception`, `strftime_now`, and the block `{% generation %}` around what the assistant
says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"  # beside a tokenizer.json; precedes the entry in the configuration
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
# Unicode's noncharacters, which no text has, mark generation blocks in a rendered text.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")


class Rendered(NamedTuple):
    """A rendered conversation.

    text: what the template makes of it.
    generated: bounds, in characters, of the generation blocks.
    """

    text: str
    generated: list[tuple[int, int]]


class ChatTemplate:
    """A chat template.

    Attributes:
        name: where it comes from, for messages.
        marks_generation: True if the template has generation blocks.
        content: the template and its variables as bytes, for a hash.

    Args:
        source: the template.
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
        self._variables = dict(variables)
        self.name = name
        self.marks_generation = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        self.content = json.dumps([source, sorted(self._variables.items())]).encode()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, prompts: bool = False
    ) -> Rendered:
        """Render messages.

        Args:
            messages: in OpenAI's form.
            tools: schemas of functions.
            prompts: end with the beginning of an assistant's turn (add_generation_prompt).

        Raises:
            ValueError: the template refuses the messages, or they hold a character that marks generation blocks.
        """
        try:
            marked = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **self._variables
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{self.name} refuses the conversation: {error}") from error
        return _remove_marks(marked)


def _remove_marks(marked: str) -> Rendered:
    """Return a text without marks, and the bounds of what was between them."""
    pieces = _MARKS.split(marked)
    marks = _MARKS.findall(marked)
    if marks != [_BEGIN, _END] * (len(marks) // 2):
        raise ValueError("the conversation holds U+FDD0 or U+FDD1, which are no characters, or a generation block is "
                         "inside another")
    borders = []
    length = 0
    for piece in pieces[:-1]:
        length += len(piece)
        borders.append(length)
    return Rendered("".join(pieces), list(zip(borders[::2], borders[1::2])))


class _GenerationBlock(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, which is rendered with a mark at each end."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def find_template(folder: Path, path: str = "") -> ChatTemplate:
    """Return the chat template of a tokenizer.

    Args:
        folder: directory of the tokenizer's files. `chat_template.jinja` precedes the one in `tokenizer_config.json`,
            where a list of templates is searched for the name "default".
        path: a file to take instead. "": that of the tokenizer.

    Raises:
        ValueError: there is none, or a file cannot be read.
    """
    settings = _read_object(folder / TOKENIZER_CONFIG)
    variables = _special_tokens(_read_object(folder / SPECIAL_TOKENS) | settings)
    make = partial(ChatTemplate, variables=variables)
    file = Path(path) if path else folder / TEMPLATE_FILE
    if path or file.is_file():
        try:
            return make(file.read_text(encoding="utf-8"), name=f"the chat template {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the chat template {file}: {error}") from error
    listed = settings.get("chat_template")
    if isinstance(listed, list):
        by_name = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, Mapping)}
        listed = by_name.get("default")
    if not isinstance(listed, str):
        raise ValueError(f"the tokenizer in {folder} has no chat template: there is no {TEMPLATE_FILE}, and no "
                         f"chat_template in {TOKENIZER_CONFIG}; take the tokenizer of a model that was trained to "
                         "chat, or give a template with --chat-template or data.chat_template")
    return make(listed, name=f"the chat template in {folder / TOKENIZER_CONFIG}")


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if the file is missing. Raises ValueError for anything else."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no object but {type(values).__name__}")
    return values


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer's settings name, such as bos_token."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
