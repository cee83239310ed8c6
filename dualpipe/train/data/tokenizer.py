"""Tokenizers of texts and of conversations: one token per byte, or those of a model, loaded by transformers.

The `identity` of a tokenizer is recorded in packed data, so that data of one tokenizer is not read as data of another:

    bytes                       one token per byte
    sha256:HASH:END             the tokenizer of a model with this hash; the id END ends documents
    sha256:HASH:chat-TEMPLATE   the same tokenizer, with a chat template of the hash TEMPLATE
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from dualpipe.runtime.files import checksum_of
from dualpipe.train.config.schema import BYTES, TOKENIZER, TOKENIZER_CONFIG
from dualpipe.train.data.chat import ChatTemplate, Conversation, UnreadKeys, find_spans

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as HubTokenizer
    from transformers import PreTrainedTokenizerFast

Document: TypeAlias = bytes | Conversation

# End-of-document tokens of common vocabularies. One is used if a vocabulary has no other of them, and nothing names an
# end.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
_SETTINGS = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")  # files with tokens beside TOKENIZER
_LISTED_END_TOKENS = ", ".join(END_TOKENS)


class PreparedText(NamedTuple):
    """Text of a document, ready to encode.

    text: the text.
    spans: bounds, in characters, of the parts that count for the loss. None: all of it counts.
    """

    text: str
    spans: list[tuple[int, int]] | None = None


class ByteTokenizer:
    """One token per byte. The id after the last byte ends a document."""

    vocab_size = 257
    end_of_document = 256
    end_token = ""
    identity = "bytes"
    file_checksum = ""

    def encode(self, document: Document) -> np.ndarray:
        """Return the ids of a document without its end, uint8 (len(document),)."""
        assert isinstance(document, bytes), "conversations need a chat tokenizer"
        return np.frombuffer(document, dtype=np.uint8)


class FileTokenizer:
    """The tokenizer of a model, for text.

    Attributes:
        vocab_size: of the tokenizer.
        end_token: name of the token that ends a document.
        end_of_document: its id.
        identity: hash of the tokenizer, and `end_of_document`.
        file_checksum: as in `LoadedTokenizer`.

    Args:
        name: as in `read_tokenizer`.
        end_token: name of the token that ends a document. "": the tokenizer's eos_token, or else that of the files
            beside it, or else the only one of `END_TOKENS` in the vocabulary.

    Raises:
        ValueError: the tokenizer cannot be read, or does not have the token, or it is not clear which one it is.
    """

    def __init__(self, name: str | Path, end_token: str = "") -> None:
        tokenizer = read_tokenizer(name)
        self._backend = tokenizer.backend
        self.vocab_size = tokenizer.vocab_size
        self.file_checksum = tokenizer.file_checksum
        self.end_token = end_token or _choose_end(tokenizer)
        end_id = self._backend.token_to_id(self.end_token)
        if end_id is None:
            raise ValueError(f"{tokenizer.path} has no token {self.end_token!r}; name the token that ends a document "
                             "with data.end_token or --end-of-document")
        self.end_of_document: int = end_id
        self.identity = f"{tokenizer.identity}:{end_id}"
        if tokenizer.begins:
            warnings.warn(f"{tokenizer.path} begins texts with {' '.join(tokenizer.begins)}; documents are packed "
                          "without it", stacklevel=1)

    def prepare(self, document: Document) -> PreparedText:
        """Return the text of a document. Raises ValueError unless it is UTF-8."""
        assert isinstance(document, bytes), "conversations need a chat tokenizer"
        try:
            return PreparedText(document.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error}); convert it, or use the tokenizer 'bytes'") from error

    def encode_texts(self, texts: Sequence[PreparedText]) -> list[Encoding]:
        """Return the encodings of texts, without the ends of documents, in parallel."""
        return self._backend.encode_batch_fast([text.text for text in texts], add_special_tokens=False)

    def convert(self, text: PreparedText, encoding: Encoding) -> tuple[np.ndarray, None]:
        """Return the tokens in an encoding, uint32 (N,), and None: all of them count for the loss."""
        return _token_ids(encoding), None


def _choose_end(tokenizer: LoadedTokenizer) -> str:
    """Return the name of the token that ends a document. Raises ValueError if it is not clear.

    It is the tokenizer's eos_token; without one, the eos_token_id of the model beside it; without that, the only one of
    `END_TOKENS` in the vocabulary that does not begin texts.
    """
    model = tokenizer.model
    if model is not None and model.eos_token is not None:
        return str(model.eos_token)
    begin = None if model is None else model.bos_token
    lack = "the settings of a model, with an eos_token" if model is None else "eos_token"
    stated = [tokenizer.backend.id_to_token(number) for number in _read_end_ids(tokenizer.path)]
    candidates = [name for name in stated if name is not None]
    if candidates:
        has = f"its model ends texts with {' and '.join(candidates)}"
    else:
        present = [name for name in END_TOKENS if tokenizer.backend.token_to_id(name) is not None]
        candidates = [name for name in present if name != begin]
        has = f"its vocabulary has {' and '.join(candidates) or f'none of {_LISTED_END_TOKENS}'}"
        if begin in present:
            has += f", besides {begin}, which begins texts"
    if len(candidates) == 1:
        return candidates[0]
    raise ValueError(f"{tokenizer.path} has no {lack}, and {has}; name the token that ends a document with "
                     "data.end_token or --end-of-document")


def _read_end_ids(path: Path) -> list[int]:
    """Return the ids of the tokens that end texts by the files of a model in a directory; [] if they name none."""
    for name in ("generation_config.json", "config.json"):
        try:
            ids = json.loads((path / name).read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        numbers = ids if isinstance(ids, list) else [ids]
        if all(type(number) is int for number in numbers):
            return numbers
    return []


class ChatTokenizer:
    """The tokenizer of a model with a chat template. Conversations have no end-of-document token.

    Attributes:
        vocab_size: of the tokenizer.
        identity: hash of the tokenizer and its template.
        file_checksum: as in `LoadedTokenizer`.

    Args:
        name: as in `read_tokenizer`.
        template: path of a file with a chat template. "": that of the tokenizer.

    Raises:
        ValueError: a file cannot be read, there is no chat template, or transformers is missing.
    """

    def __init__(self, name: str, template: str = "") -> None:
        if name == BYTES:
            raise ValueError("the tokenizer 'bytes' has no chat template; give the directory of a model's tokenizer")
        tokenizer = read_tokenizer(name, needs_model=True)
        assert tokenizer.model is not None, "loaded by transformers"
        self._backend = tokenizer.backend
        self._template = ChatTemplate(tokenizer.model, template)
        self._unread = UnreadKeys(self._template)
        added = self._backend.get_added_tokens_decoder().values()
        self._special = tuple(token.content for token in added if token.special)
        self.vocab_size = tokenizer.vocab_size
        self.file_checksum = tokenizer.file_checksum
        template_hash = hashlib.sha256(self._template.content).hexdigest()[:16]
        self.identity = f"{tokenizer.identity}:chat-{template_hash}"

    def prepare(self, document: Document) -> PreparedText:
        """Return a conversation as text, with the assistant's turns.

        Raises ValueError as `find_spans` does, or if the text is not Unicode.
        """
        assert isinstance(document, Conversation), "text needs another tokenizer than a chat tokenizer"
        text, spans = find_spans(self._template, document, self._special)
        self._unread.check(document)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it has {text[error.start]!r}, one half of a character that JSON writes as a pair of "
                             "escapes; repair the record or leave it out") from error
        return PreparedText(text, spans)

    def encode_texts(self, texts: Sequence[PreparedText]) -> list[Encoding]:
        """Return the encodings of texts, with offsets, in parallel."""
        return self._backend.encode_batch([text.text for text in texts], add_special_tokens=False)

    def convert(self, text: PreparedText, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens in an encoding, uint32 (N,), and their loss mask, bool (N,): True for those that count.

        The first token never counts, because nothing predicts it.
        """
        assert text.spans is not None, "`prepare` finds the spans"
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(begins), dtype=bool)
        for begin, end in text.spans:  # a token counts if any of its characters is the assistant's
            loss_mask |= (begins < end) & (ends > begin) & (begins < ends)
        loss_mask[:1] = False
        return _token_ids(encoding), loss_mask


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer | ChatTokenizer


def load_tokenizer(name: str, end_token: str = "", *, chat: bool = False, chat_template: str = "") -> Tokenizer:
    """Load a tokenizer for text, or for conversations.

    Args:
        name: "bytes", or as in `read_tokenizer`.
        end_token: for text, as in `FileTokenizer`.
        chat: load it for conversations.
        chat_template: for conversations, as in `ChatTokenizer`.

    Raises:
        ValueError: as `FileTokenizer` and `ChatTokenizer` do, or `end_token` is given for bytes.
    """
    if chat:
        return ChatTokenizer(name, chat_template)
    if name != BYTES:
        return FileTokenizer(name, end_token)
    if end_token:
        raise ValueError(f"the end token {end_token!r}: the tokenizer 'bytes' has an end-of-document id of its own; "
                         "leave it out, or give the tokenizer of a model")
    return ByteTokenizer()


class LoadedTokenizer(NamedTuple):
    """A tokenizer of a model.

    path: the directory or the file.
    backend: encodes text, on all cores.
    identity: hash of all that the tokens of a text depend on.
    file_checksum: SHA-256 of the tokenizer.json; "" if there is none.
    vocab_size: of the tokenizer, with the tokens that were added to it.
    begins: tokens that the tokenizer puts before a text unless told not to, such as ["<s>"].
    model: the tokenizer of transformers. None: read from a file by `tokenizers` alone.
    """

    path: Path
    backend: HubTokenizer
    identity: str
    file_checksum: str
    vocab_size: int
    begins: list[str]
    model: PreTrainedTokenizerFast | None


def read_tokenizer(name: str | Path, *, needs_model: bool = False) -> LoadedTokenizer:
    """Read the tokenizer of a model.

    Args:
        name: a directory, which transformers loads; or a tokenizer.json, which stands for its directory if that has
            more of the tokenizer's settings, and otherwise is read by `tokenizers` alone.
        needs_model: load the file by transformers as well.

    Raises:
        ValueError: the tokenizer cannot be read, or transformers is missing.
    """
    from tokenizers.processors import ByteLevel

    path = Path(name)
    if path.name == TOKENIZER and any((path.parent / name).is_file() for name in _SETTINGS):
        path = path.parent
    model = None
    if path.is_dir() or needs_model:
        model = _load_model_tokenizer(path)
        backend = model.backend_tokenizer
    else:
        backend = _read_file(path)
    backend.no_truncation()  # a file may hold the settings of whoever saved it
    backend.no_padding()
    begins = backend.encode("").tokens
    # The file's own post-processor adds these tokens, which are not wanted, and may cut white space off the offsets,
    # which the loss mask of conversations needs.
    backend.post_processor = ByteLevel(trim_offsets=False)
    identity = f"sha256:{hashlib.sha256(backend.to_str().encode()).hexdigest()}"
    vocab_size = max(backend.get_vocab().values(), default=-1) + 1
    file = path / TOKENIZER if path.is_dir() else path
    file_checksum = checksum_of(file, "sha256") if file.is_file() else ""
    return LoadedTokenizer(path, backend, identity, file_checksum, vocab_size, begins, model)


def _load_model_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer by transformers, from a directory or a file. Raises ValueError."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(f"the tokenizer {path} needs transformers: pip install 'dualpipe[hf]'") from error
    if not path.exists():
        raise ValueError(f"there is no tokenizer {path}; give 'bytes' or the directory of a model's tokenizer")
    try:
        if path.is_dir():  # its code is not run, and nothing is downloaded
            model = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        else:
            model = PreTrainedTokenizerFast(tokenizer_file=str(path), name_or_path=str(path))
    except Exception as error:  # of any kind, for files that are missing or damaged
        problem = " ".join(str(error).split())
        raise ValueError(f"transformers cannot load the tokenizer in {path} ({problem}); give 'bytes', the directory "
                         "of a model's tokenizer or the path of a tokenizer.json") from error
    if not isinstance(model, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer in {path} is a {type(model).__name__}, which runs in Python; expected one of "
                         "the package tokenizers: save it with a tokenizer.json")
    # Without files, transformers makes an empty tokenizer of the model's class.
    names = (TOKENIZER, "tekken.json", *model.vocab_files_names.values())
    if path.is_dir() and not any(path.glob("*.model")) and not any((path / name).is_file() for name in names):
        raise ValueError(f"there is no vocabulary in {path}; give a directory with a tokenizer.json or a "
                         "tokenizer.model")
    return model


def _read_file(path: Path) -> HubTokenizer:
    """Return the tokenizer in a `tokenizers` JSON file. Raises ValueError."""
    from tokenizers import Tokenizer as HubTokenizer

    try:
        return HubTokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}; give 'bytes', the directory of a "
                         "model's tokenizer or the path of a tokenizer.json") from error
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error


def _token_ids(encoding: Encoding) -> np.ndarray:
    """Return the ids in an encoding, uint32 (N,)."""
    return np.fromiter(encoding.ids, np.uint32, len(encoding))
