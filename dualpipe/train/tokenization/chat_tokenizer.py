"""Tokenize conversations, with a loss mask that selects the assistant's tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dualpipe.train.chat.messages import Conversation
from dualpipe.train.chat.spans import UnreadKeys, find_spans
from dualpipe.train.chat.template import ChatTemplate
from dualpipe.train.config.schema import BYTES
from dualpipe.train.tokenization.tokenizer import Document, MaskedTokens, PreparedText, read_tokenizer, token_ids

if TYPE_CHECKING:
    from tokenizers import Encoding


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

    def convert(self, text: PreparedText, encoding: Encoding) -> MaskedTokens:
        """Return the tokens in an encoding with their loss mask. The first token never counts: nothing predicts it."""
        assert text.spans is not None, "`prepare` finds the spans"
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(begins), dtype=bool)
        for begin, end in text.spans:  # a token counts if any of its characters is the assistant's
            loss_mask |= (begins < end) & (ends > begin) & (begins < ends)
        loss_mask[:1] = False
        return MaskedTokens(token_ids(encoding), loss_mask)

    def encode(self, conversation: Conversation) -> MaskedTokens:
        """Return the tokens of one conversation with their loss mask. Raises ValueError as `find_spans` does."""
        text = self.prepare(conversation)
        return self.convert(text, self.encode_texts([text])[0])
