"""Files of text or records, and the documents in them.

A file is a document, or has one per record if its name has a suffix of `RECORD_FORMATS`.
"""

from __future__ import annotations

import os
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dualpipe.train.config.schema import STDLIB, TEXT_KEY
from dualpipe.train.data.chat import (
    FORM,
    MESSAGE_KEYS,
    SYSTEM_KEY,
    TOOLS_KEY,
    Conversation,
    conversion_hint,
    read_conversation,
)
from dualpipe.train.data.record_formats import (
    BYTE_ORDER_MARK,
    READ_ERRORS,
    ChooseKeys,
    NotText,
    RecordFormat,
    find_format,
    read_checked,
)

_Converted = TypeVar("_Converted")
DOCUMENTS = "documents.npy"  # a folder with this file is a packed directory
# Folders of the standard library to skip: third-party packages, tests, and tables that are data rather than code.
SKIPPED_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
_CHAT_REMEDY = "pack conversations with --chat or data.chat = true"


class Source(NamedTuple):
    """A file to pack.

    name: for messages, and for the order of documents.
    is_explicit: the caller named the file itself, not a folder: it must be text.
    """

    path: Path
    name: str
    is_explicit: bool = False


def find_sources(paths: Iterable[str | Path]) -> list[Source]:
    """Return all files under `paths`, in the order of the arguments and sorted within a directory.

    Skips hidden files and packed directories, such as earlier output next to its text. Follows links. Warns about links
    to nothing, and about links within a directory to what is read there already, such as the files that several
    snapshots of the Hugging Face cache share, or a folder that is linked from within itself.

    Args:
        paths: files, directories, or "stdlib" for the sources of Python's standard library, which every machine has.

    Raises:
        ValueError: a path is empty or does not exist, or a directory cannot be read.
    """
    sources: list[Source] = []
    for path in paths:
        if not str(path):
            raise ValueError("a path is empty; give files or directories of text, or . for the current directory")
        if path == STDLIB:
            sources += _walk(Path(sysconfig.get_path("stdlib")), SKIPPED_STDLIB, ".py")
        elif Path(path).is_file():
            sources.append(Source(Path(path), Path(path).name, is_explicit=True))
        elif Path(path).is_dir():
            sources += _walk(Path(path))
        else:
            raise ValueError(f"there is no file or directory {path}; give files or directories of text")
    return sources


def _walk(directory: Path, skipped: Iterable[str] = (), suffix: str = "") -> list[Source]:
    """Return the files under a directory whose names end with `suffix`, sorted.

    Args:
        skipped: names of folders to skip at any depth.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error

    def is_walked(root: str, folder: str) -> bool:
        return not folder.startswith(".") and folder not in skipped and not Path(root, folder, DOCUMENTS).exists()

    sources: dict[str, Source] = {}  # by the path without links
    linked: list[Source] = []
    left_out: dict[str, str] = {}
    visited = set()
    pending = [directory]  # linked folders come last, so that a file has its name without links if it has one
    for folder in pending:
        for root, folders, names in os.walk(folder, onerror=refuse):
            real_root = os.path.realpath(root)
            if real_root in visited:
                left_out[Path(root).relative_to(directory).as_posix()] = "a folder that is read already"
                folders.clear()
                continue
            visited.add(real_root)
            folders[:] = sorted(name for name in folders if is_walked(root, name))
            pending += [Path(root, name) for name in folders if Path(root, name).is_symlink()]
            for name in names:
                file = Path(root, name)
                if name.startswith(".") or not name.endswith(suffix):
                    continue
                shown = file.relative_to(directory).as_posix()
                if not file.is_file():
                    left_out[shown] = "a link to nothing" if file.is_symlink() else "no regular file"
                elif file.is_symlink():
                    linked.append(Source(file, shown))
                else:
                    sources[os.path.join(real_root, name)] = Source(file, shown)
    for source in sorted(linked, key=lambda source: source.name):
        if sources.setdefault(os.path.realpath(source.path), source) is not source:
            left_out[source.name] = "a file that is read already"
    if left_out:
        warnings.warn(f"{directory}: left out: {list_left_out(dict(sorted(left_out.items())))}", stacklevel=1)
    return sorted(sources.values(), key=lambda source: source.name)


def list_left_out(reasons: Mapping[str, str], limit: int = 10) -> str:
    """Return the number of files that are left out, and the first `limit` names with the reasons."""
    first = ", ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:limit])
    rest = len(reasons) - limit
    return f"{len(reasons)}: {first}{f' and {rest} more' if rest > 0 else ''}"


def read_documents(
    path: Path, text_key: str, on_position: Callable[[int], None] | None = None
) -> Iterator[tuple[bytes, str]]:
    """Yield the documents of a file, each with its place as error messages name it. Holds one piece in memory.

    Skips empty documents. Warns about the number of empty records.

    Args:
        path: the file.
        text_key: key of the text in a record.
        on_position: called after every record with the number of bytes of the file that are read.

    Raises:
        ValueError: the file cannot be read or is binary, or a record is not an object with a string under `text_key`.
            Names the file and the record, counted from 1 (in JSON lines: the line).
    """
    format = find_format(path)
    if format is None:
        text = read_checked(path).removeprefix(BYTE_ORDER_MARK)
        if text:
            yield text, str(path)
        return

    def choose_keys(keys: Collection[str]) -> list[str]:
        if text_key not in keys:
            raise ValueError(f"it has no {text_key!r}, but {_list_keys(keys)}; {_remedy_for_no_text(keys)}")
        return [text_key]

    def read_text(record: dict[str, Any]) -> bytes | None:
        value = record[text_key]
        if not isinstance(value, str):
            hint = f"; {_CHAT_REMEDY}" if isinstance(value, list) else ""
            raise ValueError(f"its {text_key!r} is not a string but of type {type(value).__name__}{hint}")
        return value.encode() or None

    yield from _convert_records(path, format, choose_keys, read_text, on_position)


def _list_keys(keys: Collection[str]) -> str:
    """Return the keys of a record as text."""
    return ", ".join(map(repr, keys)) or "nothing"


def _remedy_for_no_text(keys: Collection[str]) -> str:
    """Return the remedy for a record without the key of the text."""
    naming = "name the key of the text with --text-key or data.text_key"
    if any(key in keys for key in MESSAGE_KEYS):
        return f"{_CHAT_REMEDY}, or {naming}"
    conversion = conversion_hint(keys)
    return f"{naming}; for fine-tuning, {conversion}, and {_CHAT_REMEDY}" if conversion else naming


def read_conversations(
    path: Path, key: str = "", on_position: Callable[[int], None] | None = None, unread: set[str] | None = None
) -> Iterator[tuple[Conversation, str]]:
    """Yield the conversations of a file of records, each with its place as error messages name it.

    Skips empty records with a warning, as `read_documents` does.

    Args:
        path: the file.
        key: key of the messages in a record. "": the first of `MESSAGE_KEYS` with messages, or `TEXT_KEY` if the record
            has none of these keys.
        on_position: as in `read_documents`.
        unread: gets the keys of records that are not read.

    Raises:
        ValueError: as `read_documents` does.
    """
    format = find_format(path)
    assert format is not None, "`pack` refuses text as conversations"
    names = (key,) if key else MESSAGE_KEYS
    remedy = f"name the key of the messages with --text-key or data.text_key, or convert the records to {FORM}"
    no_messages = f"it has no {' or '.join(map(repr, names))}"

    def choose_keys(keys: Collection[str]) -> list[str]:
        present = [name for name in names if name in keys]
        hint = conversion_hint(keys)
        if not present and not key and TEXT_KEY in keys and not hint:
            present = [TEXT_KEY]
        if not present:
            raise ValueError(f"{no_messages}, but {_list_keys(keys)}; {hint or remedy}")
        chosen = [*present, *(name for name in (TOOLS_KEY, SYSTEM_KEY) if name in keys)]
        if unread is not None:
            unread.update(name for name in keys if name not in chosen)
        return chosen

    def read(record: dict[str, Any]) -> Conversation | None:
        present = [name for name in (*names, TEXT_KEY) if name in record]
        # All rows of a Parquet file have all of its columns, so that the first one may be empty.
        chosen = next((name for name in present if record[name]), present[0])
        if unread is not None:
            unread.update(name for name in present if name != chosen and record[name])
        if chosen not in names and not isinstance(record[chosen], list):
            raise ValueError(f"{no_messages}, and its {chosen!r} is not a list of messages but of type "
                             f"{type(record[chosen]).__name__}; {remedy}")
        return read_conversation(record, chosen, fills_nulls=format.fills_nulls)

    yield from _convert_records(path, format, choose_keys, read, on_position)


def _convert_records(
    path: Path, format: RecordFormat, choose_keys: ChooseKeys,
    convert: Callable[[dict[str, Any]], _Converted | None], on_position: Callable[[int], None] | None,
) -> Iterator[tuple[_Converted, str]]:
    """Yield the result of `convert` for every record, with the record's place. Skips records that convert to None.

    Args:
        path: the file.
        format: its format.
        choose_keys: chooses the keys of a record to read.
        convert: takes the values of a record by key, in the order of `choose_keys`; may raise ValueError.
        on_position: as in `read_documents`.
    """
    number = 1
    num_empty = 0
    first_empty = 0
    try:
        for record, position in format.read(path, choose_keys):
            converted = convert(record) if record else None
            if converted is not None:
                yield converted, f"record {number} of {path}"
            else:
                num_empty += 1
                first_empty = first_empty or number
            number += 1
            if on_position is not None:
                on_position(position)
    except NotText:
        raise
    except READ_ERRORS as error:
        raise ValueError(f"cannot read record {number} of {path}: {error}") from error
    if num_empty:
        warnings.warn(f"{path}: empty records are skipped: {num_empty}, the first is record {first_empty}",
                      stacklevel=1)
