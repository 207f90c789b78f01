"""Mixture-of-experts loops of the CPU step graph, compiled by numba: see `routing` and `op`.

Shapes: T tokens, E experts, k choices (chosen experts) per token, D features.

Choice `rank` of token t has the number t * k + rank, and has one row in each matrix that is sorted
by expert. Matrix products may write more rows than an expert has. Padding rows therefore follow
each expert's rows.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.exponential import exp
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.partition import f32_array, partition
from penstock.kernels.step_graph.opcodes import (
    ALIGNMENT,
    CHOICES,
    EXPERT_WEIGHTS,
    LAYOUT,
    NORMALISE,
    NUM_EXPERTS,
    OUT,
    OUT_WIDTH,
    SHARED,
    SHARED_GATE,
    TOP_K,
    WEIGHT,
    X_WIDTH,
    X,
)

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]

_f32 = np.float32


@inner(fastmath={"contract", "reassoc"})
def _dot(x: Floats, y: Floats) -> Any:
    total = _f32(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@inner()
def gemv(op: Longs, arena: Floats, num_rows: int, me: int, count: int) -> None:
    """Compute x Wᵀ [T, E] for x [T, D] and a small unpacked weight W [E, D]."""
    dim, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    weight = f32_array(op[WEIGHT], num_outputs * dim)
    first, last = partition(num_outputs * num_rows, me, count)
    for number in range(first, last):
        e, t = number // num_rows, number % num_rows
        row = arena[op[X] + t * dim :][:dim]
        arena[op[OUT] + t * num_outputs + e] = _dot(row, weight[e * dim : (e + 1) * dim])


@inner()
def _softmax(row: Floats) -> None:
    most = row[0]
    for e in range(len(row)):
        if row[e] > most:
            most = row[e]
    for e in range(len(row)):
        row[e] = exp(row[e] - most)
    total = _f32(0)
    for e in range(len(row)):
        total += row[e]
    for e in range(len(row)):
        row[e] /= total


@inner()
def _pop_largest(merits: Floats) -> int:
    """Return the index of the largest element (the first on ties), and set the element to -2."""
    best = 0
    for e in range(1, len(merits)):
        if merits[e] > merits[best]:
            best = e
    merits[best] = -2
    return best


@inner()
def _choose_experts(
    op: Longs, arena: Floats, ints: Longs, num_rows: int, me: int, count: int, merits: Floats
) -> None:
    """Choose the experts and weights of each token; see `topk_softmax`.

    `merits` [E] is a scratch array.
    """
    num_experts, top_k = op[NUM_EXPERTS], op[TOP_K]
    first, last = partition(num_rows, me, count)
    for t in range(first, last):
        chances = arena[op[X] + t * num_experts :][:num_experts]
        weights = arena[op[OUT] + t * top_k :][:top_k]
        chosen = ints[op[CHOICES] + t * top_k :][:top_k]
        _softmax(chances)
        for e in range(num_experts):  # a NaN ranks below every other score
            merits[e] = chances[e] if chances[e] == chances[e] else _f32(-1)
        total = _f32(0)
        for rank in range(top_k):
            chosen[rank] = _pop_largest(merits)
            weights[rank] = chances[chosen[rank]]
            total += weights[rank]
        for rank in range(top_k if op[NORMALISE] else 0):
            weights[rank] /= total + _f32(1e-20)


@inner(allocates=True)
def topk_softmax(op: Longs, arena: Floats, ints: Longs, num_rows: int, me: int, count: int) -> None:
    """Choose the experts and weights of each token, both [T, k], from logits [T, E].

    The logits are overwritten.
    """
    merits = np.empty(op[NUM_EXPERTS], np.float32)
    _choose_experts(op, arena, ints, num_rows, me, count, merits)


@inner()
def _num_written(num_rows: int) -> int:
    """Return `num_rows` plus the padding rows that a matrix product may also read or write."""
    if num_rows <= 1:
        return num_rows
    high = 8 if num_rows <= 16 else ALIGNMENT
    return -(-num_rows // high) * high


@inner(allocates=True)
def permute_index(op: Longs, ints: Longs, num_rows: int, me: int) -> None:
    """Assign rows to the choices, sorted by expert (counting sort).

    The function writes each expert's first row and number of rows. In `choices`, it replaces each
    choice's expert number by the choice's row. Only thread 0 does this work.
    """
    if me > 0:
        return
    num_experts = op[NUM_EXPERTS]
    starts = ints[op[LAYOUT] :][:num_experts]
    counts = ints[op[LAYOUT] + num_experts :][:num_experts]
    choices, at = ints[op[CHOICES] :][: num_rows * op[TOP_K]], 0
    counts[:] = 0
    for expert in choices:
        counts[expert] += 1
    for e in range(num_experts):
        starts[e] = at
        at += _num_written(counts[e])
    following = starts.copy()
    for number in range(len(choices)):
        expert = choices[number]
        choices[number] = following[expert]
        following[expert] += 1


@inner()
def permute(op: Longs, arena: Floats, ints: Longs, num_rows: int, me: int, count: int) -> None:
    """Copy each token's row to the rows of the token's choices."""
    dim, top_k = op[X_WIDTH], op[TOP_K]
    first, last = partition(num_rows * top_k, me, count)
    for number in range(first, last):
        row = arena[op[X] + number // top_k * dim :][:dim]
        target = arena[op[OUT] + ints[op[CHOICES] + number] * dim :][:dim]
        for i in range(dim):
            target[i] = row[i]


@inner()
def _sigmoid(x: Any) -> Any:
    return _f32(1) / (_f32(1) + _f32(math.exp(-x)))


@inner()
def unpermute_sum(
    op: Longs, arena: Floats, ints: Longs, num_rows: int, me: int, count: int
) -> None:
    """Compute the weighted sum of each token's expert outputs, in the order of the choices.

    If there is a shared expert, its output is added. If the shared expert has a gate, its output is
    first multiplied by the sigmoid of the gate. The columns are divided among the threads.
    """
    dim, top_k, shared_at, gate_at = op[X_WIDTH], op[TOP_K], op[SHARED], op[SHARED_GATE]
    first, last = partition(dim // 16, me, count)
    first, size = first * 16, (last - first) * 16
    for t in range(num_rows):
        out = arena[op[OUT] + t * dim + first :][:size]
        for rank in range(top_k):
            number = t * top_k + rank
            weight, row = arena[op[EXPERT_WEIGHTS] + number], ints[op[CHOICES] + number]
            output = arena[op[X] + row * dim + first :][:size]
            if rank == 0:
                for i in range(size):
                    out[i] = weight * output[i]
            else:
                for i in range(size):
                    out[i] += weight * output[i]
        if shared_at >= 0:
            weight = _sigmoid(arena[gate_at + t]) if gate_at >= 0 else _f32(1)
            output = arena[shared_at + t * dim + first :][:size]
            for i in range(size):
                out[i] += weight * output[i]
