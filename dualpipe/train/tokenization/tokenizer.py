"""Tokenizers of documents: one token per byte, or a `tokenizers` JSON file.

The `identity` of a tokenizer is recorded in packed data, so that data of one tokenizer is not read as data of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from dualpipe.train.chat.messages import Conversation
from dualpipe.train.config.schema import BYTES, TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as HubTokenizer

Document: TypeAlias = bytes | Conversation

# End-of-document tokens of common vocabularies: the first of them that a vocabulary has is used.
END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]",
)


class PreparedText(NamedTuple):
    """Text of a document, ready to encode.

    text: the text.
    spans: bounds, in characters, of the parts that count for the loss. None: all of it counts.
    """

    text: str
    spans: list[tuple[int, int]] | None = None


class MaskedTokens(NamedTuple):
    """Tokens of a document.

    tokens: (N,) uint32.
    loss_mask: (N,) bool, True for tokens that count for the loss. None: all do.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None


class ByteTokenizer:
    """One token per byte. The id after the last byte ends a document."""

    vocab_size = 257
    end_of_document = 256
    identity = "bytes"

    def encode(self, document: Document) -> np.ndarray:
        """Return the ids of a document without its end, uint8 (len(document),)."""
        assert isinstance(document, bytes), "conversations need a chat tokenizer"
        return np.frombuffer(document, dtype=np.uint8)


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
        self._tokenizer, content = read_tokenizer_file(path)
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

    def prepare(self, document: Document) -> PreparedText:
        """Return the text of a document. Raises ValueError unless it is UTF-8."""
        assert isinstance(document, bytes), "conversations need a chat tokenizer"
        try:
            return PreparedText(document.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error}); convert it, or use the tokenizer 'bytes'") from error

    def encode_texts(self, texts: Sequence[PreparedText]) -> list[Encoding]:
        """Return the encodings of texts, without the ends of documents, in parallel."""
        return self._tokenizer.encode_batch_fast([text.text for text in texts], add_special_tokens=False)

    def convert(self, text: PreparedText, encoding: Encoding) -> MaskedTokens:
        """Return the tokens in an encoding."""
        return MaskedTokens(token_ids(encoding), None)


def read_tokenizer_file(path: str | Path) -> tuple[HubTokenizer, bytes]:
    """Return the tokenizer in a `tokenizers` JSON file, and the content of the file. Raises ValueError."""
    from tokenizers import Tokenizer as HubTokenizer

    try:
        content = Path(path).read_bytes()
        tokenizer = HubTokenizer.from_str(content.decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}; give 'bytes' or the path of a "
                         "tokenizer.json, or of a directory with one") from error
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error
    tokenizer.no_truncation()  # a file may hold the settings of whoever saved it
    tokenizer.no_padding()
    return tokenizer, content


def token_ids(encoding: Encoding) -> np.ndarray:
    """Return the ids in an encoding, uint32 (N,)."""
    return np.fromiter(encoding.ids, np.uint32, len(encoding))


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
