"""Tokenizers of documents: one token per byte, or a `tokenizers` JSON file.

The `identity` of a tokenizer is recorded in packed data, so that data of one tokenizer is not read as data of another.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dualpipe.train.config.schema import BYTES, TOKENIZER

# End-of-document tokens of common vocabularies: the first of them that a vocabulary has is used.
END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]",
)


class ByteTokenizer:
    """One token per byte. The id after the last byte ends a document."""

    vocab_size = 257
    end_of_document = 256
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a document without its end, uint8 (len(text),)."""
        return np.frombuffer(text, dtype=np.uint8)


class FileTokenizer:
    """A `tokenizers` JSON file.

    Args:
        path: the file.
        end_of_document: name of the token that ends a document. None: the first of `END_OF_DOCUMENT_NAMES` in the
            vocabulary.

    Raises:
        ValueError: the file cannot be read, or has no end-of-document token.
    """

    def __init__(self, path: str | Path, end_of_document: str | None = None) -> None:
        from tokenizers import Tokenizer as HubTokenizer

        try:
            content = Path(path).read_bytes()
            self._tokenizer = HubTokenizer.from_str(content.decode("utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}; give 'bytes' or the path of a "
                             "tokenizer.json, or of a directory with one") from error
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error
        names = [end_of_document] if end_of_document else END_OF_DOCUMENT_NAMES
        end_ids = [self._tokenizer.token_to_id(name) for name in names]
        end_id = next((token_id for token_id in end_ids if token_id is not None), None)
        if end_id is None:
            missing = f"no token {end_of_document!r}" if end_of_document else f"none of {', '.join(names)}"
            raise ValueError(f"{path} has {missing}; name its end-of-document token with `dualpipe data pack "
                             "--end-of-document`")
        self.end_of_document = end_id
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()}:{end_id}"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a document without its end, uint32 (num_tokens,). Raises ValueError unless it is UTF-8."""
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error}); convert it, or use the tokenizer 'bytes'") from error
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, dtype=np.uint32)


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: "bytes", or the path of a `tokenizers` JSON file or of a directory with a tokenizer.json.
        end_of_document: as in `FileTokenizer`.

    Raises:
        ValueError: as `FileTokenizer` does, or `end_of_document` is given for bytes.
    """
    if name != BYTES:
        path = Path(name, TOKENIZER) if Path(name).is_dir() else name
        return FileTokenizer(path, end_of_document)
    if end_of_document is not None:
        raise ValueError(f"--end-of-document {end_of_document!r}: the tokenizer 'bytes' has an end-of-document id of "
                         "its own; leave it out, or give the path of a tokenizer.json")
    return ByteTokenizer()
