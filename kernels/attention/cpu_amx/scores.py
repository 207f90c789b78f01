"""Scores and softmax weights of attention with AMX, see `cpu_amx/attend`."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.intrinsics import (
    max_lanes,
    split_row,
    sum_lanes,
    tile_load,
    tile_load_rows,
    tile_multiply,
    tile_store,
    tile_zero,
    transpose,
    transpose_sum,
)
from penstock.kernels.attention.cpu_amx.layout import CHUNK, SPLITS, STEP, prefetch_ahead
from penstock.kernels.attention.cpu_inner import FASTMATH, apply_score_mod, one_over
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.exponential import exp
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import load_wide, splat_wide, store, vadd, vmax

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Longs = npt.NDArray[np.int64]

_zero_0, _zero_1, _zero_2 = (tile_zero(register) for register in range(3))
_load_1, _load_4, _load_5, _load_6 = (tile_load(register) for register in (1, 4, 5, 6))
_load_keys_2, _load_keys_3 = tile_load_rows(2), tile_load_rows(3)
_store_0, _store_1, _store_2 = (tile_store(register) for register in range(3))
_add_0, _add_few_0 = tile_multiply(0, 3, 4), tile_multiply(0, 2, 1)
_add_1, _add_2 = tile_multiply(1, 3, 5), tile_multiply(2, 3, 6)


@inner()
def split_queries(
    query: Any, start: int, num_rows: int, group: int, head: int, scale: float, few: bool,
    splits: Floats, q: Floats,
) -> None:  # fmt: skip
    """Write the parts of the scaled query rows to tiles in `q`, with one column per query row.

    Few rows: [D / 32] tiles. More rows: [rows / 16, D / 32, 3] tiles. `splits` is scratch.
    """
    steps, apart = query.shape[2] // STEP, num_rows * ROWS if few else TILE
    for begin in range(0, num_rows, ROWS):
        for step in range(steps):
            for r in range(begin, min(begin + ROWS, num_rows)):
                x = query[start + r // group, head * group + r % group]
                split_row(x, step * STEP, scale, splits, (r - begin) * ROWS, apart)
            if few:
                transpose(splits, 0, q, step * TILE, ROWS)
            else:
                at = (begin // ROWS * steps + step) * SPLITS
                for split in range(NUM_SPLITS):
                    transpose(splits, split * TILE, q, at + split * TILE, ROWS)


@inner()
def few_scores(
    rows: Halves, values_at: int, starts: Longs, head_dim: int, num_rows: int, q: Floats,
    found: Floats, scores: Floats, span: int,
) -> None:  # fmt: skip
    """Compute the scores of few query rows for all `span` positions.

    For `starts` see `prefetch_ahead`. `found` is scratch.
    """
    num_tiles = span // ROWS
    apart = num_rows * ROWS
    transposed = found[2 * CHUNK * TILE :]
    for begin in range(0, num_tiles, 2 * CHUNK):
        end = min(begin + 2 * CHUNK, num_tiles)
        for number in range(begin, end):
            prefetch_ahead(rows, starts, number, values_at, head_dim)
            _zero_0()
            for step in range(head_dim // STEP):
                _load_keys_2(rows, starts[number] + step * STEP, 2 * head_dim)
                _load_1(q, step * TILE)
                _add_few_0()
            _store_0(found, (number - begin) * TILE)
        for number in range(begin, end):
            transpose(found, (number - begin) * TILE, transposed, 0, ROWS)
            for r in range(num_rows):
                at = r * ROWS
                summed = vadd(load_wide(transposed, at), load_wide(transposed, at + apart))
                summed = vadd(summed, load_wide(transposed, at + 2 * apart))
                store(scores, r * span + number * ROWS, summed)


@inner()
def many_scores(
    rows: Halves, values_at: int, starts: Longs, head_dim: int, num_rows: int, q: Floats,
    found: Floats, scores: Floats, span: int,
) -> None:  # fmt: skip
    """Do the work of `few_scores` for more query rows."""
    num_tiles = span // ROWS
    for begin in range(0, num_tiles, CHUNK):
        end = min(begin + CHUNK, num_tiles)
        for row in range(0, num_rows, ROWS):
            for number in range(begin, end):
                if row == 0:
                    prefetch_ahead(rows, starts, number, values_at, head_dim)
                at = row * head_dim // ROWS // STEP * SPLITS
                _zero_0()
                _zero_1()
                _zero_2()
                for step in range(head_dim // STEP):
                    _load_keys_3(rows, starts[number] + step * STEP, 2 * head_dim)
                    _load_4(q, at)
                    _add_0()
                    _load_5(q, at + TILE)
                    _add_1()
                    _load_6(q, at + 2 * TILE)
                    _add_2()
                    at += SPLITS
                into = (number - begin) * SPLITS
                _store_0(found, into)
                _store_1(found, into + TILE)
                _store_2(found, into + 2 * TILE)
            for number in range(begin, end):
                into = row * span + number * ROWS
                transpose_sum(found, (number - begin) * SPLITS, scores, into, span)


@inner(fastmath=FASTMATH)
def softmax(scores: Floats, low: int, seen: int, cap: float, slope: float, sink: float) -> Any:
    """Replace the scores of a query row by softmax weights that are not normalized.

    Positions outside [low, seen) get the weight 0. The result is the factor that normalizes the
    weights. `scores` has a multiple of 16 elements.
    """
    if cap > 0 or slope != 0:
        for s in range(low, seen):
            scores[s] = apply_score_mod(scores[s], cap, slope, s + 1 - seen)
    scores[:low] = -np.inf
    scores[seen:] = -np.inf
    greatest, total = splat_wide(sink), splat_wide(np.float32(0))
    for s in range(0, len(scores), ROWS):
        greatest = vmax(load_wide(scores, s), greatest)
    most = max_lanes(greatest)
    for s in range(len(scores)):
        scores[s] = exp(scores[s] - most)
    for s in range(0, len(scores), ROWS):
        total = vadd(total, load_wide(scores, s))
    return one_over(sum_lanes(total), most, sink)
