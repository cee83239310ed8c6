"""Chat templates are found and rendered as transformers does."""

import json

import pytest
from transformers import AutoTokenizer

from chats import CHATML, MARKED, save_chat_tokenizer, turns
from dualpipe.train.data.chat import ChatTemplate

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
