"""Which tile of which expert a program works on, found on the device from the offsets.

Every expert's rows start a tile of their own, so that a tile never holds rows of two experts. Their number is known on
the device alone: experts e with r_e rows need sum(cdiv(r_e, TILE_ROWS)) tiles of rows, at most M // TILE_ROWS +
min(E, M), which is what the host sizes the grid by. A table of them would be one more launch for every product; each
program finds its own tiles instead, with two sums over E numbers.

Example: offs = [2, 2, 9], tiles of 4 rows and 2 tiles of columns. Experts 0, 1, 2 have 1, 0 and 2 tiles of rows, so
tiles 0 and 1 belong to expert 0 and tiles 2 to 5 to expert 2: (expert, first row, tile of columns) are (0, 0, 0),
(0, 0, 1), (2, 2, 0), (2, 6, 0), (2, 2, 1), (2, 6, 1). Within an expert GROUP tiles of rows share a tile of columns
before the next one, so that programs that run at the same time read the same weights from the L2 cache.
"""

from __future__ import annotations

from dualpipe.kernels.backend import tl, triton


def max_row_tiles(rows: int, experts: int, tile_rows: int) -> int:
    """At most so many tiles of rows, however the rows are spread over the experts."""
    return rows // tile_rows + min(experts, rows)


@triton.jit
def tiles_per_expert(offs, M, E, TILE_ROWS: tl.constexpr, E_PADDED: tl.constexpr):
    """(E_PADDED,) tiles of rows of each expert. Ends outside of 0 to M count as 0 or M: no other row is touched."""
    e = tl.arange(0, E_PADDED)
    ends = tl.minimum(tl.load(offs + e, mask=e < E, other=0), M)
    starts = tl.load(offs + e - 1, mask=(e > 0) & (e < E), other=0)
    return tl.cdiv(tl.maximum(ends - tl.maximum(starts, 0), 0), TILE_ROWS)


@triton.jit
def rows_of(offs, expert, M):
    """(first row, end) of an expert, clamped as in `tiles_per_expert`."""
    start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    return tl.maximum(start, 0), tl.minimum(tl.load(offs + expert), M)


@triton.jit
def find_tile(tile, offs, row_tiles, last_tiles, col_tiles, M, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first row, end of its rows, tile of columns) of `tile`.

    `row_tiles` is `tiles_per_expert`, `last_tiles` its running sum, `col_tiles` the tiles of columns of any expert.
    """
    before = last_tiles <= tile // col_tiles  # experts whose tiles are all before this one
    expert = tl.sum(before.to(tl.int32))
    local = tile - tl.sum(tl.where(before, row_tiles, 0)) * col_tiles
    start, end = rows_of(offs, expert, M)
    group = local // (GROUP * col_tiles)
    rows_in_group = tl.minimum(tl.cdiv(end - start, TILE_ROWS) - group * GROUP, GROUP)
    in_group = local % (GROUP * col_tiles)
    row_tile = group * GROUP + in_group % rows_in_group
    return expert, start + row_tile * TILE_ROWS, end, in_group // rows_in_group
