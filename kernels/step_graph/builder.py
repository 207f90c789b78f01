"""What a CPU computes for a step of a few tokens, as one program: a call instead of hundreds.

Between two of the calls that a step is made of, threads are woken, Python runs, and memory idles:
of a step of one token that was a fifth. A program is the same operations in a table, written once
for a model; threads go through it together (`thread_barrier`) and meet after each. Whoever waits
brings near what it will need of the next weights.

Operations compute on places: matrices of float32, a row a token, in one array. They are made of the
loops that compute them one by one (`linear/cpu_f32_avx512`, `linear/cpu_f32_amx_bf16x6`,
`cpu_paged`, ...), so that a row's bits are those of a step without a program; but for gates,
unless these are computed alike (`silu_and_mul_batch_invariant`): torch's exponential is another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.cpu_common.numba_runtime import configure_numba
from penstock.kernels.linear.cpu_packed_f32 import PackedLinearF32
from penstock.kernels.linear.cpu_packed_int8 import PackedLinearInt8
from penstock.kernels.step_graph.layout import TOKENS, ExpertLayout, RowRange
from penstock.kernels.step_graph.opcodes import (
    ADD,
    ALIGNMENT,
    ATTEND,
    CHOOSE,
    CONTINUES,
    COUNT,
    FIELDS,
    FIRST,
    GATE,
    GATES,
    GATHER,
    INT8_PRODUCT,
    MIX,
    NEXT,
    NORM,
    PRODUCT,
    QUANTIZE,
    SCORE,
    SORT,
)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer[Any]]

MAX_GROUP = 15
"""Query heads of a KV head: more are attended to together by other loops."""


class UnsupportedGraph(Exception):
    """No program computes this; the message says what."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A matrix [rows, width], contiguous."""

    at: int
    width: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What lies in a place, and how it is attended to: query heads, then key heads, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    angles: Buffer | None  # [rows, 2 R] cosines and sines, see `rotary`; None: nothing turns
    interleaved: bool
    window: int  # 0: none
    scores: ScoreMod


class GraphBuilder:
    """Writes a program, operation by operation, in their order.

    most_rows: tokens of a step at most; cache: [L, 2, N, H, S, D], float32 or bfloat16 on a CPU.
    """

    def __init__(self, most_rows: int, cache: Tensor) -> None:
        if cache.dim() != 6 or cache.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedGraph(f"a cache {list(cache.shape)} of {cache.dtype}")
        self._rows = most_rows + -most_rows % ALIGNMENT
        self._cache = cache
        self._size = 0
        self._num_ints = 2  # those of TOKENS
        self._table: list[list[int]] = []
        self._numbers: list[tuple[float, float]] = []
        self._kept: list[Any] = []
        self._buffers: dict[tuple[str, int, ExpertLayout | None], Buffer] = {}

    def alloc(self, width: int, layout: ExpertLayout | None = None) -> Buffer:
        """A new one; layout: with rows for each expert's tokens."""
        found = Buffer(self._size, width)
        rows = self._rows if layout is None else layout.num_rows(self._rows)
        self._size += rows * (width + -width % 16)
        return found

    def scratch(self, name: str, width: int, layout: ExpertLayout | None = None) -> Buffer:
        """The one of this name and shape, for what is used up before it is written anew."""
        key = (name, width, layout)
        if key not in self._buffers:
            self._buffers[key] = self.alloc(width, layout)
        return self._buffers[key]

    def expert_layout(self, num_experts: int, top_k: int) -> ExpertLayout:
        """A new one."""
        at = self._num_ints
        self._num_ints += 2 * num_experts + self._rows * top_k
        return ExpertLayout(at, at + 2 * num_experts, num_experts, top_k)

    def norm(
        self,
        x: Buffer,
        weight: Tensor,
        eps: float,
        out: Buffer,
        added: Buffer | None = None,
        groups: slice | None = None,
    ) -> None:
        """out = RMS norm of x, to which `added` is added first, in place.

        groups: of the parts of a row that are as long as the weight [D] is, only these; alone.
        """
        dim = len(weight)
        some = groups or slice(0, 1)
        if some.stop * dim > x.width or (groups is None and dim != x.width):
            raise UnsupportedGraph(f"a norm of {dim} features of {x}, {groups}")
        first, count = some.start * dim, some.stop - some.start
        self._write(
            NORM, x.at + first, x.width, count, dim, self._address(weight.contiguous()),
            out.at + first, out.width, -1 if added is None else added.at, numbers=(eps, 0.0),
        )  # fmt: skip

    def supports_linear(self, x: Buffer, product: Any, y: Buffer) -> bool:
        """Whether `product` can be written."""
        if isinstance(product, PackedLinearInt8):
            return y.width % ALIGNMENT == 0
        if not isinstance(product, PackedLinearF32):
            return False
        return y.width % ALIGNMENT == 0 and product.depth == x.width

    def linear(self, x: Buffer, product: Any, y: Buffer) -> None:
        """y = x Wᵀ + b."""
        self._add_linears(x, [product], y, [TOKENS], None)

    def expert_linears(
        self, x: Buffer, products: Sequence[Any], y: Buffer, layout: ExpertLayout
    ) -> None:
        """The same of every expert's rows, x and y being places of this spread."""
        self._add_linears(x, products, y, layout.all_rows(), layout)

    def _add_linears(
        self,
        x: Buffer,
        products: Sequence[Any],
        y: Buffer,
        rows: list[RowRange],
        layout: ExpertLayout | None,
    ) -> None:
        if len({type(product) for product in products}) != 1:
            raise UnsupportedGraph("products of several kinds")
        for product in products:
            if not self.supports_linear(x, product, y):
                raise UnsupportedGraph(f"a product of {x} and {y} by {type(product).__name__}")
            assert (x.width, y.width) == (product.num_inputs, product.num_outputs)
        self._kept += products
        if not isinstance(products[0], PackedLinearInt8):
            self._add_each(rows, [self._f32_fields(x, product, y) for product in products])
            return
        qvalues = self.scratch("levels", x.width // 4, layout)
        factors = self.scratch("factors", 1, layout)
        # Of all rows before the first product: so that threads meet once.
        self._add_each(rows, [(QUANTIZE, x.at, x.width, qvalues.at, factors.at)] * len(rows))
        self._add_each(
            rows, [self._int8_fields(x, qvalues, factors, product, y) for product in products]
        )

    def _f32_fields(self, x: Buffer, product: PackedLinearF32, y: Buffer) -> tuple[int, ...]:
        return (
            PRODUCT, x.at, x.width, product.panels.ctypes.data, len(product.panels),
            product.bias.ctypes.data, len(product.bias), y.at, y.width,
            int(product.batch_invariant),
        )  # fmt: skip

    def _int8_fields(
        self, x: Buffer, qvalues: Buffer, factors: Buffer, product: PackedLinearInt8, y: Buffer
    ) -> tuple[int, ...]:
        return (
            INT8_PRODUCT, qvalues.at, x.width, product.tiles.ctypes.data, len(product.tiles),
            product.shifts.ctypes.data, product.scales.ctypes.data, product.bias.ctypes.data, y.at,
            y.width, factors.at,
        )  # fmt: skip

    def _add_each(self, rows: list[RowRange], operations: Sequence[tuple[int, ...]]) -> None:
        """One operation after another, each on rows of its own: threads meet after the last."""
        for number, (own, fields) in enumerate(zip(rows, operations, strict=True)):
            self._write(*fields, rows=own, goes_on=number + 1 < len(rows))

    def attend(self, heads: Buffer, how: AttentionParams, layer: int, out: Buffer) -> None:
        """Turns heads, keeps keys and values in the layer's cache, and attends to what is there."""
        num_sides, _, num_kv_heads, block_size, head_dim = self._cache.shape[1:]
        if (num_sides, num_kv_heads, head_dim) != (2, how.num_kv_heads, how.head_dim):
            raise UnsupportedGraph(
                f"a cache {list(self._cache.shape)} for {how.num_kv_heads} KV heads"
            )
        if how.num_heads > MAX_GROUP * num_kv_heads:
            raise UnsupportedGraph(f"{how.num_heads} heads of {num_kv_heads} KV heads")
        assert heads.width == (how.num_heads + 2 * num_kv_heads) * head_dim
        assert out.width == how.num_heads * head_dim
        scores, size = how.scores, self._cache[0].numel()
        angles = how.angles or Buffer(-1, 0)
        scale = head_dim**-0.5 if scores.scale is None else scores.scale
        self._write(
            ATTEND, heads.at, how.num_heads, num_kv_heads, head_dim, block_size, out.at,
            angles.at, angles.width // 2, int(how.interleaved), layer * size, size, size // 2,
            how.window, self._by_head(scores.sinks, how.num_heads, -np.inf),
            self._by_head(scores.slopes, how.num_heads, 0.0), numbers=(scale, scores.cap),
        )  # fmt: skip

    def gate(self, x: Buffer, kind: str, out: Buffer, layout: ExpertLayout | None = None) -> None:
        """out = f(the first half of x) times the second half; kind: of GATES; layout: that of both
        places."""
        assert x.width == 2 * out.width
        rows = layout.all_rows() if layout else [TOKENS]
        self._add_each(rows, [(GATE, x.at, out.width, out.at, GATES[kind])] * len(rows))

    def add(self, x: Buffer, more: Buffer) -> None:
        """x += more."""
        assert x.width == more.width
        self._write(ADD, x.at, x.width, more.at)

    def gemv(self, x: Buffer, weight: Tensor, out: Buffer) -> None:
        """out = x Wᵀ with a small W, as it is loaded."""
        assert weight.shape == (out.width, x.width)
        address = self._address(weight.contiguous())
        self._write(SCORE, x.at, x.width, address, out.width, out.at)

    def topk_softmax(
        self, logits: Buffer, layout: ExpertLayout, normalise: bool, weights: Buffer
    ) -> None:
        """Each token's experts by `route`'s plain rule, and their weights; logits are used up."""
        num_experts, top_k = layout.num_experts, layout.top_k
        assert (logits.width, weights.width) == (num_experts, top_k)
        self._write(
            CHOOSE, logits.at, num_experts, top_k, int(normalise), weights.at, layout.choices
        )
        self._write(SORT, layout.at, num_experts, top_k, layout.choices)

    def permute(self, x: Buffer, layout: ExpertLayout, out: Buffer) -> None:
        """Each token's row to those of its experts; out: a place of this spread."""
        assert x.width == out.width
        self._write(GATHER, x.at, x.width, out.at, layout.choices, layout.top_k)

    def unpermute_sum(
        self,
        made: Buffer,
        layout: ExpertLayout,
        weights: Buffer,
        out: Buffer,
        shared: Buffer | None = None,
        gate: Buffer | None = None,
    ) -> None:
        """out = the sum of what each token's experts made, a place of this spread, by weights; and
        of what another made of every token, by the sigmoid of its gate."""
        assert made.width == out.width
        assert out.width % 16 == 0
        self._write(
            MIX, made.at, made.width, weights.at, layout.choices, layout.top_k, out.at,
            -1 if shared is None else shared.at, -1 if gate is None else gate.at,
        )  # fmt: skip

    def build(self) -> "CpuStepGraph":
        """What was written."""
        table = np.array(self._table, np.int64)
        following = -1
        for number in range(len(table) - 1, -1, -1):
            table[number, NEXT] = following
            if table[number, 0] in (PRODUCT, INT8_PRODUCT):
                following = number
            elif table[number, 0] == SORT and table[following, COUNT] != TOKENS.count:
                following = table[number, NEXT] = -1
        numbers = np.array(self._numbers, np.float32)
        storage = torch.zeros(self._size + ALIGNMENT)
        start = -storage.data_ptr() // 4 % 16  # so that places begin with a line of the cache
        arena, num_slots = (
            storage[start : start + self._size],
            self._cache[0, 0, :, 0, :, 0].numel(),
        )
        ints = np.zeros(self._num_ints, np.int64)
        return CpuStepGraph(table, numbers, ints, arena, self._flat(), num_slots, self._kept)

    def _flat(self) -> npt.NDArray[Any]:
        flat = self._cache.view(-1)
        if flat.dtype == torch.float32:
            return flat.numpy()
        return flat.view(torch.int16).numpy().view(np.uint16)

    def _by_head(self, values: Tensor | None, num_heads: int, none: float) -> int:
        given = torch.full((num_heads,), none) if values is None else values.float().contiguous()
        return self._address(given)

    def _address(self, tensor: Tensor) -> int:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise UnsupportedGraph(f"weights of {tensor.dtype} on {tensor.device}")
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _write(
        self,
        *fields: int,
        numbers: tuple[float, float] = (0.0, 0.0),
        rows: RowRange = TOKENS,
        goes_on: bool = False,
    ) -> None:
        op = [*fields, *[0] * (FIELDS - len(fields))]
        op[FIRST], op[COUNT], op[CONTINUES] = rows.first, rows.count, int(goes_on)
        self._table.append(op)
        self._numbers.append(numbers)


@dataclass(frozen=True, slots=True)
class CpuStepGraph:
    """One at a time plays it."""

    table: npt.NDArray[np.int64]  # [operations, FIELDS]
    numbers: Floats  # [operations, 2]
    ints: npt.NDArray[np.int64]  # its whole numbers, see `RowRange` and `ExpertLayout`
    arena: Tensor  # all places
    cache: npt.NDArray[Any]  # flat
    num_slots: int  # of the cache
    kept: list[Any]  # what the table has addresses of

    def view(self, buffer: Buffer, num_rows: int) -> Tensor:
        """The first rows of a place: [num_rows, width]."""
        return self.arena[buffer.at :][: num_rows * buffer.width].view(num_rows, buffer.width)

    def run(self, slots: Ints, context_lens: Ints, block_tables: Ints) -> None:
        """Computes one token of each of T sequences.

        slots: [T] where each token's keys and values go; context_lens: [T] what it sees, itself
        included; block_tables: [T, M]. IndexError where a slot is not in the cache.
        """
        if not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise IndexError(f"slots: {slots.tolist()}, of a cache of {self.num_slots}")
        self.ints[TOKENS.count] = len(slots)
        _interpreter(self.cache.dtype == np.uint16)(
            self.table, self.numbers, self.ints, self.arena.numpy(), self.cache,
            slots.astype(np.int64), context_lens.astype(np.int64),
            np.ascontiguousarray(block_tables, np.int32), num_threads=torch.get_num_threads(),
        )  # fmt: skip


def load_cpu_kernels(cache: torch.dtype) -> None:
    """Loads the loops for a cache of this dtype; compiles them, the first time on a machine."""
    _interpreter(cache == torch.bfloat16)


def _interpreter(narrow: bool) -> Any:
    configure_numba()
    from penstock.kernels.step_graph.interpreter import compile_interpreter

    return compile_interpreter(narrow)
