"""AMX loops of `cpu_packed_f32`, compiled by numba.

Each float32 is split into three bfloat16 parts (`cpu_common/amx.split_bf16x3`). A float32 product
is the sum of six products of parts; the other three products are below the last bit of a float32
(Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
higher-precision computations", 2019). Rows of x are split in advance. The weights of
each step (32 inputs of some 16-column strips) are split during the multiplications of the previous
step (software pipelining).

Four accumulator tiles are used at the same time: 64 rows by 16 columns, 32 by 32, or 16 by 64.

Shapes: T rows of x, K inputs, N outputs, P panels of PANEL = 48 outputs. A panel has three strips.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.amx import (
    ROWS,
    TILE,
    TILE_K,
    emit_tile_ops,
    ldtilecfg,
    load_accumulators,
    split_bf16x3,
    store_accumulators,
    tilerelease,
)
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS, allocate_registers, tile_products
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import load_wide, prefetch, prefetch_write, store, vadd
from penstock.kernels.linear.panels import PANEL

Floats = npt.NDArray[np.float32]

MAX_K_IN_SUMS = 24 * TILE_K
"""Number of inputs per partial sum. The first partial sum is stored to y, and the following partial
sums are added to it."""

_SUM_TILES = 4  # tile registers used as accumulators
BLOCK_ROWS = BLOCK_COLUMNS = _SUM_TILES * ROWS
"""The rows and columns of y are padded to multiples of these numbers, because whole tiles are
stored."""

_SPLIT = NUM_SPLITS * TILE  # size of a tile's three bfloat16 parts, in 32-bit words
_ROWS_AT_ONCE = 4 * _SUM_TILES * ROWS
"""Number of rows that are multiplied by one 16-column strip before the next strip (loop tiling)."""


@inner()
def _configure_tiles(height: int, for_rows: int, shapes: npt.NDArray[np.uint8]) -> None:
    """Configure the tile registers: tiles of x and sums have `height` rows, tiles of weights 16.

    `shapes` is a scratch array of 64 bytes.
    """
    shapes[:] = 0
    shapes[0] = 1
    for register in range(8):
        shapes[16 + 2 * register] = 64
        shapes[48 + register] = height if register < _SUM_TILES + for_rows else ROWS
    ldtilecfg(shapes)


@inner()
def _split_rows(x: Floats, at: int, width: int, num_rows: int, num_steps: int, a: Floats) -> None:
    """Split rows of x into three bfloat16 parts, and store the parts in `a`.

    The rows are `width` elements apart. `a` is [rows / 16, steps, parts, 16, 16] 32-bit words. In
    each step of 32 inputs, word i of a row contains the inputs i and i + 16.
    """
    for r in range(num_rows):
        to = (r // ROWS * num_steps * NUM_SPLITS * ROWS + r % ROWS) * 16
        for k in range(num_steps):
            v = at + r * width + k * TILE_K
            first, second, third = split_bf16x3(load_wide(x, v), load_wide(x, v + 16))
            store(a, to, first)
            store(a, to + TILE, second)
            store(a, to + 2 * TILE, third)
            to += _SPLIT


@inner(forceinline=True)
def _split_columns(panels: Floats, at: int, b: Floats, to: int, first: int, last: int) -> None:
    """Split words [first, last) of the columns of a 16-column strip into three bfloat16 parts.

    In each step of 32 inputs, a column has 16 words. Word i contains the inputs i and i + 16.
    """
    for word in range(first, last):
        v = at + word * PANEL
        one, two, three = split_bf16x3(load_wide(panels, v), load_wide(panels, v + 16 * PANEL))
        store(b, to + word * 16, one)
        store(b, to + TILE + word * 16, two)
        store(b, to + 2 * TILE + word * 16, three)


@inner(forceinline=True)
def _prefetch(panels: Floats, at: int, first: int, last: int) -> None:
    """Prefetch the inputs that `_split_columns` reads for words [first, last)."""
    for word in range(first, last):
        prefetch(panels, at + word * PANEL)
        prefetch(panels, at + (word + 16) * PANEL)


@inner()
def _column_at(column: int, num_inputs: int, begin: int) -> int:
    """Return the index in `panels` of input `begin` of the 16-column strip number `column`."""
    return (column // 3 * num_inputs + begin) * PANEL + column % 3 * 16


@inner(forceinline=True)
def _step_on(at: Any) -> Any:
    """Return four indices in `panels`, each advanced by one step of TILE_K inputs."""
    step = TILE_K * PANEL
    return at[0] + step, at[1] + step, at[2] + step, at[3] + step


_PIECES = 8
"""Number of pieces into which the multiplications of a step are divided. After each piece, some
weights of the next step are split into bfloat16 parts."""


def _block_of(num_rows: int, num_columns: int, for_rows: int) -> Any:
    """Compile a function that multiplies `num_rows` row tiles by `num_columns` column tiles.

    Args:
        num_rows: number of row tiles.
        num_columns: number of column tiles.
        for_rows: number of tile registers for row tiles, see `allocate_registers`.
    """
    work = allocate_registers(tile_products(num_rows, num_columns), num_columns, for_rows)
    cuts = [len(work) * piece // _PIECES for piece in range(_PIECES + 1)]
    pieces = [emit_tile_ops(work[cuts[at] : cuts[at + 1]]) for at in range(_PIECES)]
    p0, p1, p2, p3, p4, p5, p6, p7 = pieces
    start, keep = (
        load_accumulators(num_rows, num_columns),
        store_accumulators(num_rows, num_columns),
    )
    words, rows = ROWS // _PIECES, num_rows * ROWS

    @inner(forceinline=True)
    def meanwhile(
        panels: Floats, at: Any, b: Floats, to: int, later: Any, prefetch_next: bool, piece: int
    ) -> None:
        """Split the words that belong to piece number `piece` of a step, in the strips at `at`.

        With `prefetch_next`, also prefetch the same words of the strips at `later`.
        """
        first, last = piece * words, (piece + 1) * words
        for c in range(num_columns):
            _split_columns(panels, at[c], b, to + c * _SPLIT, first, last)
            if prefetch_next:
                _prefetch(panels, later[c], first, last)

    @inner()
    def block(
        a: Floats, a_at: int, row_step: int, panels: Floats, at: Any, then: Any, later: Any,
        prefetch_next: bool, num_steps: int, b: Floats, side: int, before: Floats, before_at: int,
        y: Floats, y_at: int, width: int,
    ) -> int:  # fmt: skip
        """Add the products of all steps to the initial sums `before`, and store the sums to y.

        `at`, `then` and `later` are indices in `panels`. This call multiplies the strips at `at`.
        In its last step, the call splits the strips at `then`, which the next call multiplies. With
        `prefetch_next`, the strips at `later` are prefetched.

        Returns:
            The half of `b` (0 or 1) that contains the split columns for the next call.
        """
        start(before, before_at)
        for k in range(num_steps):
            now, side = side * num_columns * _SPLIT, 1 - side
            to, at = side * num_columns * _SPLIT, then if k + 1 == num_steps else _step_on(at)
            p0(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 0)
            p1(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 1)
            p2(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 2)
            p3(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 3)
            p4(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 4)
            p5(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 5)
            p6(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 6)
            p7(a, a_at, row_step, b, now)
            meanwhile(panels, at, b, to, later, prefetch_next, 7)
            for r in range(k * rows // num_steps, (k + 1) * rows // num_steps):
                prefetch_write(y, y_at + r * width)
            a_at, later = a_at + _SPLIT, _step_on(later)
        keep(y, y_at, width)
        return side

    return block


_tall, _square, _wide = _block_of(4, 1, 1), _block_of(2, 2, 2), _block_of(1, 4, 1)


@inner()
def _columns_at(column: int, num_columns: int, num_inputs: int, begin: int) -> Any:
    """Return `_column_at` of the four strips from number `column` on.

    The last strip replaces strips past the end.
    """
    return (
        _column_at(min(column, num_columns - 1), num_inputs, begin),
        _column_at(min(column + 1, num_columns - 1), num_inputs, begin),
        _column_at(min(column + 2, num_columns - 1), num_inputs, begin),
        _column_at(min(column + 3, num_columns - 1), num_inputs, begin),
    )


@inner()
def _add(sums: Floats, num_rows: int, num_columns: int, y: Floats, at: int, width: int) -> None:
    """Add `sums` [num_rows, num_columns] to the part of y that begins at index `at`.

    The rows of y are `width` elements apart.
    """
    for r in range(num_rows):
        for c in range(0, num_columns, 16):
            to = at + r * width + c
            store(y, to, vadd(load_wide(y, to), load_wide(sums, r * num_columns + c)))


@inner()
def _pass(
    num_rows: int, num_inputs: int, begin: int, panels: Floats, bias: Floats, y: Floats,
    width: int, num_columns: int, first: int, last: int, a: Floats, b: Floats, sums: Floats,
) -> None:  # fmt: skip
    """Multiply the rows `a`, already split into bfloat16 parts, by strips [first, last).

    One call processes up to MAX_K_IN_SUMS inputs, starting at input `begin`.
    """
    num_steps = min(MAX_K_IN_SUMS, num_inputs - begin) // TILE_K
    across = 1 if num_rows > 2 * ROWS else 2 if num_rows > ROWS else _SUM_TILES
    high, row_step, end = (
        _SUM_TILES // across * ROWS,
        num_steps * _SPLIT,
        begin + num_steps * TILE_K,
    )
    after = _columns_at(first, num_columns, num_inputs, end if end < num_inputs else begin)
    side, at = 0, _columns_at(first, num_columns, num_inputs, begin)
    for c in range(across):
        _split_columns(panels, at[c], b, c * _SPLIT, 0, ROWS)
    for column in range(first, last, across):
        later = after
        if column + across < last:
            later = _columns_at(column + across, num_columns, num_inputs, begin)
        for r in range(0, num_rows, high):
            y_at, then = r * width + column * 16, later if r + high >= num_rows else at
            before, before_at, into, into_at, apart = bias, column * 16, y, y_at, width
            if begin:
                before, before_at, into, into_at, apart = (
                    sums[_SUM_TILES * TILE :],
                    0,
                    sums,
                    0,
                    across * 16,
                )
            given = (
                a, r // ROWS * row_step, row_step, panels, at, then, later, r == 0, num_steps, b,
                side, before, before_at, into, into_at, apart,
            )  # fmt: skip
            if across == 1:
                side = _tall(*given)
            elif across == 2:
                side = _square(*given)
            else:
                side = _wide(*given)
            if begin:
                _add(sums, min(high, num_rows - r), across * 16, y, y_at, width)
        at = later


@inner(allocates=True)
def compute_columns(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, y: Floats,
    width: int, num_columns: int, first: int, last: int,
) -> None:  # fmt: skip
    """Compute the 16-column strips [first, last) of y [num_rows, width]."""
    long, block = min(MAX_K_IN_SUMS, num_inputs), _SUM_TILES * ROWS
    a_size = -(-min(num_rows, _ROWS_AT_ONCE) // block) * block * long * NUM_SPLITS // 2
    b_size, shapes = 2 * _SUM_TILES * _SPLIT, np.empty(64, np.uint8)
    scratch = np.empty(a_size + b_size + (_SUM_TILES + 1) * TILE + 16, np.float32)
    scratch = scratch[-(scratch.ctypes.data // 4) % 16 :]  # starts at a cache line
    a, b, sums = scratch[:a_size], scratch[a_size:][:b_size], scratch[a_size + b_size :]
    sums[_SUM_TILES * TILE :] = 0
    floor = 0
    while floor < num_rows:
        left = num_rows - floor
        count = min(_ROWS_AT_ONCE, left // block * block) if left >= block else left
        _configure_tiles(min(count, ROWS), 2 if ROWS < count <= 2 * ROWS else 1, shapes)
        for begin in range(0, num_inputs, MAX_K_IN_SUMS):
            num_steps = min(MAX_K_IN_SUMS, num_inputs - begin) // TILE_K
            _split_rows(x, floor * num_inputs + begin, num_inputs, count, num_steps, a)
            _pass(
                count, num_inputs, begin, panels, bias, y[floor * width :], width, num_columns,
                first, last, a, b, sums,
            )  # fmt: skip
        floor += count
    tilerelease()


@inner()
def _rounded(num_outputs: int) -> tuple[int, int]:
    """Return the padded width of y, and the number of 16-column strips that contain outputs."""
    return -(-num_outputs // BLOCK_COLUMNS) * BLOCK_COLUMNS, -(-num_outputs // 16)


_SIGNATURE = "void(float32[::1], int64, int64, float32[::1], float32[::1], float32[::1], int64"


@entry(_SIGNATURE + ")")
def _serial(
    x: Floats,  # [T * K]
    num_rows: int,
    num_inputs: int,  # a multiple of TILE_K
    panels: Floats,  # [P * K * PANEL]
    bias: Floats,  # [N rounded up to a multiple of BLOCK_COLUMNS]
    y: Floats,  # flat; see `padded_sizes` for its rows and columns
    num_outputs: int,
) -> None:
    """Compute the linear layer's output y in one thread."""
    width, num_columns = _rounded(num_outputs)
    compute_columns(x, num_rows, num_inputs, panels, bias, y, width, num_columns, 0, width // 16)


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, y: Floats,
    num_outputs: int, num_threads: int,
) -> None:  # fmt: skip
    """Compute y with several threads, each for a range of columns or (for many rows) of rows.

    If the rows are divided among the threads, each row is split into bfloat16 parts only once.
    """
    width, num_columns = _rounded(num_outputs)
    floors = num_rows // _ROWS_AT_ONCE
    for thread in numba.prange(num_threads):
        if floors < 2 * num_threads:
            first = width // BLOCK_COLUMNS * thread // num_threads * _SUM_TILES
            last = width // BLOCK_COLUMNS * (thread + 1) // num_threads * _SUM_TILES
            if first < last:
                compute_columns(
                    x, num_rows, num_inputs, panels, bias, y, width, num_columns, first, last
                )  # fmt: skip
        else:
            begin = floors * thread // num_threads * _ROWS_AT_ONCE
            end = floors * (thread + 1) // num_threads * _ROWS_AT_ONCE
            if thread == num_threads - 1:
                end = num_rows
            compute_columns(
                x[begin * num_inputs :], end - begin, num_inputs, panels, bias,
                y[begin * width :], width, num_columns, 0, width // 16,
            )  # fmt: skip


def padded_sizes(num_rows: int, num_outputs: int) -> tuple[int, int, int]:
    """Return the number of rows of x that are read, and the padded rows and columns of y."""
    rows = num_rows if num_rows <= ROWS else -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS
    return num_rows, rows, -(-num_outputs // BLOCK_COLUMNS) * BLOCK_COLUMNS


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute the linear layer's output y. `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
