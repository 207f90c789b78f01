"""Numba intrinsics for products of 8-bit integers, with AVX-512 VNNI or AVX2.

The operands are vectors of 32-bit words: four inputs per word (bytes), four weights per word
(signed bytes), and int32 sums. The four products of a word are added to the word's sum.

- AVX-512 VNNI has one instruction for this (VPDPBUSD). Inputs have the zero point 128, and are from
  1 to 255. The zero point is part of the initial sums.
- With AVX2, inputs have no zero point, and are from -127 to 127. VPMADDUBSW multiplies the
  magnitudes of weights by inputs with the signs of the weights, and adds two products: at most
  2 * 128 * 127, which fits in 16 bits. VPMADDWD adds two of these sums.

Nothing saturates. Sums that fit in int32 are exact, and both ways give the same sums.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.emit import (
    BYTE,
    HALF_WORD,
    INDEX,
    LANES,
    WORD,
    WORDS,
    array_data,
    broadcast,
    constant,
    filled,
    load_vector,
    prefetch_pointer,
    vector_at,
)
from penstock.kernels.cpu_common.simd import simd_intrinsic

TILE_K, TILES_ACROSS = 64, 4
"""Number of inputs per step, and number of tiles of 16 outputs per block, as in
`linear/cpu_packed_int8`."""

MAX_ROWS = 6 if LANES == 16 else 4
"""Maximum number of rows of `multiply_rows`. The sums of these rows, the weights and the inputs of
one row fit in the registers: 32 with AVX-512, 16 with AVX2."""

SIGNED_INPUTS = LANES != 16
"""Whether inputs are signed bytes without a zero point (AVX2)."""

_TILE_OUTPUTS = 16
_QUADS = TILE_K // 4  # number of 32-bit words per step; a word contains four inputs
_TILE_BYTES = _QUADS * _TILE_OUTPUTS * 4
_STEP_BYTES = TILES_ACROSS * _TILE_BYTES


@dataclass(frozen=True, slots=True)
class _Block:
    """The arguments of `multiply`; arrays are replaced by pointers to their data."""

    qvalues: Any
    at: Any
    width: Any
    weights: Any
    weights_at: Any
    num_steps: Any
    starts: Any
    column: Any
    sums: Any


def multiply_rows(num_rows: int, ahead: int):
    """Return an intrinsic that multiplies `num_rows` rows by one block of 64 outputs.

    Args:
        num_rows: 1 to MAX_ROWS.
        ahead: prefetch distance in bytes: weights are prefetched this far after the weights in use.
            0 means that nothing is prefetched.
    """

    @simd_intrinsic
    def multiply(typing, qvalues, at, width, weights, weights_at, num_steps, starts, column, sums):
        """Write inputs times weights to the first `num_rows * 64` elements of `sums`.

        Args:
            qvalues: uint8 array with the bytes of the inputs, see `SIGNED_INPUTS`. Row r begins at
                index `at + r * width`.
            weights: uint8; the block begins at index `weights_at`: [num_steps, 4, 16, 16, 4] int8.
            num_steps: number of steps of TILE_K inputs.
            starts: int32; 64 elements from index `column` on are minus the zero point times the sum
                of an output's weights.
            sums: int32.
        """
        size = types.intp
        result = types.void(qvalues, size, size, weights, size, size, starts, size, sums)

        def code(context, builder, signature, arguments):
            block = _Block(*array_data(context, builder, signature, arguments))
            num_tiles = TILES_ACROSS if LANES == 16 else _TILES_AT_ONCE_AVX2[num_rows]
            for first_tile in range(0, TILES_ACROSS, num_tiles):
                outputs = range(
                    _TILE_OUTPUTS * first_tile, _TILE_OUTPUTS * (first_tile + num_tiles)
                )
                _multiply(builder, block, num_rows, outputs[::LANES], ahead)
            return context.get_dummy_value()

        return result, code

    return multiply


_TILES_AT_ONCE_AVX2 = {1: 4, 2: 2, 3: 1, 4: 1}
"""Number of tiles whose sums are in registers at the same time, by number of rows."""


def _multiply(builder, block: _Block, num_rows: int, outputs: range, ahead: int) -> None:
    """Emit the products of all rows and the vectors of outputs that begin at `outputs`."""
    totals = _start_totals(builder, block, num_rows, outputs)
    add_products = _add_products_vnni if LANES == 16 else _add_products_avx2
    with cgutils.for_range(builder, block.num_steps, intp=INDEX) as step:
        step_at = _index(builder, block.weights_at, step.index, _STEP_BYTES)
        step_inputs = _index(builder, block.at, step.index, TILE_K)
        with cgutils.for_range(builder, constant(_QUADS), intp=INDEX) as quad:
            quad_at = _index(builder, step_at, quad.index, 4 * _TILE_OUTPUTS)
            columns = _load_weights(builder, block.weights, quad_at, outputs, ahead)
            quad_inputs = _index(builder, step_inputs, quad.index, 4)
            inputs = [
                _four_inputs(builder, block.qvalues, _index(builder, quad_inputs, block.width, r))
                for r in range(num_rows)
            ]
            add_products(builder, totals, columns, inputs)
    for r, row in enumerate(totals):
        for output, total in zip(outputs, row, strict=True):
            at = constant(TILES_ACROSS * _TILE_OUTPUTS * r + output)
            target = vector_at(builder, block.sums, at, WORDS)
            builder.store(builder.load(total), target, align=4)


def _index(builder, first, number, step: int):
    """Emit `first + number * step`."""
    return builder.add(first, builder.mul(number, constant(step)))


def _start_totals(builder, block: _Block, num_rows: int, outputs: range) -> list[list[Any]]:
    """Emit the sums [num_rows][vectors] as variables with initial values.

    LLVM keeps these variables in registers.
    """
    totals = [[cgutils.alloca_once(builder, WORDS) for _ in outputs] for _ in range(num_rows)]
    for c, output in enumerate(outputs):
        start = filled(WORDS, 0)
        if LANES == 16:
            at = builder.add(block.column, constant(output))
            start = load_vector(builder, block.starts, at, WORDS, 4)
        for row in totals:
            builder.store(start, row[c])
    return totals


def _load_weights(builder, weights, at, outputs: range, ahead: int) -> list[Any]:
    """Emit loads of the weights of four inputs for `outputs`, and prefetches `ahead` of them."""
    columns = []
    for output in outputs:
        tile, inside = divmod(output, _TILE_OUTPUTS)
        index = builder.add(at, constant(tile * _TILE_BYTES + 4 * inside))
        columns.append(load_vector(builder, weights, index, WORDS, 1))
        if ahead and inside == 0:
            prefetch_pointer(builder, builder.gep(weights, [builder.add(index, constant(ahead))]))
    return columns


def _four_inputs(builder, qvalues, at):
    """Emit a vector with the four inputs from index `at` on in each word."""
    pointer = builder.bitcast(builder.gep(qvalues, [at]), WORD.as_pointer())
    return broadcast(builder, builder.load(pointer, align=1))


def _add_products_vnni(builder, totals, columns, inputs) -> None:
    """Emit code that adds to `totals` the products of each row's four inputs and `columns`."""
    function = ir.FunctionType(WORDS, [WORDS] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    called = cgutils.get_or_insert_function(builder.module, function, name)
    for words, row in zip(inputs, totals, strict=True):
        for total, weights in zip(row, columns, strict=True):
            builder.store(builder.call(called, [builder.load(total), words, weights]), total)


_BYTES, _HALVES = ir.VectorType(BYTE, 4 * LANES), ir.VectorType(HALF_WORD, 2 * LANES)


def _add_products_avx2(builder, totals, columns, inputs) -> None:
    """Do the work of `_add_products_vnni` with AVX2."""
    copy_signs = _instruction(builder, "psign.b", _BYTES, _BYTES)
    multiply = _instruction(builder, "pmadd.ub.sw", _HALVES, _BYTES)
    add_pairs = _instruction(builder, "pmadd.wd", WORDS, _HALVES)
    magnitude = _magnitude(builder)
    ones = ir.Constant(_HALVES, [1] * (2 * LANES))
    signed_inputs = [builder.bitcast(words, _BYTES) for words in inputs]
    for c, words in enumerate(columns):
        weights = builder.bitcast(words, _BYTES)
        magnitudes = magnitude(weights)
        for row_inputs, row in zip(signed_inputs, totals, strict=True):
            signed = builder.call(copy_signs, [row_inputs, weights])
            products = builder.call(multiply, [magnitudes, signed])
            sums = builder.call(add_pairs, [products, ones])
            builder.store(builder.add(builder.load(row[c]), sums), row[c])


def _magnitude(builder) -> Callable[[Any], Any]:
    """Return a function that emits the magnitudes of signed bytes; that of -128 is 128."""
    kind = ir.FunctionType(_BYTES, [_BYTES, ir.IntType(1)])
    called = cgutils.get_or_insert_function(builder.module, kind, f"llvm.abs.v{4 * LANES}i8")
    return lambda values: builder.call(called, [values, ir.Constant(ir.IntType(1), 0)])


def _instruction(builder, name: str, result, operand):
    """Return an AVX2 instruction with two operands of the same type, as an LLVM intrinsic."""
    kind = ir.FunctionType(result, [operand] * 2)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx2.{name}")
