"""Pack text: encoding in batches, the progress bar, and what a failed packing leaves."""

import gzip
import json
import os
import resource
import sys
import threading
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from chats import random_chats, save_chat_tokenizer
from dualpipe import cli
from dualpipe.train.data import pack as train_pack
from dualpipe.train.data.chat import Conversation
from dualpipe.train.data.pack import EncodedDocument, PackProgress, encode_documents, pack
from dualpipe.train.data.sources import find_sources, read_documents
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ByteTokenizer, ChatTokenizer, FileTokenizer

END = ByteTokenizer.end_of_document


def stream_of(path):
    stream = TokenStream(PackedTokens(path))
    return stream.read(0, stream.num_tokens).tolist()


def test_pack_bytes_in_order(texts, tmp_path):
    packed = pack(find_sources([texts]), ByteTokenizer(), tmp_path / "out")
    assert (packed["documents"], packed["tokens"]) == (3, 12)
    expected = [*b"a\xff\x01", END, *b"bee", END, *b"sea", END]
    assert stream_of(tmp_path / "out") == expected
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert (index["dtype"], index["vocab_size"], index["tokens"]) == ("uint16", 257, 12)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [], "no temporary left"


def test_order_of_arguments_is_kept(texts, tmp_path):
    pack(find_sources([texts / "sub/c.txt", texts / "b.txt"]), ByteTokenizer(), tmp_path / "out")
    assert stream_of(tmp_path / "out") == [*b"sea", END, *b"bee", END]


def test_repacking_gives_the_same_files_and_replaces_the_old(texts, tmp_path):
    def contents():
        pack(find_sources([texts]), ByteTokenizer(), tmp_path / "out", overwrite=True)
        return {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    first = contents()
    assert contents() == first
    (texts / "d.txt").write_bytes(b"new")
    assert contents() != first
    assert stream_of(tmp_path / "out")[8:12] == [*b"new", END], "d.txt comes before sub/c.txt"


def test_a_failed_repack_leaves_the_old(texts, tmp_path):
    tokenizer = FileTokenizer(save_chat_tokenizer(tmp_path / "tokenizer") / "tokenizer.json")
    (texts / "a.txt").write_bytes(b"abc")
    (texts / "sub/c.txt").write_bytes(b"se\xff")
    pack(find_sources([texts]), ByteTokenizer(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"cannot tokenize .*c.txt: not UTF-8"):
        pack(find_sources([texts]), tokenizer, tmp_path / "out", overwrite=True)
    assert len(stream_of(tmp_path / "out")) == 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "texts", "tokenizer"]


def test_batches_of_any_size_give_the_same_files(tmp_path, text, monkeypatch):
    """Also where a batch ends within a shard, and a shard within a batch."""
    tokenizer = FileTokenizer(save_chat_tokenizer(tmp_path / "tokenizer") / "tokenizer.json")
    lines = [json.dumps({"text": "hello the " * (number % 7 + 1)}) + "\n" for number in range(100)]
    (text / "lines.jsonl").write_text("".join(lines))
    contents = []
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr(train_pack, "BATCH_CHARACTERS", size)
        out = tmp_path / f"out-{size}"
        pack(find_sources([text]), tokenizer, out, shard_tokens=150)
        contents.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert contents[0] == contents[1] == contents[2] and len(contents[0]) > 4


def test_pack_refuses_bad_sources_and_targets(texts, tmp_path):
    with pytest.raises(ValueError, match="there is no file or directory"):
        find_sources([tmp_path / "none"])
    with pytest.raises(ValueError, match="there is no text to pack"):
        pack(find_sources([texts / "empty.txt"]), ByteTokenizer(), tmp_path / "out")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="exists and is not a packed directory"):
            pack(find_sources([texts]), ByteTokenizer(), texts, overwrite=overwrite)
    with pytest.raises(ValueError, match=r"b.txt/out cannot be written: .*; choose another place"):
        pack(find_sources([texts]), ByteTokenizer(), texts / "b.txt/out")
    assert not (tmp_path / "out").exists()


def test_packing_next_to_the_text_skips_earlier_output(texts):
    packed = [pack(find_sources([texts]), ByteTokenizer(), texts / "packed", overwrite=True) for _ in range(2)]
    assert packed[0] == packed[1]


@contextmanager
def largest_file(size):
    """Limit the size of files, which fails as a full disk does, with another message."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    return tmp_path / "text"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sizes, file", [
    ([60, 4000, 60], "tokens-00001.bin"), ([300_000], "tokens-00000.bin"), ([1] * 100, "documents.npy"),
    ([60] * 3, "index.json"),
])
def test_a_full_disk_is_a_line_that_names_the_file(tmp_path, text, capsys, monkeypatch, sizes, file):
    """For a failing write and a failing close, with and without an existing packed directory."""
    monkeypatch.setitem(pack.__kwdefaults__, "shard_tokens", 50)
    for i, size in enumerate(sizes):
        (text / f"{i:03}").write_bytes(b"x" * size)
    run = ["data", "pack", str(text), "--out", str(tmp_path / "out")]
    for before in ("nothing", "packed"):
        if before == "packed":
            assert cli.main(run) == 0
            run.append("--overwrite")
        here = contents(tmp_path)
        capsys.readouterr()
        with largest_file(600):
            assert cli.main(run) == 2
        error = capsys.readouterr().err
        assert error == f"error: {tmp_path}/out/{file} cannot be written: File too large; choose another place\n"
        assert contents(tmp_path) == here and len(list(tmp_path.iterdir())) == 1 + (before == "packed")


def test_memory_does_not_grow_with_the_documents(tmp_path, text):
    """Records of 28 bytes per document are on disk until their file is written, with the same bytes as numpy."""
    number = 8_000
    (text / "many.jsonl").write_text('{"text": "ab"}\n' * number)
    tracemalloc.start()
    pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 28 * number, peak
    assert sorted(contents(tmp_path / "out")) == ["documents.npy", "index.json", "tokens-00000.bin"]
    records = np.load(tmp_path / "out/documents.npy")
    assert records["offset"].tolist() == list(range(0, 3 * number, 3))
    np.save(tmp_path / "again.npy", records)
    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "out/documents.npy").read_bytes()


class Interrupted(ByteTokenizer):
    def encode(self, text):
        if text == b"2":
            raise KeyboardInterrupt
        return super().encode(text)


def test_an_interrupt_leaves_the_old_directory(tmp_path, text, monkeypatch):
    for i in range(4):
        (text / f"{i}").write_text(f"{i}")
    for expected in (["text"], ["out", "text"]):
        with pytest.raises(KeyboardInterrupt):
            pack(find_sources([text]), Interrupted(), tmp_path / "out", overwrite=True)
        assert sorted(os.listdir(tmp_path)) == expected
        packed = pack(find_sources([text]), ByteTokenizer(), tmp_path / "out", overwrite=True)
        assert packed["documents"] == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_the_old_directory_comes_back_if_the_new_one_cannot_replace_it(tmp_path, text, monkeypatch, error):
    def fail(self, target):
        if self.name == "new":
            raise error
        return rename(self, target)

    rename = Path.rename
    (text / "a").write_text("old")
    pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
    (text / "a").write_text("new text")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises((KeyboardInterrupt, ValueError)) as raised:
            pack(find_sources([text]), ByteTokenizer(), tmp_path / "out", overwrite=True)
    if isinstance(raised.value, ValueError):
        assert str(raised.value) == f"{tmp_path}/out cannot be written: No space left on device; choose another place"
    assert sorted(os.listdir(tmp_path)) == ["out", "text"]
    stream = TokenStream(PackedTokens(tmp_path / "out"))
    assert bytes(stream.read(0, 3).astype(np.uint8)) == b"old"


def test_overwrite_replaces_a_packed_directory(tmp_path, text, capsys):
    (text / "a").write_text("first")
    run = ["data", "pack", str(text), "--out", str(tmp_path / "out")]
    assert cli.main(run) == 0
    here = contents(tmp_path)
    (text / "a").write_text("second text")
    assert cli.main(run) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/out is a packed directory already, with 6 tokens in 1 documents; give another --out, or "
        "--overwrite to replace it\n")
    assert contents(tmp_path) == here | {"text/a": b"second text"}
    assert cli.main([*run, "--overwrite"]) == 0
    assert "12 tokens in 1 documents" in capsys.readouterr().out
    (tmp_path / "out/index.json").write_text("{")
    assert cli.main(run) == 2 and "already, which is damaged; give another" in capsys.readouterr().err


def test_output_of_another_process_in_the_meantime_is_not_replaced(tmp_path, text, monkeypatch):
    (text / "a").write_text("ours")
    write = train_pack._write_files

    def write_beside_another(*arguments):
        monkeypatch.setattr(train_pack, "_write_files", write)
        pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
        (tmp_path / "out/theirs").touch()
        return write(*arguments)

    monkeypatch.setattr(train_pack, "_write_files", write_beside_another)
    with pytest.raises(ValueError, match="out is a packed directory already, with 5 tokens in 1 documents"):
        pack(find_sources([text]), ByteTokenizer(), tmp_path / "out")
    assert (tmp_path / "out/theirs").exists() and sorted(os.listdir(tmp_path)) == ["out", "text"]


def test_files_in_a_folder_that_are_not_text_are_skipped_and_named(tmp_path, text, capsys):
    (text / "a.md").write_text("text")
    (text / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (text / "late").write_bytes(b"x" * 100_000 + b"\0")
    (text / "z.zip").write_bytes(b"PK\x03\x04....")
    run = ["data", "pack", "--out", str(tmp_path / "out"), "--overwrite"]
    with pytest.warns(UserWarning) as warned:
        assert cli.main([*run, str(text)]) == 0
    assert [str(warning.message) for warning in warned] == [
        "files that are not text are skipped: 3: b.png (NUL bytes), z.zip (a zip file), late (NUL bytes)"]
    assert capsys.readouterr().out == f"{tmp_path}/out: 5 tokens in 1 documents\n"
    for name in ("b.png", "late"):
        assert cli.main([*run, str(text), str(text / name)]) == 2, "a file that is named explicitly"
        assert f"error: {text}/{name} is not text: it has NUL bytes" in capsys.readouterr().err
    (text / "records.jsonl").write_bytes(b"\x1f\x8b")
    assert cli.main([*run, str(text)]) == 2, "records may not be lost"
    assert "records.jsonl is a gzip file" in capsys.readouterr().err
    for name in ("records.jsonl", "a.md"):
        (text / name).unlink()
    for number in range(12):
        (text / f"{number:02}.png").write_bytes(b"\0")
    assert cli.main([*run, str(text)]) == 2
    error = capsys.readouterr().err
    assert "there is no text to pack: " in error and "not text are 15: 00.png" in error and "and 5 more" in error


@pytest.fixture
def tokenizer(tmp_path):
    return FileTokenizer(save_chat_tokenizer(tmp_path) / "tokenizer.json")


def numbered(documents):
    return [(document, f"document {number}") for number, document in enumerate(documents)]


def one_by_one(tokenizer, document):
    return tokenizer.convert(*pair_of(tokenizer, document))


def pair_of(tokenizer, document):
    text = tokenizer.prepare(document)
    return text, tokenizer.encode_texts([text])[0]


@pytest.mark.parametrize("size", [1, 50, 1000, 1 << 20])
@pytest.mark.parametrize("is_chat", [False, True])
def test_documents_keep_their_order_and_have_the_tokens_of_each_alone(tokenizer, tmp_path, monkeypatch, size, is_chat):
    monkeypatch.setattr(train_pack, "BATCH_CHARACTERS", size)
    chats = random_chats(40)
    if is_chat:
        tokenizer = ChatTokenizer(str(tmp_path))
        documents = [Conversation(chat) for chat in chats]
    else:
        documents = [json.dumps(chat).encode() for chat in chats]
    encoded = list(encode_documents(numbered(documents), tokenizer))
    assert [(each.document, each.place) for each in encoded] == numbered(documents)
    for each in encoded:
        tokens, loss_mask = one_by_one(tokenizer, each.document)
        assert np.array_equal(each.tokens, tokens) and each.tokens.dtype == np.uint32
        assert (each.loss_mask is None) == (not is_chat)
        assert not is_chat or np.array_equal(each.loss_mask, loss_mask)


def test_bytes_are_their_own_tokens():
    (encoded,) = encode_documents(numbered([b"ab"]), ByteTokenizer())
    assert encoded.tokens.tolist() == [97, 98] and encoded.loss_mask is None


def test_batches_end_at_the_number_of_characters_or_documents(tokenizer, monkeypatch):
    monkeypatch.setattr(train_pack, "BATCH_CHARACTERS", 10)
    monkeypatch.setattr(train_pack, "BATCH_DOCUMENTS", 3)
    sizes = []
    encode_texts = tokenizer.encode_texts
    tokenizer.encode_texts = lambda texts: sizes.append(len(texts)) or encode_texts(texts)
    assert len(list(encode_documents(numbered([b"abcdef"] * 3 + [b"x"] * 4), tokenizer))) == 7
    assert sizes == [2, 3, 2]


def test_the_caller_reads_only_a_few_batches_ahead(tokenizer, monkeypatch):
    monkeypatch.setattr(train_pack, "BATCH_CHARACTERS", 1)
    num_read = 0

    def read():
        nonlocal num_read
        for document in numbered([b"abc"] * 100):
            num_read += 1
            yield document

    for num_yielded, _ in enumerate(encode_documents(read(), tokenizer)):
        assert num_read <= num_yielded + 1 + train_pack.BATCHES_AHEAD


def test_a_document_that_is_not_utf8_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"^cannot tokenize document 2: not UTF-8 \("):
        list(encode_documents(numbered([b"a", b"b", b"\xff"]), tokenizer))


class Panic(BaseException):
    """Stand-in for a panic in Rust, whose exception is no `Exception` either."""


@pytest.mark.parametrize("error", [Exception, Panic])
def test_a_document_that_the_tokenizers_package_refuses_is_named(tokenizer, error):
    encode_texts = tokenizer.encode_texts

    def refuse(texts):
        if any(text.text == "bad" for text in texts):
            raise error("it is bad")
        return encode_texts(texts)

    tokenizer.encode_texts = refuse
    with pytest.raises(ValueError, match=r"^cannot tokenize document 3: it is bad$"):
        list(encode_documents(numbered([b"a", b"b", b"c", b"bad", b"d"]), tokenizer))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode_documents")]


def test_an_error_of_the_package_itself(tmp_path):
    """A vocabulary without a token for unknown words."""
    hub = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="[UNK]"))
    hub.pre_tokenizer = pre_tokenizers.Whitespace()
    hub.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"^cannot tokenize document 1: .*WordLevel error: Missing \[UNK\]"):
        list(encode_documents(numbered([b"a", b"a b", b"a"]), FileTokenizer(tmp_path / "tokenizer.json")))


def test_an_error_of_a_whole_batch_names_its_range(tokenizer):
    encode_texts = tokenizer.encode_texts

    def refuse(texts):
        if len(texts) > 1:
            raise Exception("too many")
        return encode_texts(texts)

    tokenizer.encode_texts = refuse
    with pytest.raises(ValueError, match="cannot tokenize the documents from document 0 to document 1 at once: too"):
        list(encode_documents(numbered([b"a", b"b"]), tokenizer))


@pytest.fixture
def files(tmp_path):
    lines = "".join(json.dumps({"text": f"line {number} " * 50}) + "\n" for number in range(200))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "c.txt").write_text("text " * 1000)
    return [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]


def test_nothing_is_printed_where_stderr_is_no_terminal(files, tmp_path, capfd):
    pack(find_sources(files), ByteTokenizer(), tmp_path / "out")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_the_share_of_the_files_and_the_rate(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("dualpipe.train.data.pack.PROGRESS_INTERVAL", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    pack(find_sources(files), ByteTokenizer(), tmp_path / "out")
    shown = capsys.readouterr().err
    assert "packing" in shown and "100%" in shown and " tokens/s" in shown


def test_positions_add_up_to_the_sizes_of_the_files(files, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("dualpipe.train.data.pack.PROGRESS_INTERVAL", 0.0)
    sizes = [file.stat().st_size for file in files]
    with PackProgress(files) as progress:
        task = progress._bar.tasks[0]
        assert task.total == sum(sizes)
        for number, file in enumerate(files):
            before = sum(sizes[:number])
            for _ in read_documents(file, "text", progress.set_position):
                assert before <= task.completed <= before + sizes[number]
            progress.finish_file(file)
            assert task.completed == sum(sizes[: number + 1])
        list(progress.count_tokens([EncodedDocument(b"", "", np.zeros(7), None)] * 2))
        progress.set_position(0)
        assert task.fields["rate"].startswith("14 tokens, ")
