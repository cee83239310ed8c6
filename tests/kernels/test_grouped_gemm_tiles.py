"""The tiles that the kernels find for themselves, against a plain loop."""

import pytest
import torch

from dualpipe.kernels.common import INTERPRET, tl, triton
from dualpipe.kernels.grouped_gemm_tiles import find_tile, tiles_per_expert

pytestmark = pytest.mark.skipif(
    not INTERPRET and not torch.cuda.is_available(), reason="needs Triton's interpreter or a CUDA device"
)


@triton.jit
def _list_tiles(offs, out, M, E, col_tiles, ROWS: tl.constexpr, GROUP: tl.constexpr, E_PADDED: tl.constexpr):
    row_tiles = tiles_per_expert(offs, M, E, ROWS, E_PADDED)
    tile = tl.program_id(0)
    if tile < tl.sum(row_tiles) * col_tiles:
        expert, row, end, col_tile = find_tile(tile, offs, row_tiles, col_tiles, M, ROWS, GROUP)
        tl.store(out + tile * 4, expert)
        tl.store(out + tile * 4 + 1, row)
        tl.store(out + tile * 4 + 2, end)
        tl.store(out + tile * 4 + 3, col_tile)


def tiles(ends, rows, col_tiles, tile_rows, group):
    device = torch.device("cpu" if INTERPRET else "cuda")
    bound = (rows // tile_rows + min(len(ends), rows)) * col_tiles  # by which the launcher sizes the grid
    out = torch.full((bound, 4), -1, dtype=torch.int32, device=device)
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    padded = max(16, 1 << (len(ends) - 1).bit_length())
    _list_tiles[(max(1, bound),)](offs, out, rows, len(ends), col_tiles, ROWS=tile_rows, GROUP=group, E_PADDED=padded)
    used = int((out[:, 0] >= 0).sum())
    assert (out[used:] == -1).all()
    return [tuple(row) for row in out[:used].tolist()]


def expected_tiles(ends, rows, col_tiles, tile_rows, group):
    found, start = [], 0
    for e, end in enumerate(min(end, rows) for end in ends):
        starts = list(range(start, end, tile_rows))
        for g in range(0, len(starts), group):
            found += [(e, row, end, col) for col in range(col_tiles) for row in starts[g : g + group]]
        start = end
    return found


def test_worked_example():
    found = tiles([2, 2, 9], 9, col_tiles=2, tile_rows=4, group=8)
    assert [(e, row, col) for e, row, _, col in found] == [
        (0, 0, 0), (0, 0, 1), (2, 2, 0), (2, 6, 0), (2, 2, 1), (2, 6, 1)
    ]


@pytest.mark.parametrize(
    "counts",
    [[5], [0], [0, 0, 0], [0, 7, 0, 33, 1, 0], [16, 15, 17, 64, 0], [1] * 20, [3, 0] * 10],
    ids=lambda counts: "-".join(map(str, counts[:6])),
)
@pytest.mark.parametrize(("col_tiles", "group"), [(1, 1), (3, 2)])
def test_equals_a_loop(counts, col_tiles, group):
    ends = torch.tensor(counts).cumsum(0).tolist()
    for rows in (ends[-1], ends[-1] + 9):
        assert tiles(ends, rows, col_tiles, 16, group) == expected_tiles(ends, rows, col_tiles, 16, group)


def test_wrong_ends_stay_within_the_rows():
    assert tiles([-3, 4], 6, col_tiles=1, tile_rows=4, group=8) == [(1, 0, 4, 0)]
    assert tiles([9, 3, 20], 6, col_tiles=1, tile_rows=8, group=8) == [(0, 0, 6, 0), (2, 3, 6, 0)]
    assert tiles([4, 40, 50], 10, col_tiles=1, tile_rows=8, group=8) == [(0, 0, 4, 0), (1, 4, 10, 0)]
