"""Tiles of attention with AMX: their registers, their addresses in the KV cache, and prefetches.

A key tile has the keys of 16 positions. Key tile i of a sequence begins at position 16 i. The
values of these positions are at the same place in the second half of the cache.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.amx import ROWS, TILE, ldtilecfg
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import prefetch
from penstock.kernels.kv_cache.cpu_blocks import page_size

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

MAX_FEW_ROWS = ROWS // NUM_SPLITS
"""Largest number of query rows whose splits fit into one tile."""

BF16_STEP, INT8_STEP = 32, 64
"""Features of a tile of keys, and positions of a tile of values."""

SPLITS = NUM_SPLITS * TILE
"""Size of the tiles with the three splits of 16 query rows, in words."""

CHUNK = 8
"""Number of steps of 32 (bfloat16) or 64 (INT8) positions for which tiles are prepared before they
are multiplied. A tile that has just been written cannot be loaded for a while."""

SCORES = CHUNK * SPLITS
"""Size of the scratch array for tiles of scores and of weights, in words."""

AHEAD = 16
"""Prefetch distance in tiles of 16 positions."""


@inner()
def configure(num_rows: int, shapes: Any) -> None:
    """Configure the tile registers for `num_rows` query rows.

    `shapes` is the current configuration [64 bytes], or zeros before the first call. If it fits the
    number of rows already, the registers are not configured again, because that takes 300 cycles.
    """
    rows = NUM_SPLITS * num_rows if num_rows <= MAX_FEW_ROWS else ROWS
    if shapes[51] == rows:
        return
    shapes[0] = 1
    for register in range(8):
        shapes[16 + 2 * register] = 64
        shapes[48 + register] = ROWS if register < 3 else rows
    ldtilecfg(shapes)


@inner()
def attended_tiles(tile: tuple[int, int, int]) -> tuple[int, int]:
    """Return the numbers of the first and the last key tile to which a token of `tile` attends."""
    tokens, context, behind = tile
    return max(context - behind, 0) // ROWS, (context + tokens - 2) // ROWS


@inner()
def find_starts(
    first: int,
    tile: tuple[int, int, int],
    kv_layout: tuple[int, int, int],
    rows: Any,
    table: Ints,
    head_dim: int,
    starts: Longs,
) -> None:
    """Write to `starts` where the key tiles of a work item begin in the flat cache `rows`.

    The first one is key tile `first`. Tiles to which no token attends are replaced by the nearest
    tile to which one attends, because their blocks may have been freed.
    """
    num_heads, head, block_size = kv_layout
    size, (lowest, highest) = page_size(rows, block_size, head_dim), attended_tiles(tile)
    per_block = block_size // ROWS
    for i in range(len(starts)):
        number = min(max(first + i, lowest), highest)
        at, inside = number, 0
        if per_block > 1:  # usually a block is one tile, and divisions are slow
            at, inside = number // per_block, number % per_block
        starts[i] = (table[at] * num_heads + head) * size + inside * ROWS * head_dim


@inner()
def prefetch_ahead(rows: Any, starts: Longs, number: int, values_at: int, head_dim: int) -> None:
    """Prefetch the tile that is read AHEAD tiles after tile `number` of a work item.

    A work item reads its key tiles and then the values of the same positions. Then the next work
    item reads its key tiles. `starts` has the key tiles of this work item and AHEAD of the next
    one.
    """
    count, number = len(starts) - AHEAD, number + AHEAD
    if number < count:
        at = starts[number]
    else:
        at = starts[number - count] + (values_at if number < 2 * count else 0)
    line = 64 // rows.itemsize
    for i in range(at, at + page_size(rows, ROWS, head_dim), line):
        prefetch(rows, i)
