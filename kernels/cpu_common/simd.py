"""Numba intrinsics on float32 vectors, for loops that need a fixed order of summation.

When a compiler vectorizes scalar loops, it may choose a different order of summation for each loop.
It does not reorder the operations of this module. All arrays are one-dimensional.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.extending import intrinsic

from penstock.kernels.cpu_common.cpu_features import vector_width

VECTOR_WIDTH = vector_width()
"""Number of float32 lanes of this CPU's widest vectors."""


def simd_intrinsic(function: Any) -> Any:
    """Apply numba's decorator `intrinsic`, with type annotations for mypy."""
    return intrinsic(function)


class F32Vec(types.Type):
    """The numba type of a float32 vector with `width` lanes."""

    def __init__(self, width: int) -> None:
        super().__init__(name=f"Lanes({width})")
        self.width = width


@register_default(F32Vec)
class _F32VecModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, ir.VectorType(ir.FloatType(), lanes.width))


def _pointer(context, builder, signature, arguments):
    """Emit a pointer to element `arguments[1]` of the flat array `arguments[0]`."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


def _loads(width: int):
    lanes = F32Vec(width)

    @simd_intrinsic
    def load(typing, array, at):
        """Load a vector from `array[at:]`. The address need not be aligned."""

        def code(context, builder, signature, arguments):
            vector = context.get_value_type(lanes)
            pointer = _pointer(context, builder, signature, arguments)
            return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)

        return lanes(array, types.intp), code

    return load


@simd_intrinsic
def load_bf16_as_f32(typing, array, at):
    """Load VECTOR_WIDTH bfloat16 (stored as uint16) from `array[at:]`, converted to float32."""
    lanes = F32Vec(VECTOR_WIDTH)

    def code(context, builder, signature, arguments):
        narrow, wide = (ir.VectorType(ir.IntType(bits), VECTOR_WIDTH) for bits in (16, 32))
        pointer = _pointer(context, builder, signature, arguments)
        found = builder.load(builder.bitcast(pointer, narrow.as_pointer()), align=2)
        upper = builder.shl(builder.zext(found, wide), ir.Constant(wide, [16] * VECTOR_WIDTH))
        return builder.bitcast(upper, context.get_value_type(lanes))

    return lanes(array, types.intp), code


@simd_intrinsic
def load_i8_as_f32(typing, array, at):
    """Load VECTOR_WIDTH int8 from `array[at:]`, converted to float32."""
    lanes = F32Vec(VECTOR_WIDTH)

    def code(context, builder, signature, arguments):
        narrow, wide = (ir.VectorType(ir.IntType(bits), VECTOR_WIDTH) for bits in (8, 32))
        pointer = _pointer(context, builder, signature, arguments)
        found = builder.load(builder.bitcast(pointer, narrow.as_pointer()), align=1)
        return builder.sitofp(builder.sext(found, wide), context.get_value_type(lanes))

    return lanes(array, types.intp), code


@simd_intrinsic
def load_e4m3_as_f32(typing, array, at):
    """Load VECTOR_WIDTH float8_e4m3fn (stored as uint8) from `array[at:]`, converted to float32.

    NaN is not supported.
    """
    lanes = F32Vec(VECTOR_WIDTH)

    def code(context, builder, signature, arguments):
        narrow, wide = (ir.VectorType(ir.IntType(bits), VECTOR_WIDTH) for bits in (8, 32))
        floats = context.get_value_type(lanes)

        def splat(kind, value):
            return ir.Constant(kind, [value] * VECTOR_WIDTH)

        pointer = _pointer(context, builder, signature, arguments)
        found = builder.load(builder.bitcast(pointer, narrow.as_pointer()), align=1)
        bits = builder.zext(found, wide)
        size = builder.and_(bits, splat(wide, 0x7F))
        # For normal numbers, move the exponent to its place in a float32 and change its bias from
        # 7 to 127.
        normal = builder.add(builder.shl(size, splat(wide, 20)), splat(wide, 120 << 23))
        tiny = builder.fmul(builder.sitofp(size, floats), splat(floats, 2.0**-9))
        is_tiny = builder.icmp_unsigned("<", size, splat(wide, 8))
        value = builder.select(is_tiny, builder.bitcast(tiny, wide), normal)
        sign = builder.shl(builder.and_(bits, splat(wide, 0x80)), splat(wide, 24))
        return builder.bitcast(builder.or_(value, sign), floats)

    return lanes(array, types.intp), code


@simd_intrinsic
def float_of_bits(typing, bits):
    """Reinterpret the lower 32 bits of an integer as a float32."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), code


@simd_intrinsic
def bits_of_float(typing, value):
    """Return the bits of a float32 as an int64 in [0, 2^32)."""

    def code(context, builder, signature, arguments):
        return builder.zext(builder.bitcast(arguments[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), code


@simd_intrinsic
def load_i32_as_f32(typing, array, at):
    """Load VECTOR_WIDTH int32 from `array[at:]` and round each to the nearest float32."""
    lanes = F32Vec(VECTOR_WIDTH)

    def code(context, builder, signature, arguments):
        whole = ir.VectorType(ir.IntType(32), VECTOR_WIDTH)
        pointer = _pointer(context, builder, signature, arguments)
        found = builder.load(builder.bitcast(pointer, whole.as_pointer()), align=4)
        return builder.sitofp(found, context.get_value_type(lanes))

    return lanes(array, types.intp), code


def _broadcast(context, builder, lanes, value):
    none = ir.Constant(context.get_value_type(lanes), ir.Undefined)
    one = builder.insert_element(none, value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes.width), [0] * lanes.width)
    return builder.shuffle_vector(one, none, mask)


def _splats(width: int):
    lanes = F32Vec(width)

    @simd_intrinsic
    def splat(typing, value):
        """Broadcast `value` to all lanes."""

        def code(context, builder, signature, arguments):
            return _broadcast(context, builder, lanes, arguments[0])

        return lanes(types.float32), code

    return splat


load8, load_wide = _loads(8), _loads(VECTOR_WIDTH)
splat8, splat_wide = _splats(8), _splats(VECTOR_WIDTH)


@simd_intrinsic
def store(typing, array, at, value):
    """Store a vector to `array[at:]`. The address need not be aligned."""

    def code(context, builder, signature, arguments):
        address = _pointer(context, builder, signature, arguments)
        pointer = builder.bitcast(address, arguments[2].type.as_pointer())
        builder.store(arguments[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), code


def _prefetches(nearness: int, to_write: bool = False):
    @simd_intrinsic
    def prefetch_at(typing, array, at):
        """Prefetch the cache line that contains `array[at]`."""

        def code(context, builder, signature, arguments):
            pointer = _pointer(context, builder, signature, arguments)
            number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
            function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            called = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
            how = [ir.Constant(number, value) for value in (int(to_write), nearness, 1)]
            builder.call(called, [builder.bitcast(pointer, byte), *how])
            return context.get_dummy_value()

        return types.void(array, types.intp), code

    return prefetch_at


prefetch, prefetch_write = _prefetches(2), _prefetches(3, to_write=True)
"""Prefetch of a cache line for reading (`prefetch`) or for writing (`prefetch_write`). `prefetch`
fills only the L2 cache, so that no data in use is evicted from L1."""


@simd_intrinsic
def broadcast_load(typing, array, at):
    """Load `array[at]` (`at` >= 0) and broadcast it to every lane of a full-width vector."""
    lanes = F32Vec(VECTOR_WIDTH)

    def code(context, builder, signature, arguments):
        value = builder.load(_pointer(context, builder, signature, arguments))
        return _broadcast(context, builder, lanes, value)

    return lanes(array, types.intp), code


@simd_intrinsic
def fma(typing, a, b, c):
    """Compute a * b + c with one rounding. The operands are all vectors or all scalars."""

    def code(context, builder, signature, arguments):
        kind = arguments[0].type
        name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
        function = ir.FunctionType(kind, [kind] * 3)
        called = cgutils.get_or_insert_function(builder.module, function, name)
        return builder.call(called, arguments)

    return c(c, c, c), code


@simd_intrinsic
def vadd(typing, a, b):
    """Compute a + b per lane."""

    def code(context, builder, signature, arguments):
        return builder.fadd(*arguments)

    return a(a, a), code


@simd_intrinsic
def vmul(typing, a, b):
    """Compute a * b per lane."""

    def code(context, builder, signature, arguments):
        return builder.fmul(*arguments)

    return a(a, a), code


@simd_intrinsic
def vmax(typing, a, b):
    """Compute the maximum of `a` and `b` per lane. If either is NaN, the result is `b`."""

    def code(context, builder, signature, arguments):
        one, other = arguments
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    return a(a, a), code


def _shuffled(builder, one, other, indices):
    """Select lanes by `indices` from the concatenation of `one` and `other`."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), list(indices))
    return builder.shuffle_vector(one, other, mask)


def _halves(builder, lanes):
    """Add the upper four of eight lanes to the lower four: h_j = a_j + a_(j + 4)."""
    low, high = (_shuffled(builder, lanes, lanes, range(at, at + 4)) for at in (0, 4))
    return builder.fadd(low, high)


@simd_intrinsic
def hsum(typing, lanes):
    """Sum eight lanes as ((h0 + h1) + h2) + h3, with h_j = a_j + a_(j + 4)."""

    def code(context, builder, signature, arguments):
        halves = _halves(builder, arguments[0])
        sums = [builder.extract_element(halves, ir.Constant(ir.IntType(32), j)) for j in range(4)]
        return builder.fadd(builder.fadd(builder.fadd(sums[0], sums[1]), sums[2]), sums[3])

    return types.float32(lanes), code


@simd_intrinsic
def hsum4(typing, a, b, c, d):
    """Return the `hsum` of four vectors in four lanes; bitwise identical to four `hsum` calls."""

    def code(context, builder, signature, arguments):
        ha, hb, hc, hd = (_halves(builder, each) for each in arguments)
        ab = [_shuffled(builder, ha, hb, indices) for indices in ([0, 4, 1, 5], [2, 6, 3, 7])]
        cd = [_shuffled(builder, hc, hd, indices) for indices in ([0, 4, 1, 5], [2, 6, 3, 7])]
        h = [
            _shuffled(builder, ab[j // 2], cd[j // 2], [0, 1, 4, 5] if j % 2 == 0 else [2, 3, 6, 7])
            for j in range(4)
        ]
        return builder.fadd(builder.fadd(builder.fadd(h[0], h[1]), h[2]), h[3])

    return F32Vec(4)(a, b, c, d), code
