"""Chat templates are found and rendered as transformers does."""

import json

import pytest
from transformers import AutoTokenizer

from chats import CHATML, MARKED, save_chat_tokenizer, turns
from dualpipe.train.chat.template import ChatTemplate, find_template

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


@pytest.mark.parametrize("template", [CHATML, MARKED, MANY_FEATURES])
@pytest.mark.parametrize("prompts", [False, True])
def test_renders_as_transformers(tmp_path, template, prompts):
    save_chat_tokenizer(tmp_path, template)
    hub = AutoTokenizer.from_pretrained(tmp_path)
    messages = turns("Hi <b>", "Hello\n 'you' \u00e9", system="Be brief.")
    expected = hub.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompts)
    assert find_template(tmp_path).render(messages, TOOLS, prompts=prompts).text == expected


def test_generation_blocks_give_their_bounds():
    template = ChatTemplate(MARKED, {}, "it")
    text, generated = template.render(turns("a", "bc", "d", "e"))
    assert template.marks_generation and not ChatTemplate(CHATML, {}, "it").marks_generation
    assert [text[begin:end] for begin, end in generated] == ["bc<|im_end|>", "e<|im_end|>"]
    assert ChatTemplate(CHATML, {}, "it").render(turns("a")).generated == []


def test_where_a_template_is_found(tmp_path):
    save_chat_tokenizer(tmp_path, "in the configuration")
    assert find_template(tmp_path).render([]).text == "in the configuration"
    (tmp_path / "chat_template.jinja").write_text("in a file, {{ bos_token }}")
    assert find_template(tmp_path).render([]).text == "in a file, <|endoftext|>"
    (tmp_path / "other").write_text("another")
    assert find_template(tmp_path, str(tmp_path / "other")).render([]).text == "another"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find_template(tmp_path).render([]).text == "yes"


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read the chat template none: "):
        find_template(tmp_path, "none")
    with pytest.raises(ValueError, match=r"has no chat template: no chat_template.jinja, and no chat_"):
        find_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json holds a list; it must hold a JSON object"):
        find_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer_config.json: "):
        find_template(tmp_path)
    with pytest.raises(ValueError, match="it is not a valid template: "):
        ChatTemplate("{% for %}", {}, "it")
    with pytest.raises(ValueError, match="it refuses the conversation: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "it").render(turns("a"))
    with pytest.raises(ValueError, match=r"it refuses the conversation: .*unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}, "it").render(turns("a"))
    with pytest.raises(ValueError, match=r"contains U\+FDD0"):
        ChatTemplate(MARKED, {}, "it").render(turns("a", "b\ufdd0"))
