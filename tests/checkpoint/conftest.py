"""A directory of checkpoints that tests damage, or add to."""

import pytest

from dualpipe.checkpoint import save
from native import state_of


@pytest.fixture
def two(tmp_path):
    """A directory with steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, state_of(step), step=step)
    return tmp_path
