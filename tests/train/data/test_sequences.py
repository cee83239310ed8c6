"""Windows of text and of conversations, and the batches that are read from them."""

import json

import numpy as np
import pytest
import torch

from chats import CHATML, encode, random_chats, save_chat_tokenizer, turns, write_chats
from dualpipe.train.data.chat import Conversation
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.pack import pack
from dualpipe.train.data.sequences import TextWindows, choose_evaluation_windows, cut_documents, find_windows
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.splits import split_documents
from dualpipe.train.data.token_stream import NO_TARGET, PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ChatTokenizer


@pytest.fixture
def packed(tmp_path):
    """(stream, encoded conversations) of random ones in several shards, with a long one among them."""

    def make(chats, template=CHATML, shard_tokens=300):
        tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path / "tokenizer", template)))
        file = write_chats(tmp_path / "chats.jsonl", chats)
        pack(find_sources([file]), tokenizer, tmp_path / "packed-chats", shard_tokens=shard_tokens, overwrite=True)
        encoded = [encode(tokenizer, Conversation(chat)) for chat in chats]
        return TokenStream(PackedTokens(tmp_path / "packed-chats")), encoded

    return make


def test_the_example_in_the_text():
    starts, stops = cut_documents(np.array([0, 3, 7, 13, 23]), 8)
    assert list(zip(starts, stops)) == [(0, 7), (7, 13), (13, 21), (20, 23)]


def test_every_token_that_counts_is_a_target_once_with_its_conversation_from_its_beginning(packed):
    chats = [*random_chats(30), turns("a question", "long answer " * 30), *random_chats(30, seed=1)]
    stream, encoded = packed(chats)
    loader = Loader(stream, sequence_length=150, batch_size=1, seed=0, separate_documents=True)
    assert len(stream.packed.shards) > 3 and loader.num_left_out == 0
    found = []
    for step in range(loader.num_windows):
        tokens, targets, positions = (tensor[0].tolist() for tensor in loader.batch(step))
        for place, target in enumerate(targets):
            if target != NO_TARGET:
                found.append((tuple(tokens[place - positions[place] : place + 1]), target))
    expected = []
    for tokens, counts in ((each.tokens.tolist(), each.loss_mask) for each in encoded):
        for place in np.flatnonzero(counts).tolist():
            start = (place - 1) // 150 * 150  # of what is in one window of a conversation that is longer
            expected.append((tuple(tokens[start:place]), tokens[place]))
    assert max(len(each.tokens) for each in encoded) > 300, "one is longer than two windows"
    assert sorted(found) == sorted(expected)


def test_windows_without_targets_are_left_out(packed):
    """The assistant's answer lies in the last of several windows of its conversation."""
    stream, _ = packed([turns("long question " * 19, "yes")])
    windows = find_windows(stream, 51)
    loader = Loader(stream, sequence_length=50, batch_size=2, seed=0)
    assert windows.num_windows == loader.num_windows == 1 and windows.num_left_out == loader.num_left_out > 3
    targets = loader.batch(0).targets
    assert (targets != NO_TARGET).sum(1).tolist() == [4, 4], "each epoch has one window"


def test_a_window_at_the_end_is_filled_from_the_beginning(packed):
    stream, encoded = packed([turns("aaaa", "bbbb"), turns("c", "d")])
    size = len(encoded[0].tokens) + 5
    batch = stream.read_windows(*[np.array([len(encoded[0].tokens)])], size, stops=np.array([stream.num_tokens]),
                                separate_documents=True)
    row = [*encoded[1].tokens.tolist(), *encoded[0].tokens.tolist()][: size - 1]
    assert batch.tokens.tolist() == [row]
    length = len(encoded[1].tokens)
    assert batch.positions.tolist() == [[*range(length), *range(size - 1 - length)]]
    assert (batch.targets[0, length - 1 :] == NO_TARGET).all() and (batch.targets != NO_TARGET).sum() == 2


def test_text_has_the_windows_that_it_had(many):
    stream = TokenStream(PackedTokens(many))
    assert find_windows(stream, 11) == TextWindows(11, stream.num_tokens // 11)
    assert stream.read_mask(0, 5).all() and not stream.has_loss_mask


def test_evaluation_reads_each_conversation_once_or_spreads_over_them(packed):
    stream, encoded = packed(random_chats(40))
    windows = find_windows(stream, 201)
    batch_size = windows.num_windows + 3
    (span,) = choose_evaluation_windows(stream, sequence_length=200, batch_size=batch_size, limit=9)
    targets = stream.read_windows(span.starts, 201, stops=span.stops).targets
    counts = (targets != NO_TARGET).sum(1)
    assert counts[-3:].tolist() == [0, 0, 0] and counts[:-3].min() > 0
    assert counts.sum() == sum(each.loss_mask.sum() for each in encoded)
    batches = choose_evaluation_windows(stream, sequence_length=200, batch_size=3, limit=2, rows=range(1, 3))
    assert [len(batch.starts) for batch in batches] == [2, 2]
    assert batches[-1].starts[-1] == windows.starts[-1]


def test_a_split_within_conversations(packed):
    stream, encoded = packed(random_chats(5))
    splits = split_documents(stream.packed, 1e-9, at_least=100)
    assert splits.validation.num_tokens == 100 and splits.validation.document_bounds()[0] == 0
    whole = np.concatenate([each.loss_mask for each in encoded])
    assert (splits.validation.read_mask(0, 100) == whole[-100:]).all()
    assert (splits.train.read_mask(0, splits.train.num_tokens) == whole[:-100]).all()
    assert splits.unigram_loss(266) > 0


def test_loaders_of_text_and_conversations_do_not_go_on_from_each_other(packed, many):
    stream, _ = packed(random_chats(20))
    sizes = dict(sequence_length=100, batch_size=2, seed=0)
    state = json.loads(json.dumps(Loader(stream, **sizes).state_dict()))
    Loader(stream, **sizes).load_state_dict(state | {"step": 3})
    del state["windows"]
    with pytest.raises(ValueError, match=r"windows None \(now 'whole conversations 1'\)"):
        Loader(stream, **sizes).load_state_dict(state)
    assert "windows" not in Loader(TokenStream(PackedTokens(many)), **sizes).state_dict()


def test_batches_are_parts_of_the_global_batch(packed):
    stream, _ = packed(random_chats(40))
    sizes = dict(sequence_length=100, batch_size=4, seed=3, separate_documents=True)
    whole = Loader(stream, **sizes).batch(2)
    columns = torch.tensor([0, 5, 99])
    part = Loader(stream, **sizes, rows=range(1, 3), columns=columns).batch(2)
    assert torch.equal(part.tokens, whole.tokens[1:3, columns])
    assert torch.equal(part.targets, whole.targets[1:3, columns])
    assert torch.equal(part.positions, whole.positions[1:3])
