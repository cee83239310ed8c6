"""Number of blocks of NCCL's kernels that can wait at once."""

import os

from dualpipe.runtime.nccl import waiting_blocks


def test_blocks_that_can_wait_at_once(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    assert waiting_blocks() == 8 * 1 + 1 + 16 + 16 + 16 + 4 == 61 < 108, "multiprocessors of an A100"
    assert waiting_blocks(links=4) == 57
    monkeypatch.setitem(os.environ, "NCCL_MAX_NCHANNELS", "8")
    assert waiting_blocks() == 8 * 1 + 1 + 8 + 8 + 8 + 4
    monkeypatch.setattr(os, "environ", {"NCCL_MAX_CTAS": "some", "NCCL_MAX_NCHANNELS": ""})
    assert waiting_blocks() == 61
    monkeypatch.setattr(os, "environ", {"NCCL_MAX_CTAS": "32"})
    assert waiting_blocks() == 13 * 32
