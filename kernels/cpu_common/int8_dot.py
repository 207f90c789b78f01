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

BLOCK_STRIPS = 4
"""Number of strips of 16 outputs per block, as in `linear/cpu_packed_int8`."""

MAX_ROWS = 6 if LANES == 16 else 4
"""Maximum number of rows of `multiply_rows`. The sums of these rows, the weights and the inputs of
one row fit in the registers: 32 with AVX-512, 16 with AVX2."""

SIGNED_INPUTS = LANES != 16
"""Whether inputs are signed bytes without a zero point (AVX2)."""

_STRIP_OUTPUTS = 16


@dataclass(frozen=True, slots=True)
class _Block:
    """The arguments of `multiply`; arrays are replaced by pointers to their data."""

    qvalues: Any
    at: Any
    width: Any
    weights: Any
    weights_at: Any
    starts: Any
    column: Any
    sums: Any


def multiply_rows(num_rows: int, ahead: int):
    """Return an intrinsic that multiplies `num_rows` rows by one block of 64 outputs.

    Args:
        num_rows: 1 to MAX_ROWS.
        ahead: prefetch distance in inputs: while the weights of input k are multiplied, those of
            input k + `ahead` are prefetched. 0 means that nothing is prefetched.
    """

    @simd_intrinsic
    def multiply(typing, qvalues, at, width, weights, weights_at, starts, column, sums):
        """Write inputs times weights to the first `num_rows * 64` elements of `sums`.

        Args:
            qvalues: uint8 array with the bytes of the inputs, see `SIGNED_INPUTS`. Row r begins at
                index `at + r * width`, and has `width` inputs (a multiple of 4).
            weights: uint8; the block begins at index `weights_at`: [4, width / 4, 16, 4] int8.
            starts: int32; 64 elements from index `column` on are minus the zero point times the sum
                of an output's weights.
            sums: int32.
        """
        size = types.intp
        result = types.void(qvalues, size, size, weights, size, starts, size, sums)

        def code(context, builder, signature, arguments):
            block = _Block(*array_data(context, builder, signature, arguments))
            num_strips = BLOCK_STRIPS if LANES == 16 else _STRIPS_AT_ONCE_AVX2[num_rows]
            for first_strip in range(0, BLOCK_STRIPS, num_strips):
                outputs = range(
                    _STRIP_OUTPUTS * first_strip, _STRIP_OUTPUTS * (first_strip + num_strips)
                )
                _multiply(builder, block, num_rows, outputs[::LANES], ahead)
            return context.get_dummy_value()

        return result, code

    return multiply


_STRIPS_AT_ONCE_AVX2 = {1: 4, 2: 2, 3: 1, 4: 1}
"""Number of strips whose sums are in registers at the same time, by number of rows."""


def _multiply(builder, block: _Block, num_rows: int, outputs: range, ahead: int) -> None:
    """Emit the products of all rows and the vectors of outputs that begin at `outputs`."""
    totals = _start_totals(builder, block, num_rows, outputs)
    add_products = _add_products_vnni if LANES == 16 else _add_products_avx2
    strip_bytes = builder.mul(block.width, constant(_STRIP_OUTPUTS))
    with cgutils.for_range(builder, builder.udiv(block.width, constant(4)), intp=INDEX) as quad:
        quad_at = _index(builder, block.weights_at, quad.index, 4 * _STRIP_OUTPUTS)
        strip_starts = [
            _index(builder, quad_at, strip_bytes, strip)
            for strip in range(outputs.start // _STRIP_OUTPUTS, -(-outputs.stop // _STRIP_OUTPUTS))
        ]
        if ahead:
            _prefetch_weights(builder, block, strip_starts, strip_bytes, quad.index, ahead)
        columns = [
            load_vector(builder, block.weights, builder.add(at, constant(4 * lane)), WORDS, 1)
            for at in strip_starts
            for lane in range(0, _STRIP_OUTPUTS, LANES)
        ]
        quad_inputs = _index(builder, block.at, quad.index, 4)
        inputs = [
            _four_inputs(builder, block.qvalues, _index(builder, quad_inputs, block.width, r))
            for r in range(num_rows)
        ]
        add_products(builder, totals, columns, inputs)
    for r, row in enumerate(totals):
        for output, total in zip(outputs, row, strict=True):
            at = constant(BLOCK_STRIPS * _STRIP_OUTPUTS * r + output)
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


def _prefetch_weights(
    builder, block: _Block, strip_starts: list[Any], strip_bytes, quad, ahead: int
) -> None:
    """Emit prefetches of the weights `ahead` inputs after those at the indices `strip_starts`.

    After the last inputs of these strips come the first inputs of the strips that are read next.
    """
    near = constant(ahead * _STRIP_OUTPUTS)
    far = _index(builder, near, strip_bytes, len(strip_starts) - 1)
    last = builder.sub(block.width, constant(ahead))
    is_last = builder.icmp_signed(">=", builder.mul(quad, constant(4)), last)
    distance = builder.select(is_last, far, near)
    for at in strip_starts:
        pointer = builder.gep(block.weights, [builder.add(at, distance)])
        prefetch_pointer(builder, pointer)


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
