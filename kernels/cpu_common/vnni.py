"""Numba intrinsics for products of 8-bit integers with AVX-512 VNNI.

The operands of an instruction (VPDPBUSD) are vectors of 16 32-bit words: four unsigned bytes per
word, four signed bytes per word, and int32 sums. The four products of a word are added to the
word's sum. The instruction does not saturate, so sums that fit in int32 are exact.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import itertools
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.emit import (
    INDEX,
    WORD,
    WORDS,
    broadcast,
    constant,
    load_vector,
    prefetch_pointer,
    vector_at,
)
from penstock.kernels.cpu_common.simd import simd_intrinsic

TILE_K, TILES_ACROSS = 64, 4
"""Number of inputs per step, and number of vectors of 16 outputs per block, as in
`linear/cpu_packed_int8`."""

_QUADS = TILE_K // 4  # number of 32-bit words per step; a word contains four inputs
_TILE_BYTES = _QUADS * 64
_STEP_BYTES = TILES_ACROSS * _TILE_BYTES


def multiply_rows(num_rows: int, ahead: int):
    """Return an intrinsic that multiplies `num_rows` rows by one block of 64 outputs.

    Args:
        num_rows: 1 to 6. With 6 rows, sums and weights fill 28 of the 32 registers.
        ahead: prefetch distance in bytes: weights are prefetched this far after the weights in use.
            0 means that nothing is prefetched.
    """

    @simd_intrinsic
    def multiply(typing, qvalues, at, width, weights, weights_at, num_steps, starts, column, sums):
        """Write `starts + qvalues weights` to the first `num_rows * 64` elements of `sums`.

        Args:
            qvalues: uint8; row r begins at index `at + r * width`.
            weights: uint8; the block begins at index `weights_at`: [num_steps, 4, 16, 16, 4] int8.
            num_steps: number of steps of TILE_K inputs.
            starts: int32; 64 elements from index `column` on are the initial sums of each row.
            sums: int32.
        """
        size = types.intp
        result = types.void(qvalues, size, size, weights, size, size, starts, size, sums)

        def code(context, builder, signature, arguments):
            _, at, width, _, weights_at, num_steps, _, column, _ = arguments
            inputs, given, first, out = (
                context.make_array(signature.args[index])(context, builder, arguments[index]).data
                for index in (0, 3, 6, 8)
            )
            totals = _start_totals(builder, num_rows, first, column)
            with cgutils.for_range(builder, num_steps, intp=INDEX) as step:
                step_at = _index(builder, weights_at, step.index, _STEP_BYTES)
                step_inputs = _index(builder, at, step.index, TILE_K)
                with cgutils.for_range(builder, constant(_QUADS), intp=INDEX) as quad:
                    quad_at = _index(builder, step_at, quad.index, 64)
                    columns = _load_weights(builder, given, quad_at, ahead)
                    quad_at = _index(builder, step_inputs, quad.index, 4)
                    _add_products(builder, totals, columns, inputs, quad_at, width)
            for number, total in enumerate(itertools.chain.from_iterable(totals)):
                target = vector_at(builder, out, constant(16 * number), WORDS)
                builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        return result, code

    return multiply


def _index(builder, first, number, step: int):
    """Emit `first + number * step`."""
    return builder.add(first, builder.mul(number, constant(step)))


def _start_totals(builder, num_rows: int, first, column) -> list[list[Any]]:
    """Emit the sums [num_rows][TILES_ACROSS] as variables with initial values.

    LLVM keeps these variables in registers.
    """
    totals = [
        [cgutils.alloca_once(builder, WORDS) for _ in range(TILES_ACROSS)] for _ in range(num_rows)
    ]
    for c in range(TILES_ACROSS):
        at = builder.add(column, constant(16 * c))
        start = load_vector(builder, first, at, WORDS, 4)
        for row in totals:
            builder.store(start, row[c])
    return totals


def _load_weights(builder, given, at, ahead: int) -> list[Any]:
    """Emit loads of the weights of four inputs for 64 outputs, and prefetches `ahead` of them."""
    columns = []
    for c in range(TILES_ACROSS):
        index = builder.add(at, constant(c * _TILE_BYTES))
        columns.append(load_vector(builder, given, index, WORDS, 1))
        if ahead:
            later = builder.gep(given, [builder.add(index, constant(ahead))])
            prefetch_pointer(builder, later)
    return columns


def _add_products(builder, totals, columns, inputs, at, width) -> None:
    """Emit code that adds to `totals` the products of each row's four inputs and `columns`."""
    function = ir.FunctionType(WORDS, [WORDS] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    called = cgutils.get_or_insert_function(builder.module, function, name)
    for r, row in enumerate(totals):
        pointer = builder.gep(inputs, [_index(builder, at, width, r)])
        word = builder.load(builder.bitcast(pointer, WORD.as_pointer()), align=1)
        words = broadcast(builder, word)
        for total, weights in zip(row, columns, strict=True):
            builder.store(builder.call(called, [builder.load(total), words, weights]), total)
