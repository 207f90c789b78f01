"""The loops of `panel_product`, compiled by numba."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.compiled import entry, load_entries, run_loops
from penstock.kernels.lanes import WIDE, added, ask_ahead, fma, load_wide, splat_wide, spread, store
from penstock.kernels.late_codegen import inner

Floats = npt.NDArray[np.float32]

HIGH, PANEL = 8, 3 * WIDE
"""Rows and columns of a tile: its sums, columns of a panel and a number of x fill the registers."""

DEEP = 192
"""Inputs that are summed by themselves: their part of a panel stays near while tiles pass it."""

_FLOOR = 64
"""Rows of tiles that pass it, before those of the next floor do."""

_LINE = 16  # float32 of a cache line


@inner()
def _columns(panels: Floats, at: int) -> Any:
    return load_wide(panels, at), load_wide(panels, at + WIDE), load_wide(panels, at + 2 * WIDE)


@inner()
def _none() -> Any:
    none = splat_wide(np.float32(0))
    return none, none, none


@inner()
def _on(sums: Any, x: Any, columns: Any) -> Any:
    a, b, c = sums
    p, q, r = columns
    return fma(x, p, a), fma(x, q, b), fma(x, r, c)


@inner()
def _put(y: Floats, at: int, sums: Any, before: Floats, before_at: int) -> None:
    """Into y at `at`: what was before, and the sums."""
    a, b, c = sums
    p, q, r = _columns(before, before_at)
    store(y, at, added(p, a))
    store(y, at + WIDE, added(q, b))
    store(y, at + 2 * WIDE, added(r, c))


@inner()
def _part(
    x: Floats, begin: int, end: int, panels: Floats, at: int, before: Floats, y: Floats, column: int
) -> None:  # fmt: skip
    """Of one row inputs from `begin` to `end`, times their part of the panel that is at `at`."""
    sums = _none()
    for k in range(begin, end):
        sums = _on(sums, spread(x, k), _columns(panels, at + k * PANEL))
    _put(y, column, sums, before, column)


@inner()
def _four_parts(
    x: Floats, begin: int, end: int, panels: Floats, at: int, step: int, before: Floats, y: Floats,
    column: int,
) -> None:  # fmt: skip
    """The same of four panels: memory gives four streams faster than one."""
    s0 = s1 = s2 = s3 = _none()
    for k in range(begin, end):
        value, v = spread(x, k), at + k * PANEL
        s0, s1 = _on(s0, value, _columns(panels, v)), _on(s1, value, _columns(panels, v + step))
        v += 2 * step
        s2, s3 = _on(s2, value, _columns(panels, v)), _on(s3, value, _columns(panels, v + step))
    _put(y, column, s0, before, column)
    _put(y, column + PANEL, s1, before, column + PANEL)
    _put(y, column + 2 * PANEL, s2, before, column + 2 * PANEL)
    _put(y, column + 3 * PANEL, s3, before, column + 3 * PANEL)


@inner()
def _one_row(
    x: Floats, num_inputs: int, panels: Floats, bias: Floats, first: int, last: int, y: Floats
) -> None:
    """As `_whole_panels`, of a row."""
    size, four = num_inputs * PANEL, first + (last - first) // 4 * 4
    bias = bias[first * PANEL :]
    for begin in range(0, num_inputs, DEEP):
        end, before = min(begin + DEEP, num_inputs), bias if begin == 0 else y
        for panel in range(first, four, 4):
            column = (panel - first) * PANEL
            _four_parts(x, begin, end, panels, panel * size, size, before, y, column)
        for panel in range(four, last):
            _part(x, begin, end, panels, panel * size, before, y, (panel - first) * PANEL)


@inner()
def _tile(
    x: Floats, x_at: int, x_step: int, count: int, panels: Floats, at: int, ahead: int, lines: int,
    before: Floats, before_at: int, before_step: int, y: Floats, y_at: int, y_step: int,
) -> None:  # fmt: skip
    """Of eight rows `count` inputs times their part of a panel, which is at `at`; evenly
    meanwhile, so many lines from `ahead` on are asked for."""
    x1, x2, x3, x4 = x_at + x_step, x_at + 2 * x_step, x_at + 3 * x_step, x_at + 4 * x_step
    x5, x6, x7 = x_at + 5 * x_step, x_at + 6 * x_step, x_at + 7 * x_step
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = _none()
    pace, at_once, due = max(1, count // lines), (lines + count - 1) // count, 0
    for k in range(count):
        if k == due:
            for _ in range(at_once):
                ask_ahead(panels, ahead)
                ahead += _LINE
            due += pace
        columns = _columns(panels, at + k * PANEL)
        s0, s1 = _on(s0, spread(x, x_at + k), columns), _on(s1, spread(x, x1 + k), columns)
        s2, s3 = _on(s2, spread(x, x2 + k), columns), _on(s3, spread(x, x3 + k), columns)
        s4, s5 = _on(s4, spread(x, x4 + k), columns), _on(s5, spread(x, x5 + k), columns)
        s6, s7 = _on(s6, spread(x, x6 + k), columns), _on(s7, spread(x, x7 + k), columns)
    _put(y, y_at, s0, before, before_at)
    _put(y, y_at + y_step, s1, before, before_at + before_step)
    _put(y, y_at + 2 * y_step, s2, before, before_at + 2 * before_step)
    _put(y, y_at + 3 * y_step, s3, before, before_at + 3 * before_step)
    _put(y, y_at + 4 * y_step, s4, before, before_at + 4 * before_step)
    _put(y, y_at + 5 * y_step, s5, before, before_at + 5 * before_step)
    _put(y, y_at + 6 * y_step, s6, before, before_at + 6 * before_step)
    _put(y, y_at + 7 * y_step, s7, before, before_at + 7 * before_step)


@inner()
def _whole_panels(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, first: int, last: int,
    y: Floats, width: int,
) -> None:  # fmt: skip
    """y [num_rows, width]: the columns of panels from `first` to `last`."""
    if num_rows == 1:
        _one_row(x, num_inputs, panels, bias, first, last, y)
        return
    for floor in range(0, num_rows, _FLOOR):
        top = min(floor + _FLOOR, num_rows)
        lines = -(-DEEP * PANEL // _LINE * HIGH // (top - floor))
        for panel in range(first, last):
            for begin in range(0, num_inputs, DEEP):
                count = min(DEEP, num_inputs - begin)
                at, ahead = (panel * num_inputs + begin) * PANEL, 0
                column = (panel - first) * PANEL
                before, step = (bias[panel * PANEL :], 0) if begin == 0 else (y[column:], width)
                for r in range(floor, top, HIGH):
                    ahead = at + count * PANEL + (r - floor) // HIGH * lines * _LINE
                    _tile(
                        x, r * num_inputs + begin, num_inputs, count, panels, at, ahead, lines,
                        before, r * step, step, y, r * width + column, width,
                    )  # fmt: skip


@inner()
def share(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, y: Floats,
    num_outputs: int, first: int, last: int,
) -> None:  # fmt: skip
    """y's columns of panels from `first` to `last`, of which the very last may have too many."""
    whole = min(last, num_outputs // PANEL)
    if first < whole:
        left = y[first * PANEL :]
        _whole_panels(x, num_rows, num_inputs, panels, bias, first, whole, left, num_outputs)
    if max(first, whole) < last:
        spare = np.empty(num_rows * PANEL, np.float32)
        _whole_panels(x, num_rows, num_inputs, panels, bias, last - 1, last, spare, PANEL)
        column = (last - 1) * PANEL
        for r in range(num_rows):
            for c in range(num_outputs - column):
                y[r * num_outputs + column + c] = spare[r * PANEL + c]


_SIGNATURE = "void(float32[::1], int64, int64, float32[::1], float32[::1], float32[::1], int64"


@entry(_SIGNATURE + ")")
def _alone(
    x: Floats,  # [T K]
    num_rows: int,  # 1, or a multiple of HIGH
    num_inputs: int,
    panels: Floats,  # [P K PANEL]
    bias: Floats,  # [>= P PANEL]
    y: Floats,  # [T N]
    num_outputs: int,
) -> None:
    """Writes y, in one thread."""
    last = -(-num_outputs // PANEL)
    share(x, num_rows, num_inputs, panels, bias, y, num_outputs, 0, last)


@entry(_SIGNATURE + ", int64)", parallel=True)
def _in_threads(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, y: Floats,
    num_outputs: int, num_threads: int,
) -> None:  # fmt: skip
    """The same, some panels a thread; of many rows some of them, which comes out even."""
    num_panels, floors = -(-num_outputs // PANEL), num_rows // _FLOOR
    for thread in numba.prange(num_threads):
        if floors < 2 * num_threads:
            first = num_panels * thread // num_threads
            last = num_panels * (thread + 1) // num_threads
            share(x, num_rows, num_inputs, panels, bias, y, num_outputs, first, last)
        else:
            begin = floors * thread // num_threads * _FLOOR
            end = floors * (thread + 1) // num_threads * _FLOOR
            if thread == num_threads - 1:
                end = num_rows
            share(
                x[begin * num_inputs :], end - begin, num_inputs, panels, bias,
                y[begin * num_outputs :], num_outputs, 0, num_panels,
            )  # fmt: skip


def room(num_rows: int, num_outputs: int) -> tuple[int, int, int]:
    """Rows of x that are read, and rows and columns of y that are written."""
    rows = num_rows if num_rows == 1 else -(-num_rows // HIGH) * HIGH
    return rows, rows, num_outputs


def load() -> None:
    """Compile the loops, or load them from disk."""
    load_entries(_alone, _in_threads)


def fill(*given: Any, num_threads: int) -> None:
    """Writes y, in so many threads; given: as of `_alone`."""
    run_loops(_alone, _in_threads, *given, num_threads=num_threads)
