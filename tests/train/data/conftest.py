"""Fixtures with text files and a packed directory."""

import numpy as np
import pytest

from dualpipe.train.data.pack import pack
from dualpipe.train.data.sources import find_sources
from dualpipe.train.data.tokenizer import ByteTokenizer


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"bee")
    (folder / "a.txt").write_bytes(b"a\xff\x01")
    (folder / "sub" / "c.txt").write_bytes(b"sea")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"no")
    return folder


@pytest.fixture
def many(tmp_path):
    """200 documents of uneven lengths, packed in several shards."""
    folder = tmp_path / "many"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(200):
        (folder / f"{i:03d}").write_bytes(rng.integers(97, 123, rng.integers(1, 90)).astype(np.uint8).tobytes())
    pack(find_sources([folder]), ByteTokenizer(), tmp_path / "packed", shard_tokens=1000)
    return tmp_path / "packed"
