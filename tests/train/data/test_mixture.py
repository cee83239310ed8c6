"""Mixtures of sources: shares, order, resuming, other weights."""

import json

import numpy as np
import pytest
import torch

from chats import random_chats, save_chat_tokenizer, write_chats
from dualpipe.train.data import mixture as mixture_module
from dualpipe.train.data.loader import Loader
from dualpipe.train.data.mixture import BLOCK, Mixture, share_places
from dualpipe.train.data.pack import pack
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.token_stream import NO_TARGET, PackedTokens, TokenStream
from dualpipe.train.data.tokenizer import ByteTokenizer, ChatTokenizer


@pytest.fixture
def streams(tmp_path):
    """Two texts, one of a's and one of b's."""
    found = []
    for letter, count in (("a", 30), ("b", 50)):
        (tmp_path / letter).mkdir()
        (tmp_path / letter / "text").write_text(letter * 11 * count)
        pack(find_sources([tmp_path / letter]), ByteTokenizer(), tmp_path / f"packed-{letter}")
        found.append(TokenStream(PackedTokens(tmp_path / f"packed-{letter}")))
    return found


def make_loader(streams, weights=(3.0, 1.0), **changes):
    sizes = dict(sequence_length=10, batch_size=8, seed=5) | changes
    return Loader(streams, weights=weights, **sizes)


@pytest.mark.parametrize(("weights", "places"), [
    ([1, 1], [2048, 2048]), ([3, 1], [3072, 1024]), ([1], [4096]), ([1, 1, 1], [1366, 1365, 1365]),
    ([1e-9, 1], [1, 4095]), ([1e9, 1, 1, 1], [4093, 1, 1, 1]), ([0.7, 0.2, 0.1], [2867, 819, 410]),
    ([5, 3, 1e-9, 1e-9, 1e-9], [2558, 1535, 1, 1, 1]),
])
def test_places_of_a_block(weights, places):
    assert share_places(weights).tolist() == places and sum(places) == BLOCK


def test_the_example_in_the_text(monkeypatch):
    monkeypatch.setattr(mixture_module, "BLOCK", 6)
    mixture = Mixture([2, 1], seed=0)
    sources, draws = mixture.draws(np.arange(12))
    for block in (slice(6), slice(6, 12)):
        assert np.bincount(sources[block]).tolist() == [4, 2]
    assert draws[sources == 0].tolist() == list(range(8)) and draws[sources == 1].tolist() == list(range(4))


def test_shares_draws_and_counts_agree():
    """Draws of a source count up, whatever the order in which sequences are asked for."""
    mixture, numbers = Mixture([0.7, 0.2, 0.1], seed=1), np.arange(10000)
    sources, draws = mixture.draws(numbers)
    for source, share in enumerate((0.7, 0.2, 0.1)):
        assert draws[sources == source].tolist() == list(range((sources == source).sum()))
        assert (sources == source).mean() == pytest.approx(share, abs=0.005)
    for number in (0, 1, 17, BLOCK, BLOCK + 1, 9999):
        assert mixture.num_drawn(number) == np.bincount(sources[:number], minlength=3).tolist()
    shuffled = np.random.default_rng(0).permutation(numbers)
    again, draws_again = Mixture([0.7, 0.2, 0.1], seed=1).draws(shuffled)
    assert (again == sources[shuffled]).all() and (draws_again == draws[shuffled]).all()
    assert (Mixture([0.7, 0.2, 0.1], seed=2).draws(numbers).sources != sources).any()


def test_other_weights_from_a_sequence_on():
    saved = Mixture([1, 1], seed=0)
    state = json.loads(json.dumps(saved.state_dict()))
    assert Mixture([1, 1], seed=0).continue_from(state, 100).state_dict() == state
    changed = Mixture([9, 1], seed=0).continue_from(state, 100)
    drawn = saved.num_drawn(100)
    assert sum(drawn) == 100 and changed.num_drawn(100) == drawn
    sources, draws = changed.draws(np.arange(100, 5000))
    assert [draws[sources == source][0] for source in range(2)] == drawn
    assert (sources == 0).mean() == pytest.approx(0.9, abs=0.02)
    third = Mixture([1, 3], seed=0).continue_from(json.loads(json.dumps(changed.state_dict())), 5000)
    assert third.num_drawn(5000) == changed.num_drawn(5000)


def letters(batch):
    return [chr(row[0]) for row in batch.tokens.tolist()]


def test_batches_take_each_source_by_its_weight_and_each_window_once_an_epoch(streams):
    loader = make_loader(streams)
    assert loader.num_windows == 30 + 50
    rows = [letter for step in range(300) for letter in letters(loader.batch(step))]
    assert rows.count("a") / len(rows) == pytest.approx(0.75, abs=0.02)
    assert loader.num_drawn(300) == [rows.count("a"), rows.count("b")]
    part = make_loader(streams, rows=range(2, 5)).batch(7)
    whole = loader.batch(7)
    for own, every in zip(part, whole):
        assert torch.equal(own, every[2:5])
    assert make_loader(streams, rows=range(0)).batch(7).tokens.shape == (0, 10)


def test_resuming_and_other_weights(streams):
    straight = make_loader(streams)
    state = json.loads(json.dumps(straight.state_dict() | {"step": 20}))
    same = make_loader(streams)
    assert same.load_state_dict(state) == "" and same.step == 20
    assert all(torch.equal(same.batch(step).tokens, straight.batch(step).tokens) for step in (20, 21))
    other = make_loader(streams, weights=(1.0, 3.0))
    assert other.load_state_dict(state) == (
        "data.sources has new weights from step 21 on: 1, 3 (before: 3, 1)")
    assert other.num_drawn(20) == straight.num_drawn(20)
    rows = [letter for step in range(20, 320) for letter in letters(other.batch(step))]
    assert rows.count("b") / len(rows) == pytest.approx(0.75, abs=0.02)
    later = make_loader(streams, weights=(1.0, 3.0))
    assert later.load_state_dict(json.loads(json.dumps(other.state_dict())) | {"step": 25}) == ""
    assert torch.equal(later.batch(30).tokens, other.batch(30).tokens)
    with pytest.raises(ValueError, match="the loader's state is of another run: data "):
        make_loader(streams[::-1]).load_state_dict(state)
    with pytest.raises(ValueError, match="the loader's state is of another run: data "):
        Loader(streams[:1], sequence_length=10, batch_size=8, seed=5).load_state_dict(state)


def test_text_and_conversations(streams, tmp_path):
    tokenizer = ChatTokenizer(str(save_chat_tokenizer(tmp_path / "tokenizer")))
    pack(find_sources([write_chats(tmp_path / "c.jsonl", random_chats(20))]), tokenizer, tmp_path / "chats")
    chats = TokenStream(PackedTokens(tmp_path / "chats"))
    loader = make_loader([streams[0], chats], (1.0, 1.0), sequence_length=100, batch_size=64)
    alone = make_loader([chats], (1.0,), sequence_length=100, batch_size=64)
    assert loader.num_conversation_windows == alone.num_windows == alone.num_conversation_windows < loader.num_windows
    batch = loader.batch(0)
    counts = (batch.targets != NO_TARGET).sum(1)
    is_text = (batch.tokens == ord("a")).all(1)
    assert 20 < is_text.sum() < 44 and (counts[is_text] == 100).all()
    assert (counts[~is_text] < 100).all() and (counts[~is_text] > 0).all()
