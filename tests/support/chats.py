"""A small tokenizer with chat templates, and conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualpipe.train.data.chat import Conversation
    from dualpipe.train.data.pack import EncodedDocument
    from dualpipe.train.data.tokenizer import ChatTokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (  # the same text, with the assistant's part marked, up to the end of its turn
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (  # renders reasoning of the last turn alone, as Qwen3 does
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_chat_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Write a tokenizer of bytes and a few merges, with a template or without; return the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "he"), ("a", "n")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                                "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def encode(tokenizer: ChatTokenizer, conversation: Conversation) -> EncodedDocument:
    """Return a conversation with its tokens and its loss mask."""
    from dualpipe.train.data.pack import encode_documents

    (encoded,) = encode_documents([(conversation, "a conversation")], tokenizer)
    return encoded


def turns(*texts: str, system: str | None = None, role: str = "user") -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn. role: the first one's."""
    roles = ["user", "assistant"] if role == "user" else ["assistant", "user"]
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def random_chats(count: int, seed: int = 0, words: int = 8) -> list[list[dict[str, str]]]:
    """Conversations of one to three rounds, with texts of 1 to `words` words."""
    rng = random.Random(seed)

    def text() -> str:
        vocabulary = ["hello", "the", "an", "answer", "of", "one", "question", "is", "no", "yes", "héé", "42"]
        return " ".join(rng.choice(vocabulary) for _ in range(rng.randint(1, words)))

    return [turns(*(text() for _ in range(2 * rng.randint(1, 3)))) for _ in range(count)]


def write_chats(path: Path, chats: list[list[dict[str, str]]]) -> Path:
    """Write conversations as JSON lines."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return path
