"""Documents on the console."""

import pytest
import rich.console

from chats import MARKED, save_chat_tokenizer, turns, write_chats
from dualpipe import cli
from dualpipe.train.data import show as show_module


def test_tokens_that_count_are_in_brackets(tmp_path, capsys):
    tokenizer, packed = str(save_chat_tokenizer(tmp_path / "tokenizer", MARKED)), str(tmp_path / "packed")
    chats = write_chats(tmp_path / "chats.jsonl", [turns("hi", "hello [x]"), turns("a", "b")])
    pack = ["data", "pack", str(chats), "--chat", "--tokenizer", tokenizer, "--out", packed]
    assert cli.main(pack) == 0
    assert capsys.readouterr().out == f"{packed}: 49 tokens in 2 documents, 8 of them count for the loss\n"
    assert cli.main(["data", "show", packed, "--tokenizer", tokenizer, "--document", "0", "--count", "5"]) == 0
    assert capsys.readouterr().out == (
        "document 0: 27 tokens, 6 count for the loss\n"
        "<|im_start|>|u|s|e|r|\n|h|i|<|im_end|>|\n|<|im_start|>|a|s|s|i|s|t|an|t|\n|[[hello| |[|x|]|<|im_end|>]]|\n\n"
        "document 1: 22 tokens, 2 count for the loss\n"
        "<|im_start|>|u|s|e|r|\n|a|<|im_end|>|\n|<|im_start|>|a|s|s|i|s|t|an|t|\n|[[b|<|im_end|>]]|\n\n"
    )
    for options, text in (
        (["--document", "2"], "error: --document 2: "), (["--document", "-1"], "has documents 0 to 1; give"),
        (["--count", "0"], "--count 0: give at least 1"),
    ):
        assert cli.main(["data", "show", packed, "--tokenizer", tokenizer, *options]) == 2
        assert text in capsys.readouterr().err
    assert cli.main(["data", "show", packed]) == 2
    assert "--tokenizer bytes: " in capsys.readouterr().err


def test_tokens_of_one_character_are_shown_as_it(tmp_path, capsys):
    tokenizer, packed = str(save_chat_tokenizer(tmp_path / "tokenizer", MARKED)), str(tmp_path / "packed")
    chats = write_chats(tmp_path / "chats.jsonl", [turns("\u00e4", "\u4e09\U0001f600z")])
    assert cli.main(["data", "pack", str(chats), "--chat", "--tokenizer", tokenizer, "--out", packed]) == 0
    assert cli.main(["data", "show", packed, "--tokenizer", tokenizer]) == 0
    shown = capsys.readouterr().out
    assert "|\n|\u00e4|<|im_end|>|" in shown and "[[\u4e09|\U0001f600|z|<|im_end|>]]" in shown
    part, whole = "\ufffd", "\u4e09"

    def decode(tokens):
        return whole if tokens == [1, 2, 3] else part * len(tokens)

    assert list(show_module._pieces([1, 2, 3], [False, False, True], decode)) == [(False, part)] * 2 + [(True, part)]
    assert list(show_module._pieces([1, 2, 3, 1], [True] * 4, decode)) == [(True, whole), (True, part)]


def test_in_colour_on_a_terminal(tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text("ab")
    assert cli.main(["data", "pack", str(tmp_path / "text"), "--out", str(tmp_path / "packed")]) == 0
    console = rich.console.Console(force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    monkeypatch.setattr(show_module, "Console", lambda **_: console)
    capsys.readouterr()
    show_module.show(tmp_path / "packed")
    assert "\x1b[1;32ma|b|<end>\x1b[0m" in capsys.readouterr().out
    with pytest.raises(ValueError, match="not a complete packed directory"):
        show_module.show(tmp_path)
