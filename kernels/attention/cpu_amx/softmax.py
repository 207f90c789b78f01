"""Softmax of attention scores, for attention with AMX."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.intrinsics import max_lanes, sum_lanes
from penstock.kernels.attention.cpu_inner import FASTMATH, apply_score_mod, one_over
from penstock.kernels.cpu_common.amx import ROWS
from penstock.kernels.cpu_common.exponential import exp
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import load_wide, splat_wide, vadd, vmax

Floats = npt.NDArray[np.float32]


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
