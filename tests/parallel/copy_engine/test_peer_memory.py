"""Places of slots in the memory of a rank."""

import pytest
import torch

from dualpipe.parallel.copy_engine.peer_memory import ALIGNMENT, SlotLayout


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_slots_share_no_bytes_and_fill_the_memory(ranks):
    layout = SlotLayout.within(ranks, 1000)
    assert layout.slot_bytes % ALIGNMENT == 0 and 1000 - 2 * ALIGNMENT * (ranks - 1) < layout.nbytes <= 1000
    for owner in range(ranks):
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for source in set(range(ranks)) - {owner}:
            for number in (0, 1):
                layout.slot(memory, owner, source, number).add_(1)
                assert layout.slot(memory, owner, source, number).data_ptr() == layout.slot(
                    memory, owner, source, number + 2).data_ptr()
        assert memory.eq(1).all()


def test_worked_example():
    layout, memory = SlotLayout(3, 32), torch.arange(128, dtype=torch.uint8)
    starts = {source: [layout.slot(memory, 1, source, number)[0].item() for number in range(3)] for source in (0, 2)}
    assert starts == {0: [0, 64, 0], 2: [32, 96, 32]}


def test_a_buffer_that_is_too_small_is_refused():
    assert SlotLayout.within(4, 96).slot_bytes == ALIGNMENT
    with pytest.raises(ValueError, match="a buffer of 95 bytes has no room for 6 slots of 16 bytes, two for each "
                                         "of 3 peers; give at least 96"):
        SlotLayout.within(4, 95)
