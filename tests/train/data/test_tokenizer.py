"""Load tokenizers as transformers does, choose the token that ends documents, and refuse what is no tokenizer."""

import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from chats import save_chat_tokenizer
from dualpipe import cli
from dualpipe.train.config.fit import resolve_tokenizer
from dualpipe.train.config.load import load_config
from dualpipe.train.data.pack import pack
from dualpipe.train.data.run_data import compare_with_checkpoint
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import FileTokenizer, load_tokenizer, read_tokenizer


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
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        pack(find_sources([tmp_path / "t.txt"]), tokenizer, tmp_path / "out2")


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
