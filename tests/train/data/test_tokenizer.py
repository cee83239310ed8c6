"""Tokenizers of text and of conversations, with the tokens and loss masks of transformers."""

import json
import sys

import numpy as np
import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer

from chats import CHATML, MARKED, SPECIAL, encode, random_chats, save_chat_tokenizer, turns
from dualpipe import cli
from dualpipe.train.config.fit import resolve_tokenizer
from dualpipe.train.config.load import load_config
from dualpipe.train.data.chat import Conversation, read_conversation
from dualpipe.train.data.pack import pack
from dualpipe.train.data.run_data import compare_with_checkpoint
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ChatTokenizer, FileTokenizer, load_tokenizer, read_tokenizer


def stream_of(path):
    stream = TokenStream(PackedTokens(path))
    return stream.read(0, stream.num_tokens).tolist()


def words(*names, processor=None):
    """Return a tokenizer of whole words."""
    vocabulary = {name: number for number, name in enumerate(("[UNK]", *names))}
    hub = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    hub.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        hub.post_processor = processor
    return hub


def write(folder, hub, **settings):
    """Write a tokenizer with settings, or a lone tokenizer.json without."""
    folder.mkdir(parents=True, exist_ok=True)
    hub.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_lone_file(tmp_path):
    hub = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2, "<|endoftext|>": 70000}, unk_token="[UNK]"))
    hub.pre_tokenizer = pre_tokenizers.Whitespace()
    hub.save(str(tmp_path / "tok.json"))
    (tmp_path / "t.txt").write_text("hello world hello what")
    tokenizer = load_tokenizer(str(tmp_path / "tok.json"))
    assert load_tokenizer(str(write(tmp_path / "checkpoint", hub))).identity == tokenizer.identity
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (70001, 70000)
    pack(find_sources([tmp_path / "t.txt"]), tokenizer, tmp_path / "out")
    assert stream_of(tmp_path / "out") == [1, 2, 1, 0, 70000]
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert (index["dtype"], index["end_token"], index["end_of_document"]) == ("uint32", "<|endoftext|>", 70000)
    assert compare_with_checkpoint(PackedTokens(tmp_path / "out"), str(tmp_path / "checkpoint")) == ""
    (tmp_path / "checkpoint/tokenizer.json").write_text("another")
    warning = compare_with_checkpoint(PackedTokens(tmp_path / "out"), str(tmp_path / "checkpoint"))
    assert "was packed with another tokenizer, but the model starts from a checkpoint with its own" in warning
    with pytest.raises(ValueError, match="the end token 'x': the tokenizer 'bytes' has an end-of-document id"):
        load_tokenizer("bytes", "x")
    with pytest.raises(ValueError, match="no token 'x'; name the token that ends a document with"):
        FileTokenizer(tmp_path / "tok.json", end_token="x")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        FileTokenizer(tmp_path / "t.txt")
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        FileTokenizer(tmp_path / "none.json")


def test_a_document_ends_with_the_eos_token_or_the_only_one_that_can_end_it(tmp_path, capsys):
    hub = words("<|begin_of_text|>", "<|endoftext|>", "<|end|>", "</s>")
    settings = write(tmp_path / "settings", hub, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>")
    for name in (settings, settings / "tokenizer.json"):
        assert FileTokenizer(name).end_token == AutoTokenizer.from_pretrained(settings).eos_token == "<|end|>"
    assert FileTokenizer(settings, "</s>").end_of_document == 4
    assert FileTokenizer(settings).identity != FileTokenizer(settings, "</s>").identity
    for folder in (write(tmp_path / "lone", hub), write(tmp_path / "no eos", hub, bos_token="<|begin_of_text|>")):
        with pytest.raises(ValueError, match=r"has <\|endoftext\|> and </s>; name the token that ends a document with"):
            FileTokenizer(folder)
    (tmp_path / "no eos/config.json").write_text('{"eos_token_id": 4}')
    assert FileTokenizer(tmp_path / "no eos").end_token == "</s>"
    (tmp_path / "no eos/generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    with pytest.raises(ValueError, match=r"no eos_token, and its model ends texts with <\|end\|> and <\|endoftext\|>"):
        FileTokenizer(tmp_path / "no eos")
    only_begin = write(tmp_path / "only begin", words("<|endoftext|>", "a"), bos_token="<|endoftext|>")
    with pytest.raises(ValueError, match=r"none of .*, besides <\|endoftext\|>, which begins texts; name the"):
        FileTokenizer(only_begin)
    begin = write(tmp_path / "begin", words("<|begin_of_text|>", "a"))
    with pytest.raises(ValueError, match=r"its vocabulary has none of <\|endoftext\|>, "):
        FileTokenizer(begin / "tokenizer.json")
    (tmp_path / "a.txt").write_text("a")
    pack_words = ["data", "pack", str(tmp_path / "a.txt"), "--tokenizer", str(begin), "--out", str(tmp_path / "out")]
    assert cli.main([*pack_words, "--end-of-document", "<|begin_of_text|>"]) == 0
    assert "in 1 documents, each ended by '<|begin_of_text|>'" in capsys.readouterr().out


def test_text_has_the_tokens_of_transformers_and_none_in_front(tmp_path):
    """Also tokens that are only in the settings; a begin token is left out with a warning."""
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = write(tmp_path, words("<s>", "</s>", "a", processor=begin), eos_token="</s>", bos_token="<s>",
                   additional_special_tokens=["<mark>"])
    hub = AutoTokenizer.from_pretrained(folder)
    with pytest.warns(UserWarning, match="begins texts with <s>; documents are packed without it"):
        tokenizer = FileTokenizer(folder)
    (encoding,) = tokenizer.encode_texts([tokenizer.prepare(b"a<mark>a b")])
    assert encoding.ids == hub("a<mark>a b", add_special_tokens=False)["input_ids"] == [3, 4, 3, 0]
    assert tokenizer.vocab_size == len(hub) == 5
    without = read_tokenizer(write(tmp_path / "lone", words("<s>", "</s>", "a")))
    assert tokenizer.identity != f"{without.identity}:2", "another tokenizer: it lacks <mark>"


@pytest.mark.parametrize(("settings", "content"), [
    ("special_tokens_map.json", {"eos_token": "<end>"}), ("tokenizer_config.json", {"eos_token": "<end>"}),
    ("added_tokens.json", {"<end>": 2}),
])
def test_a_file_stands_for_its_directory_if_that_has_more_tokens(tmp_path, settings, content):
    folder = write(tmp_path, words("</s>"))
    (folder / settings).write_text(json.dumps(content))
    tokenizer = FileTokenizer(folder / "tokenizer.json", "</s>")
    (encoding,) = tokenizer.encode_texts([tokenizer.prepare(b"<end>")])
    assert encoding.ids == AutoTokenizer.from_pretrained(folder)("<end>", add_special_tokens=False)["input_ids"] == [2]


def test_what_transformers_cannot_load_is_refused_in_a_line(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no files").mkdir()
    (tmp_path / "no files/config.json").write_text('{"model_type": "qwen3_moe"}')
    own = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}
    write(tmp_path / "own", words("a"), **own)
    for name, text in (("empty", "transformers cannot load the tokenizer in .*empty"), ("no files", "no files"),
                       ("own", "custom code"), ("none", "cannot read")):
        with pytest.raises(ValueError, match=text) as raised:
            read_tokenizer(tmp_path / name)
        assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install 'dualpipe\[hf\]'"):
        read_tokenizer(tmp_path / "own")
    assert read_tokenizer(write(tmp_path / "lone", words("a")) / "tokenizer.json").vocab_size == 2


def test_auto_is_the_directory_of_the_checkpoint(tmp_path):
    """Also if it has no tokenizer.json, such as one of sentencepiece alone: never bytes instead."""
    (tmp_path / "run.toml").write_text('[init]\nfrom_hf = "model"\n[parallel]\ndevice = "cpu"\n')
    (tmp_path / "model").mkdir()
    assert resolve_tokenizer(load_config(tmp_path / "run.toml")).data.tokenizer == "bytes"
    (tmp_path / "model/tokenizer.model").write_text("")
    assert resolve_tokenizer(load_config(tmp_path / "run.toml")).data.tokenizer == str(tmp_path / "model")
    save_chat_tokenizer(tmp_path / "model")
    assert FileTokenizer(resolve_tokenizer(load_config(tmp_path / "run.toml")).data.tokenizer).end_token == "<|im_end|>"


def test_tokens_and_masks_are_those_of_transformers(tmp_path):
    hub = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "marked", MARKED))
    marked = ChatTokenizer(str(tmp_path / "marked"))
    plain = ChatTokenizer(str(save_chat_tokenizer(tmp_path / "plain", CHATML) / "tokenizer.json"))
    for chat in [*random_chats(30), turns("a", "b", system="c")]:
        expected = hub.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        for tokenizer in (marked, plain):
            *_, tokens, counts = encode(tokenizer, Conversation(chat))
            assert tokens.tolist() == expected["input_ids"]
            assert counts.tolist() == list(map(bool, expected["assistant_masks"])) and counts.any()
    assert marked.identity != plain.identity and marked.vocab_size == plain.vocab_size == 266


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome", "days": None}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "<d>", "parameters": {}}}
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = ("<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% endif %}")
SHAPES = {
    "printed": HEAD + "{{ m.content }}" + TAIL,
    "trimmed": HEAD + "{{ m.content | trim }}" + TAIL,
    "defined": HEAD + "{% if m.content is defined %}{{ m.content }}{% endif %}" + TAIL,
    "calls": HEAD + "{{ m['content'] }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}" + TAIL,
    "tools": "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}" + HEAD + "{{ m.content }}" + TAIL,
    "reasoning": HEAD + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
                 "{{ m.content }}" + TAIL,
    "thinking": HEAD + "{{ m.thinking }}{{ m.content }}" + TAIL,
    "names": "{{ bos_token }}" + HEAD + "{{ m.name }} {{ m.content }}" + TAIL,
    "parts": HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
             "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}" + TAIL,
    "marked": MARKED,
    "marked parts": HEAD + "{% generation %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
                    "{% endgeneration %}" + TAIL,
}
USER = {"role": "user", "content": " what is\nthe weather? "}
RECORDS = [
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "3"},
                  {"role": "assistant", "content": "warm"}], "tools": [TOOL]},
    {"messages": [USER, {"role": "assistant", "content": "warm", "reasoning_content": "a", "tool_calls": None}]},
    {"messages": [USER, {"role": "assistant", "content": "warm", "reasoning": "b"}, USER,
                  {"role": "assistant", "content": " cold ", "thinking": "c"}]},
    {"messages": [{"role": "developer", "content": "be brief", "name": "x"}, USER,
                  {"role": "assistant", "content": ""}]},
    {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [
        {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}, {"role": "assistant", "content": "d"}]},
]


@pytest.mark.filterwarnings("ignore:.* does not read ")
@pytest.mark.parametrize("shape", SHAPES)
def test_conversations_of_any_shape_have_the_tokens_of_transformers(tmp_path, shape):
    hub = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path, SHAPES[shape]))
    tokenizer = ChatTokenizer(str(tmp_path))
    num_equal = 0
    for record in RECORDS:
        conversation = read_conversation(record, "messages")
        try:
            expected = hub.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=True)
        except (TypeError, TemplateError):  # this template needs content, or a string
            with pytest.raises(ValueError, match="refuses the conversation"):
                encode(tokenizer, conversation)
            continue
        if "[{'type': 'text'" in hub.decode(expected["input_ids"]):
            with pytest.raises(ValueError, match="prints the content"):
                encode(tokenizer, conversation)
            continue
        num_equal += 1
        *_, tokens, loss_mask = encode(tokenizer, conversation)
        assert tokens.tolist() == expected["input_ids"] and loss_mask.any()
        if shape in ("printed", "parts") and not any("tool_calls" in m for m in conversation.messages):
            said = [m["content"] + "<|im_end|>" for m in conversation.messages if m["role"] == "assistant"]
            assert hub.decode(tokens[loss_mask].tolist()) == "".join(said)
    assert num_equal >= (3 if shape == "marked" else 5)


def test_tokens_that_are_only_in_the_settings(tmp_path):
    """As one id each, with the tokens of transformers, by the directory or by its tokenizer.json."""
    expected = encode(ChatTokenizer(str(save_chat_tokenizer(tmp_path / "all"))), Conversation(turns("a", "b"))).tokens
    folder = save_chat_tokenizer(tmp_path / "few")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    content["added_tokens"] = content["added_tokens"][:1]
    file.write_text(json.dumps(content))
    (folder / "added_tokens.json").write_text(json.dumps({name: ids[name] for name in SPECIAL[1:]}))
    for name in (folder, file):
        tokenizer = ChatTokenizer(str(name))
        assert encode(tokenizer, Conversation(turns("a", "b"))).tokens.tolist() == expected.tolist()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "added_tokens.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_special_tokens": ["<|im_start|>"]}))
    other = encode(ChatTokenizer(str(folder)), Conversation(turns("a", "b"))).tokens
    assert len(other) == len(expected)


def test_a_character_of_several_tokens_and_an_answer_of_one(tmp_path):
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path)))
    *_, tokens, counts = encode(tokenizer, Conversation(turns("a", "\U0001f600")))
    assert counts.sum() == 5, "four bytes and the end of the turn"
    assert np.flatnonzero(counts).tolist() == list(range(len(tokens) - 6, len(tokens) - 1))
    assert encode(tokenizer, Conversation(turns("a", ""))).loss_mask.sum() == 1


def test_the_first_token_never_counts(tmp_path):
    """Nothing predicts it."""
    bare = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path, bare)))
    assert encode(tokenizer, Conversation(turns("xyz", role="assistant"))).loss_mask.tolist() == [False, True, True]
    assert encode(tokenizer, Conversation(turns("x", role="assistant"))).loss_mask.tolist() == [False]
    assert len(encode(tokenizer, Conversation(turns("", role="assistant"))).tokens) == 0


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'bytes' has no chat template; give the directory of a model's tokenizer"):
        ChatTokenizer("bytes")
    with pytest.raises(ValueError, match=r"transformers cannot load the tokenizer in .*; give 'bytes', the directory"):
        ChatTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"has no chat template; use the tokenizer of"):
        ChatTokenizer(str(save_chat_tokenizer(tmp_path, None)))


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=r"it has '\\ud83d', one half of a character that JSON writes as a pair"):
        encode(tokenizer, Conversation(turns("a \ud83d", "b")))


def test_white_space_counts_with_a_tokenizer_that_trims_offsets(tmp_path):
    """A byte-level post-processor gives a token of white space an empty span, unless it keeps all characters."""
    unmarked_end = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}" \
                   "{% if add_generation_prompt %}assistant:{% endif %}"
    path = save_chat_tokenizer(tmp_path, unmarked_end) / "tokenizer.json"
    plain = ChatTokenizer(str(path))
    saved = Tokenizer.from_file(str(path))
    saved.post_processor = ByteLevel(trim_offsets=True)
    saved.save(str(path))
    trimming = ChatTokenizer(str(path))
    for answer in (" ", "\n\n", "hello \n the", " hello "):
        *_, tokens, loss_mask = encode(trimming, Conversation(turns("a", answer)))
        *_, expected_tokens, expected_mask = encode(plain, Conversation(turns("a", answer)))
        assert tokens.tolist() == expected_tokens.tolist()
        assert loss_mask.tolist() == expected_mask.tolist() and loss_mask.any()
