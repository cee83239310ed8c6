"""Find files, read documents and records in little memory, and refuse damaged or binary files."""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from dualpipe import cli
from dualpipe.train.data import record_formats
from dualpipe.train.data.chat import Conversation
from dualpipe.train.data.pack import pack
from dualpipe.train.data.sources import find_sources, read_conversations, read_documents
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ByteTokenizer

END = ByteTokenizer.end_of_document
TEXTS = ["one", 'two\nlines and "quotes"', "drei \u00e4\u4e09\0", "four" * 500]
KINDS = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"]


def lines_of(texts, key="text"):
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)).encode()


def write(path, content):
    """Write a file of the kind of its suffix. `content` is bytes, or texts of records."""
    if path.name.endswith(".parquet"):
        table = pa.table({"id": range(len(content)), "text": content})
        parquet.write_table(table, path, row_group_size=2)
        return path
    content = content if isinstance(content, bytes) else lines_of(content)
    if path.name.endswith(".gz"):
        content = gzip.compress(content)
    if path.name.endswith(".zst"):
        half = len(content) // 2  # two frames, as of a parallel compressor
        content = zstandard.compress(content[:half]) + zstandard.compress(content[half:])
    path.write_bytes(content)
    return path


def packed_texts(paths, out, **options):
    pack(find_sources(paths), ByteTokenizer(), out, overwrite=True, **options)
    stream = TokenStream(PackedTokens(out))
    texts, document = [], []
    for token in stream.read(0, stream.num_tokens).tolist():
        if token == END:
            texts.append(bytes(document).decode())
            document = []
        else:
            document.append(token)
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_is_a_document(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(record_formats, "ZSTD_PIECE", 7)  # pieces end within lines, and within frames
    monkeypatch.setattr(record_formats, "PARQUET_ROWS", 3)
    path = write(tmp_path / f"a{kind}", TEXTS)
    assert packed_texts([path], tmp_path / "out") == TEXTS
    assert packed_texts([path.rename(tmp_path / f"A{kind.upper()}")], tmp_path / "upper") == TEXTS


def test_the_documents_list_every_format():
    text = (Path(__file__).parents[3] / "docs/data.md").read_text()
    rows = "\n".join(re.findall(r"^\| `\..*", text, re.MULTILINE))
    for suffix in record_formats.RECORD_FORMATS:
        kind, *compressions = re.findall(r"\.\w+", suffix)
        assert f"`{kind}`" in rows
        assert all(f"`{compression}`" in text for compression in compressions)


def test_kinds_can_be_mixed_and_the_last_line_needs_no_newline(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "c.txt").write_text("\ufeffplain", encoding="utf-8")
    (folder / "b.jsonl").write_bytes("\ufeff".encode() + lines_of(["with a BOM", "open end"]).rstrip())
    write(folder / "d.jsonl.gz", ["zipped"])
    write(folder / "a.parquet", ["columnar", "and so on"])
    assert packed_texts([folder], tmp_path / "out") == [
        "columnar", "and so on", "with a BOM", "open end", "plain", "zipped",
    ]


@pytest.mark.parametrize("packer", [bytes, gzip.compress, zstandard.compress])
def test_json_in_lines_in_an_array_or_alone(tmp_path, packer):
    """Names that other tools give: a file named .json may have any of the forms."""
    suffix = {gzip.compress: ".gz", zstandard.compress: ".zst"}.get(packer, "")
    records = [{"text": text} for text in TEXTS]
    for name, content, expected in (
        ("a.ndjson", lines_of(TEXTS), TEXTS), ("b.json", lines_of(TEXTS), TEXTS),
        ("c.json", json.dumps(records).encode(), TEXTS), ("d.json", json.dumps(records, indent=2).encode(), TEXTS),
        ("e.json", lines_of(["alone"]), ["alone"]), ("f.json", json.dumps({"text": "x"}, indent=1).encode(), ["x"]),
        ("g.json", b"\xef\xbb\xbf" + json.dumps(records).encode(), TEXTS),
        ("h.json", b"\n\n" + lines_of(TEXTS), TEXTS), ("i.json", b"\n" + lines_of(["alone"]) + b"\n", ["alone"]),
    ):
        (tmp_path / f"{name}{suffix}").write_bytes(packer(content))
        assert packed_texts([tmp_path / f"{name}{suffix}"], tmp_path / "out") == expected


def test_conversations_in_an_array(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"messages": OPENAI}, {"conversations": SHAREGPT}]))
    assert [conversation.messages for conversation, _ in read_conversations(tmp_path / "a.json")] == [OPENAI] * 2


@pytest.mark.parametrize(("name", "content"), [
    ("settings.json", '{"a": 1}'), ("settings.json", '{\n "a": 1\n}\n'), ("settings.json", '{\n // no JSON\n}\n'),
    ("numbers.json", "[1, 2]"), ("lines.txt", '{"text": "a"}\n{"text": "b"}\n'), ("array.txt", '[{"text": "a"}]'),
    ("array.data", '[\n {\n  "text": "a"}]'), ("table.csv", "text\na\n"), ("table.TSV", "text\tn\na\t1\n"),
])
def test_json_that_holds_no_records_is_left_out_by_name(tmp_path, name, content):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_text(content)
    (folder / "plain.txt").write_text("plain")
    with pytest.warns(UserWarning, match=rf"files that are not text are skipped: 1: {name} \("):
        assert packed_texts([folder], tmp_path / "out") == ["plain"]
    with pytest.raises(ValueError, match=rf"{name} (has no records: expected objects|has one object, but it has no "
                                         "'text', but 'a'|starts with a JSON object; give rec|is a table, not text)"):
        packed_texts([folder / name], tmp_path / "out")


@pytest.mark.parametrize(("content", "text"), [
    ('[{"text": "a"}, {"other": "b"}]', r"cannot read record 2 of .*a.json: it has no 'text', but 'other'"),
    ('[{"text": "a"}, null]', "cannot read record 2 of .*a.json: it is not a JSON object but of type NoneType"),
    ('[{"text": "a"}, {"tex', "cannot read record 1 of .*a.json: it is not valid JSON"),
    ('{"text": "a"}\n{"text": "b", "text": "c"}', "record 2 of .*a.json: it is not valid JSON .the key 'text' is th"),
])
def test_damaged_json_is_refused(tmp_path, content, text):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        packed_texts([tmp_path], tmp_path / "out")


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="parquet: the file has 2 columns with the name 'text'; expected one"):
        packed_texts([tmp_path / "a.parquet"], tmp_path / "out")


def test_links_are_followed_and_everything_is_read_once(tmp_path):
    folder = tmp_path / "texts"
    for path, text in (("texts/z.txt", "here"), ("disk/a.txt", "linked"), ("disk/deep/b.txt", "deeper")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (folder / "a").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/up").symlink_to(folder)
    (folder / "b").symlink_to(tmp_path / "disk/deep")
    (folder / "file.txt").symlink_to(tmp_path / "disk/a.txt")
    (folder / "gone.txt").symlink_to("nothing")
    os.mkfifo(folder / "pipe")
    with pytest.warns(UserWarning) as warned:
        assert packed_texts([folder], tmp_path / "out") == ["linked", "deeper", "here"]
    assert str(warned[0].message) == (
        f"{folder}: left out: 5: a/up (a folder that is read already), b (a folder that is read already), "
        "file.txt (a file that is read already), gone.txt (a link to nothing), pipe (no regular file)")


def test_snapshots_that_share_a_file_give_it_once(tmp_path):
    """The Hugging Face cache of a data set: another version has a new file, and a link to the same blob."""
    cache = tmp_path / "datasets--a--b"
    for folder in ("blobs", "snapshots/1", "snapshots/2"):
        (cache / folder).mkdir(parents=True)
    for blob, names in (("0a", ("1/old.txt", "2/old.txt")), ("0b", ("2/new.txt",))):
        (cache / "blobs" / blob).write_text(blob)
        for name in names:
            (cache / "snapshots" / name).symlink_to(f"../../blobs/{blob}")
    with pytest.warns(UserWarning, match="left out: 1: 2/old.txt .a file that is read already"):
        assert packed_texts([cache / "snapshots"], tmp_path / "out") == ["0a", "0b"]


def test_another_key(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS[:2], "content"))
    run = ["data", "pack", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(run) == 2
    error = capsys.readouterr().err
    assert error == (f"error: cannot read record 1 of {tmp_path / 'a.jsonl'}: it has no 'text', but 'id', 'content'; "
                    "name the key of the text with --text-key or data.text_key\n")
    assert not (tmp_path / "out").exists()
    assert cli.main([*run, "--text-key", "content"]) == 0
    assert "in 2 documents" in capsys.readouterr().out
    table = pa.table({"text": ["a"], "content": ["b"]})
    parquet.write_table(table, tmp_path / "b.parquet")
    assert packed_texts([tmp_path / "b.parquet"], tmp_path / "out", text_key="content") == ["b"]


SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
OPENAI = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_records_with_both_keys_are_read_by_the_one_with_messages(tmp_path, suffix):
    """Data sets that are joined in Parquet have the columns of both."""
    rows = [{"messages": OPENAI, "conversations": None}, {"messages": None, "conversations": SHAREGPT},
            {"messages": [], "conversations": SHAREGPT}, {"messages": None, "conversations": []},
            {"messages": OPENAI, "conversations": SHAREGPT}]
    path = tmp_path / f"chats.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unread = set()
    with pytest.warns(UserWarning, match="empty records are skipped: 1, the first is record 4"):
        found = [conversation.messages for conversation, _ in read_conversations(path, unread=unread)]
    assert found == [OPENAI] * 4
    assert unread == {"conversations"}, "of the record with both"


def test_messages_under_the_default_key_of_text_are_read(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"text": OPENAI}) + "\n")
    assert [conversation.messages for conversation, _ in read_conversations(path)] == [OPENAI]


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="a path is empty; give files or directories of text"):
        find_sources([""])


JSON = {
    b'{"text": 5}': "its 'text' is not a string but of type int",
    b'{"text": null}': "its 'text' is not a string but of type NoneType",
    b"{}": "it has no 'text', but nothing; name the key",
    b'"text"': "it is not a JSON object but of type str",
    b'{"text": "a"': "it is not valid JSON (Expecting ',' delimiter",
    b"[" * 100_000: "it is not valid JSON (",
    b'{"text": "\xff"}': "it is not valid JSON ('utf-8' codec can't decode",
    b'{"text": "\\ud800"}': "'utf-8' codec can't encode character",
}


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_bad_record_is_named(tmp_path, kind):
    path = tmp_path / f"bad{kind}"
    for bad, message in JSON.items():
        write(path, lines_of(["fine", "good"]) + bad + b"\n" + lines_of(["last"]))
        refuses(path, tmp_path / "out", f"cannot read record 3 of {path}: {message}")


def refuses(path, out, message):
    with pytest.raises(ValueError) as refused:
        pack(find_sources([path]), ByteTokenizer(), out)
    assert str(refused.value).startswith(message), refused.value
    assert "\n" not in str(refused.value)
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "bad.parquet"
    parquet.write_table(pa.table({"text": ["a", "b", None, "c"]}), path)
    refuses(path, tmp_path / "out", f"cannot read record 3 of {path}: its 'text' is not a string but of type NoneType")
    parquet.write_table(pa.table({"text": [1, 2]}), path)
    refuses(path, tmp_path / "out", f"cannot read record 1 of {path}: its 'text' is not a string but of type int")
    parquet.write_table(pa.table({"id": [1], "body": ["x"]}), path)
    refuses(path, tmp_path / "out", f"cannot read record 1 of {path}: it has no 'text', but 'id', 'body'; name the key")
    write(path, TEXTS * 100)
    path.write_bytes(path.read_bytes()[:-50])
    refuses(path, tmp_path / "out", f"cannot read record 1 of {path}: ")
    path.write_bytes(b"")
    refuses(path, tmp_path / "out", f"cannot read record 1 of {path}: ")


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst"])
def test_damaged_files_are_refused_by_name(tmp_path, kind):
    path = write(tmp_path / f"bad{kind}", lines_of([f"x{i}" for i in range(3000)]))
    whole = path.read_bytes()
    for size in (len(whole) - 3, len(whole) * 3 // 4, 30):
        path.write_bytes(whole[:size])
        refuses(path, tmp_path / "out", "cannot read record ")
    middle = len(whole) // 2 + 100
    path.write_bytes(whole[:middle] + bytes(200) + whole[middle + 200 :])
    refuses(path, tmp_path / "out", "cannot read record ")
    path.write_bytes(b'{"text": "not compressed"}\n' * 9)
    refuses(path, tmp_path / "out", f"cannot read record 1 of {path}: ")


@pytest.mark.parametrize("kind", KINDS)
def test_empty_records_are_skipped_with_a_warning(tmp_path, kind):
    path = write(tmp_path / f"a{kind}", ["one", "", "three", ""])
    with pytest.warns(UserWarning) as warned:
        assert packed_texts([path], tmp_path / "out") == ["one", "three"]
    assert [str(w.message) for w in warned] == [f"{path}: empty records are skipped: 2, the first is record 2"]
    with pytest.warns(UserWarning):
        refuses(write(tmp_path / f"b{kind}", ["", ""]), tmp_path / "none", "there is no text to pack")
    if kind == ".jsonl":
        path.write_bytes(lines_of(["one"]) + b"  \n" + lines_of(["three"]))
        with pytest.warns(UserWarning, match="empty records are skipped: 1, the first is record 2"):
            assert packed_texts([path], tmp_path / "out") == ["one", "three"]


BINARY = {
    "a.txt.gz": (gzip.compress(b"text"), "is a gzip file; unpack it, or give records in files named *.jsonl,"),
    "a.txt.zst": (zstandard.compress(b"text"), "is a zstd file"),
    "a.bz2": (bz2.compress(b"text"), "is a bzip2 file"),
    "a.txt.xz": (lzma.compress(b"text"), "is a xz file"),
    "a.zip": (b"PK\x03\x04....", "is a zip file"),
    "a.tar": (b"name" + b"." * 253 + b"ustar", "is a tar file"),
    "a.pq": (b"PAR1....", "is a Parquet file"),
    "a.jsonl": (gzip.compress(b"{}"), "is a gzip file"),
    "a.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not text: it has NUL bytes"),
    "utf16.txt": ("text".encode("utf-16"), "is not text: it has NUL bytes; leave it out, or convert it to UTF-8"),
    "late.txt": (b"x" * 100_000 + b"\0", "is not text: it has NUL bytes"),
}


def test_other_compressed_and_binary_files_are_refused_by_name(tmp_path):
    for name, (content, message) in BINARY.items():
        path = tmp_path / name
        path.write_bytes(content)
        refuses(path, tmp_path / "out", f"{path} {message}")


def test_binary_files_and_missing_packages_are_detected_before_tokenizing(tmp_path, monkeypatch):
    class Never(ByteTokenizer):
        def encode(self, text):
            raise AssertionError("tokenized")

    (tmp_path / "a.txt").write_text("fine")
    for name, package in (("z.bin", None), ("z.jsonl.zst", "zstandard"), ("z.parquet", "pyarrow")):
        late = tmp_path / name
        late.write_bytes(b"\0")
        with monkeypatch.context() as patch, pytest.raises(ValueError) as refused:
            if package:
                patch.setitem(sys.modules, package, None)
                patch.setitem(sys.modules, f"{package}.parquet", None)
            pack(find_sources([tmp_path / "a.txt", late]), Never(), tmp_path / "out")
        if package:
            assert str(refused.value) == f"{late} needs the package {package}: pip install 'dualpipe[data]'"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_read_one_by_one(tmp_path, kind, monkeypatch):
    """8 MB of text in records of 8 KB, of which only a few are in memory, Python's and pyarrow's."""
    monkeypatch.setattr(record_formats, "PARQUET_ROWS", 16)
    path = write(tmp_path / f"large{kind}", [random.Random(i).randbytes(4000).hex() for i in range(1000)])
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    count, arrow_bytes = 0, []
    for text, _ in read_documents(path, "text"):
        count += len(text)
        arrow_bytes.append(pa.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1] + max(arrow_bytes)
    tracemalloc.stop()
    assert count == 8_000_000
    assert peak < 2e6, peak


def test_stdlib_is_code_without_tests_or_packages():
    names = [s.name for s in find_sources(["stdlib"])]
    assert "argparse.py" in names and names == sorted(names)
    assert not [n for n in names if n.startswith(("site-packages/", "test/")) or "/tests/" in n]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    scandir = os.scandir
    text = tmp_path / "text"
    text.mkdir()
    (text / "closed").mkdir()
    (text / "a.txt").write_text("open")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=f"^cannot read {text}/closed: Permission denied$"):
        find_sources([text])


def test_the_system_prompt_and_the_tools_beside_the_messages_are_read(tmp_path):
    record = {"id": 1, "system": "s", "messages": [{"role": "user", "content": "a"}], "tools": '[{"name": "f"}]'}
    expected = Conversation(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], [{"name": "f"}], frozenset())
    (tmp_path / "chat.jsonl").write_text(json.dumps(record))
    parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "chat.parquet")
    for name in ("chat.jsonl", "chat.parquet"):
        assert [conversation for conversation, _ in read_conversations(tmp_path / name)] == [expected]


def test_keys_that_parquet_fills_with_null_are_dropped(tmp_path):
    """All objects of a column have the same keys there, also those inside tool calls and tools."""
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in (
        ("weather", {"city": "Rome"}), ("add", {"a": 1, "b": 2}))]
    tools = [{"name": "weather", "parameters": {"city": {"type": "string"}}},
             {"name": "add", "parameters": {"a": {"type": "integer"}}}]
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3", "name": "add"}, {"role": "assistant", "content": "b", "weight": 0},
    ]
    parquet.write_table(pa.Table.from_pylist([{"messages": messages, "tools": tools}]), tmp_path / "chat.parquet")
    ((conversation, _),) = read_conversations(tmp_path / "chat.parquet")
    without_weight = [messages[0], {"role": "assistant", "tool_calls": calls}, messages[2],
                      {"role": "assistant", "content": "b"}]
    assert conversation == Conversation(without_weight, tools, frozenset({3}))
    explicit = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"arguments": {"b": None}}]}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": explicit}))
    ((conversation, _),) = read_conversations(tmp_path / "chat.jsonl")
    assert conversation.messages[1]["tool_calls"] == [{"arguments": {"b": None}}], "a null in JSON is a value"


@pytest.mark.parametrize(("record", "text_key", "hint"), [
    ({"messages": []}, "text", "but 'messages'; pack conversations with --chat or data.chat = true, or name the key"),
    ({"conversations": [], "id": 1}, "text", "but 'conversations', 'id'; pack conversations with --chat"),
    ({"messages": [{}]}, "messages", "its 'messages' is not a string but of type list; pack conversations with --chat"),
    ({"instruction": "a", "input": "", "output": "b"}, "text", "for fine-tuning, convert the records to {\"messages\""),
    ({"question": "a", "other": "b"}, "text", "but 'question', 'other'; name the key of the text with --text-key or "
                                              "data.text_key"),
])
def test_records_for_fine_tuning_that_are_packed_as_text_get_a_hint(tmp_path, record, text_key, hint):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError) as refused:
        pack(find_sources([path]), ByteTokenizer(), tmp_path / "out", text_key=text_key)
    assert hint in str(refused.value)
