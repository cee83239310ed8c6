"""Open packed directories, detect damage, and read tokens and positions."""

import numpy as np
import pytest

from dualpipe.train.config.schema import DataConfig
from dualpipe.train.data.run_data import ensure_packed
from dualpipe.train.data.splits import split_documents
from dualpipe.train.data.token_stream import NO_TARGET, PackedTokens, TokenStream


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("tokens-00001.bin", truncate, "tokens-00001.bin has .* bytes instead of"),
        ("tokens-00000.bin", flip, "the checksum of tokens-00000.bin is wrong"),
        ("tokens-00000.bin", lambda p: p.unlink(), "tokens-00000.bin is missing"),
        ("documents.npy", flip, "the checksum of documents.npy is wrong"),
        ("documents.npy", lambda p: p.unlink(), "documents.npy is missing"),
        ("index.json", truncate, "not valid JSON"),
        ("index.json", lambda p: p.unlink(), "there is no index.json"),
        ("index.json", lambda p: p.write_text("{}"), "not of the format"),
        ("index.json", lambda p: p.write_text('{"format": "dualpipe tokens 1"}'), "lacks or garbles"),
    ],
)
def test_damage_is_detected(many, file, damage, message):
    damage(many / file)
    with pytest.raises(ValueError, match=f"not a complete packed directory: .*{message}"):
        PackedTokens(many)
    assert ensure_packed(str(many), DataConfig(tokenizer="bytes"), many.parent) == many, "not taken for text"


def test_stream_reads_across_documents_and_shards(many):
    packed = PackedTokens(many)
    assert len(list(many.glob("*.bin"))) > 3
    stream = split_documents(packed, 0.3).train
    whole = stream.read(0, stream.num_tokens)
    for start in range(0, stream.num_tokens - 150, 37):
        assert (stream.read(start, start + 150) == whole[start : start + 150]).all()


def test_positions_restart_at_each_document_and_each_sequence(many):
    stream = TokenStream(PackedTokens(many))
    lengths = stream.packed.documents["length"].tolist()
    whole = np.concatenate([np.arange(length) for length in lengths])
    assert (stream.positions(0, stream.num_tokens) == whole).all()
    start = lengths[0] + 2  # in the second document
    expected = np.concatenate((np.arange(lengths[1] - 2), np.arange(5)))
    assert (stream.positions(start, start + len(expected)) == expected).all()
    batch = stream.read_windows([0, 63], 21)
    assert batch.positions.shape == batch.tokens.shape and (batch.positions[0].numpy() == whole[:20]).all()


def test_no_target_of_a_separate_document_is_in_another(many):
    """Windows start and end within documents and at their bounds, and one goes on at the beginning of the text."""
    stream = TokenStream(PackedTokens(many))
    bounds = set(stream.document_bounds().tolist())
    starts = [*range(300), stream.num_tokens - 8]
    plain = stream.read_windows(starts, 15).targets
    separate = stream.read_windows(starts, 15, separate_documents=True, depth=1).targets
    for row, start in enumerate(starts):
        for place in range(14):
            targets = [start + place + 1, start + place + 2]
            ends = [any(start + place < bound <= target for bound in bounds) for target in targets]
            expected = [NO_TARGET if ends[0] else plain[row, place].item(),
                        NO_TARGET if ends[1] or place == 13 else plain[row, min(place + 1, 13)].item()]
            assert separate[row, place].tolist() == expected
    assert plain.min() >= 0 and (separate[..., 0] == NO_TARGET).any(1).sum() > 20


def test_vocabulary(many):
    packed = PackedTokens(many)
    packed.check_vocabulary(257)
    with pytest.raises(ValueError, match=r"holds the token 256, but the model's vocab_size is 256; .* at least 257"):
        packed.check_vocabulary(256)
