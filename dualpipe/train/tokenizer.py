"""Text to token ids: bytes, or a `tokenizers` JSON file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")


class Tokenizer(Protocol):
    """What packing needs of a tokenizer.

    `identity` tells two tokenizers apart: data packed with one is not read as if it came from another.
    """

    vocab_size: int
    end_of_document: int
    identity: str

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of one document, without the end-of-document id."""
        ...


class ByteTokenizer:
    """One token per byte; the id after the last byte ends a document."""

    vocab_size = 257
    end_of_document = 256
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        """(len(text),) uint8."""
        return np.frombuffer(text, dtype=np.uint8)


class FileTokenizer:
    """A `tokenizers` JSON file. Documents must be UTF-8."""

    def __init__(self, path: str | Path, end_of_document: str | None = None) -> None:
        from tokenizers import Tokenizer as HubTokenizer

        content = _read(Path(path))
        try:
            self._tokenizer = HubTokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.end_of_document = self._end_id(path, end_of_document)
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()}:{self.end_of_document}"

    def _end_id(self, path: str | Path, name: str | None) -> int:
        for candidate in [name] if name else END_NAMES:
            token = self._tokenizer.token_to_id(candidate)
            if token is not None:
                return token
        what = f"no token {name!r}" if name else f"none of {', '.join(END_NAMES)}"
        raise ValueError(f"{path} has {what}; name its end-of-document token with --end-of-document")

    def encode(self, text: bytes) -> np.ndarray:
        """(tokens,) uint32."""
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error}); convert it, or use the tokenizer 'bytes'") from error
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, dtype=np.uint32)


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """`name` is "bytes" or the path of a `tokenizers` JSON file."""
    if name != "bytes":
        return FileTokenizer(name, end_of_document)
    if end_of_document is not None:
        raise ValueError(f"--end-of-document {end_of_document!r}: bytes have their own; leave it out, or give the "
                         "path of a tokenizer.json")
    return ByteTokenizer()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"cannot read the tokenizer {path}: {error.strerror}; give 'bytes' or the path of a tokenizer.json"
        raise ValueError(message) from error
