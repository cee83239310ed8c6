"""Windows of text and of conversations, the batches that are read from them, and their random order."""

import itertools
import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from chats import CHATML, encode, random_chats, save_chat_tokenizer, turns, write_chats
from dualpipe.train.data.chat import Conversation
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.pack import pack
from dualpipe.train.data.sequences import TextWindows, choose_evaluation_windows, cut_documents, find_windows, shuffle
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.splits import split_documents
from dualpipe.train.data.token_stream import NO_TARGET, PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ByteTokenizer, ChatTokenizer


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
    loader = Loader([stream], sequence_length=150, batch_size=1, seed=0, separate_documents=True)
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


def test_only_what_the_assistant_says_is_a_target_in_any_window(packed):
    stream, (encoded,) = packed([turns("a question", "an answer")])
    size = len(encoded.tokens)
    targets = stream.read_windows(np.array([0]), size).targets[0]
    assert targets.tolist() == np.where(encoded.loss_mask, encoded.tokens.astype(np.int64), NO_TARGET)[1:].tolist()
    assert (targets == NO_TARGET).any() and (targets != NO_TARGET).any()


def test_a_conversation_without_targets_is_left_out_and_the_next_one_is_not(packed):
    with pytest.warns(UserWarning, match="1 of the conversations"):
        stream, encoded = packed([turns("alone"), turns("a", "b")])
    assert stream.read(0, stream.num_tokens).tolist() == encoded[1].tokens.tolist()


def test_windows_without_targets_are_left_out(packed):
    """The assistant's answer lies in the last of several windows of its conversation."""
    stream, _ = packed([turns("long question " * 19, "yes")])
    windows = find_windows(stream, 51)
    loader = Loader([stream], sequence_length=50, batch_size=2, seed=0)
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
    state = json.loads(json.dumps(Loader([stream], **sizes).state_dict()))
    Loader([stream], **sizes).load_state_dict(state | {"step": 3})
    del state["windows"]
    with pytest.raises(ValueError, match=r"windows None \(now 'whole conversations 1'\)"):
        Loader([stream], **sizes).load_state_dict(state)
    assert "windows" not in Loader([TokenStream(PackedTokens(many))], **sizes).state_dict()


def test_batches_are_parts_of_the_global_batch(packed):
    stream, _ = packed(random_chats(40))
    sizes = dict(sequence_length=100, batch_size=4, seed=3, separate_documents=True)
    whole = Loader([stream], **sizes).batch(2)
    columns = torch.tensor([0, 5, 99])
    part = Loader([stream], **sizes, rows=range(1, 3), columns=columns).batch(2)
    assert torch.equal(part.tokens, whole.tokens[1:3, columns])
    assert torch.equal(part.targets, whole.targets[1:3, columns])
    assert torch.equal(part.positions, whole.positions[1:3])


def starts_of(batches):
    """Return the first tokens of the windows of batches of text."""
    assert all(span.stops is None for span in batches)
    return [span.starts.tolist() for span in batches]


def test_evaluation_windows_of_a_short_text_overlap(tmp_path):
    (tmp_path / "short.txt").write_text("0123456789" * 200)
    pack(find_sources([tmp_path / "short.txt"]), ByteTokenizer(), tmp_path / "out")
    _, validation = split_documents(PackedTokens(tmp_path / "out"), 0.02)  # 40 of 2001 tokens
    sizes = dict(sequence_length=16, batch_size=4, limit=8)
    (starts,) = starts_of(choose_evaluation_windows(validation, **sizes))
    assert starts == [0, 7, 15, 23], "from the first token to the last"
    assert starts_of(choose_evaluation_windows(validation, **sizes, rows=range(1, 3))) == [[7, 15]]
    batch = validation.read_windows(starts, 17)
    assert batch.targets[-1, -1] == ByteTokenizer.end_of_document
    assert batch.tokens[1].tolist() == validation.read(7, 23).tolist()
    assert starts_of(choose_evaluation_windows(validation, sequence_length=39, batch_size=1, limit=8)) == [[0]]
    with pytest.raises(ValueError, match=r"the validation text has 40 tokens, but a sequence needs "
                       r"train.sequence_length \+ 1 = 41; give more text .* set train.eval_batches = 0"):
        choose_evaluation_windows(validation, sequence_length=40, batch_size=4, limit=8)
    assert choose_evaluation_windows(validation, sequence_length=40, batch_size=4, limit=0) == []


def test_evaluation_batches_are_whole_and_distinct(many):
    stream = TokenStream(PackedTokens(many))
    batches = starts_of(choose_evaluation_windows(stream, sequence_length=20, batch_size=4, limit=5))
    starts = [start for rows in batches for start in rows]
    for rows in (range(2, 4), range(0)):
        parts = choose_evaluation_windows(stream, sequence_length=20, batch_size=4, limit=5, rows=rows)
        assert starts_of(parts) == [batch[rows.start : rows.stop] for batch in batches]
    assert len(batches) == 5 and len(set(starts)) == 20 and all(start % 21 == 0 for start in starts)
    assert stream.read_windows(batches[-1], 21).tokens.shape == (4, 20)


SIZES = [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 625, 1009, 1024, 4095, 4096, 4097, 10_007, 65_536, 65_537]


@pytest.mark.parametrize("seed, epoch", [(0, 0), (2**62, 5)])
def test_shuffle_is_a_permutation(seed, epoch):
    for size in SIZES:
        places = shuffle(np.arange(size), size, seed, epoch)
        assert (np.sort(places) == np.arange(size)).all(), size
    assert shuffle(np.arange(0), 0, seed, epoch).shape == (0,)


def test_an_index_has_the_same_place_alone_and_in_an_array():
    whole = shuffle(np.arange(1000), 1000, 3, 1)
    assert [int(shuffle(np.array([index]), 1000, 3, 1)[0]) for index in range(0, 1000, 97)] == whole[::97].tolist()
    assert shuffle(np.arange(6).reshape(2, 3), 1000, 3, 1).tolist() == whole[:6].reshape(2, 3).tolist()


def test_the_order_equals_that_of_checkpoints():
    """A changed order must change the name `sequences.ORDER`."""
    assert shuffle(np.arange(8), 8, 0, 0).tolist() == [0, 1, 2, 4, 5, 3, 7, 6]
    assert shuffle(np.arange(3), 10**12, 7, 2).tolist() == [803451923396, 680015824767, 301291443039]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_sizes_have_all_orders_equally_often(size):
    orders = list(itertools.permutations(range(size)))
    draws = 40 * len(orders)
    counts = Counter(tuple(shuffle(np.arange(size), size, seed, 0).tolist()) for seed in range(draws))
    assert set(counts) == set(orders)
    chi_squared = sum((count - 40) ** 2 / 40 for count in counts.values())
    degrees = len(orders) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


def test_places_are_as_random_as_those_of_numpy():
    """Check the distribution of places, neighbours and fixed points against the spread of chance."""
    size, seeds = 24, 600
    places = np.stack([shuffle(np.arange(size), size, seed, 1) for seed in range(seeds)])
    counts = np.stack([np.bincount(places[:, index], minlength=size) for index in range(size)])
    assert abs(counts - seeds / size).max() < 5 * (seeds / size) ** 0.5
    steps = np.bincount((np.diff(places) % size).ravel(), minlength=size)[1:]
    assert abs(steps - steps.mean()).max() < 5 * steps.mean() ** 0.5
    large = shuffle(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(large, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(large[1:], large[:-1])[0, 1]) < 0.02
    assert (large == np.arange(100_000)).sum() < 8 and (abs(np.diff(large)) == 1).sum() < 14


def test_other_seeds_and_epochs_have_other_orders():
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**40, 0), (0, 2**40)]
    orders = [shuffle(np.arange(5000), 5000, *key) for key in keys]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 8, "one in common is to be expected"


def test_a_huge_order_takes_neither_memory_nor_time():
    size = 2**62 - 57
    shuffle(np.arange(2), size, 0, 0)
    tracemalloc.start()
    places = shuffle(np.arange(size - 1000, size), size, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(places.tolist())) == 1000 and places.min() >= 0 and places.max() < size
    assert peak < 200_000, "of 8 KB of indices"
