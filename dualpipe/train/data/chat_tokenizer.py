"""Tokenize conversations, with a loss mask that selects the assistant's tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualpipe.train.chat.messages import Conversation
from dualpipe.train.chat.spans import find_spans
from dualpipe.train.chat.template import find_template
from dualpipe.train.config.schema import BYTES, TOKENIZER
from dualpipe.train.data.tokenizer import read_tokenizer_file


class MaskedTokens(NamedTuple):
    """Tokens of a document.

    tokens: (N,) uint32.
    loss_mask: (N,) bool, True for tokens that count for the loss. Never the first one: nothing predicts it.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray


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
        if name == BYTES:
            raise ValueError("the tokenizer 'bytes' has no chat template; give the directory of a model's tokenizer")
        path = Path(name, TOKENIZER) if Path(name).is_dir() else Path(name)
        self._tokenizer, content = read_tokenizer_file(path)
        self._template = find_template(path.parent, template)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = tuple(token.content for token in added if token.special)
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        template_hash = hashlib.sha256(self._template.content).hexdigest()[:16]
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()}:chat-{template_hash}"

    def encode(self, conversation: Conversation) -> MaskedTokens:
        """Return the tokens of a conversation with their loss mask. Raises ValueError as `find_spans` does."""
        text, spans = find_spans(self._template, conversation, self._special)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(begins), dtype=bool)
        for begin, end in spans:  # a token counts if any of its characters is the assistant's
            loss_mask |= (begins < end) & (ends > begin) & (begins < ends)
        loss_mask[:1] = False
        return MaskedTokens(np.asarray(encoding.ids, dtype=np.uint32), loss_mask)
