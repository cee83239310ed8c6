"""Tokenize conversations, with a loss mask that selects the assistant's tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dualpipe.train.chat.messages import Conversation
from dualpipe.train.chat.spans import find_spans
from dualpipe.train.chat.template import find_template
from dualpipe.train.config.schema import BYTES, TOKENIZER
from dualpipe.train.tokenization.tokenizer import (
    Document,
    MaskedTokens,
    PreparedText,
    read_tokenizer_file,
    token_ids,
)

if TYPE_CHECKING:
    from tokenizers import Encoding


class ChatTokenizer:
    """A `tokenizers` JSON file with a chat template. Conversations have no end-of-document token.

    Attributes:
        vocab_size: of the tokenizer.
        identity: hash of the tokenizer and its template.

    Args:
        name: path of a tokenizer.json, or of a directory with one.
        template: path of a file with a chat template. "": the template in the directory of the tokenizer.

    Raises:
        ValueError: a file cannot be read, or there is no chat template.
    """

    def __init__(self, name: str, template: str = "") -> None:
        from tokenizers.processors import ByteLevel

        if name == BYTES:
            raise ValueError("the tokenizer 'bytes' has no chat template; give the directory of a model's tokenizer")
        path = Path(name, TOKENIZER) if Path(name).is_dir() else Path(name)
        self._tokenizer, content = read_tokenizer_file(path)
        # The file's own post-processor may cut white space off the offsets, and the loss mask needs those characters.
        # It would change nothing else: special tokens come from the template.
        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)
        self._template = find_template(path.parent, template)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = tuple(token.content for token in added if token.special)
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        template_hash = hashlib.sha256(self._template.content).hexdigest()[:16]
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()}:chat-{template_hash}"

    def prepare(self, document: Document) -> PreparedText:
        """Return a conversation as text, with the assistant's turns.

        Raises ValueError as `find_spans` does, or if the text is not Unicode.
        """
        assert isinstance(document, Conversation), "text needs another tokenizer than a chat tokenizer"
        text, spans = find_spans(self._template, document, self._special)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it has {text[error.start]!r}, one half of a character that JSON writes as a pair of "
                             "escapes; repair the record or leave it out") from error
        return PreparedText(text, spans)

    def encode_texts(self, texts: Sequence[PreparedText]) -> list[Encoding]:
        """Return the encodings of texts, with offsets, in parallel."""
        return self._tokenizer.encode_batch([text.text for text in texts], add_special_tokens=False)

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
