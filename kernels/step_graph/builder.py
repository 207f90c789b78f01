"""CPU step graphs: run a step of single tokens as one call instead of hundreds.

If every operation is a separate call, a fifth of the time of a single-token step is lost between
the calls: threads are woken, Python code runs, and memory is idle. A step graph holds the same
operations in a table that is built once per model. All threads execute the table together, with a
barrier after each operation (`thread_barrier`). Threads that wait at a barrier prefetch weights of
the next product.

Operations read and write buffers: float32 matrices with one row per token, all in one array (the
arena). The operations call the same inner loops as the separate calls (`linear/cpu_f32_avx512`,
`linear/cpu_f32_amx_bf16x6`, `attention/cpu_paged`, ...), so the results are bitwise identical with
and without a step graph. Gates are the exception, because torch's exponential rounds differently:
their results are identical only if the separate calls use the batch-invariant gates
(`silu_and_mul_batch_invariant`).
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
"""Largest number of query heads per KV head that the attention loops of a step graph support."""


class UnsupportedGraph(Exception):
    """A step graph cannot represent an operation; the message names the operation."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous matrix [rows, width] in the arena."""

    at: int  # index of the buffer's first element in the arena
    width: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of attention. An input row has query heads, then key heads, then value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    angles: Buffer | None  # [rows, 2 R] cosines, then sines, see `rope`; None: no rotary embedding
    interleaved: bool  # rotary pairs are adjacent features; False: features half a head apart
    window: int  # number of positions in the sliding window; 0: no window
    scores: ScoreMod


class GraphBuilder:
    """Builds a step graph, one operation after another, in the order of execution.

    Args:
        most_rows: maximum number of tokens per step.
        cache: KV cache [L, 2, N, H, S, D], float32 or bfloat16, on a CPU.
    """

    def __init__(self, most_rows: int, cache: Tensor) -> None:
        if cache.dim() != 6 or cache.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedGraph(f"KV cache of shape {list(cache.shape)} and {cache.dtype}")
        self._rows = most_rows + -most_rows % ALIGNMENT
        self._cache = cache
        self._size = 0
        self._num_ints = 2  # TOKENS uses the first two
        self._table: list[list[int]] = []
        self._numbers: list[tuple[float, float]] = []
        self._kept: list[Any] = []
        self._buffers: dict[tuple[str, int, ExpertLayout | None], Buffer] = {}

    def alloc(self, width: int, layout: ExpertLayout | None = None) -> Buffer:
        """Allocate a buffer with one row per token or, with `layout`, rows sorted by expert."""
        found = Buffer(self._size, width)
        rows = self._rows if layout is None else layout.num_rows(self._rows)
        self._size += rows * (width + -width % 16)
        return found

    def scratch(self, name: str, width: int, layout: ExpertLayout | None = None) -> Buffer:
        """Return the shared buffer of this name, width and layout, for short-lived values."""
        key = (name, width, layout)
        if key not in self._buffers:
            self._buffers[key] = self.alloc(width, layout)
        return self._buffers[key]

    def expert_layout(self, num_experts: int, top_k: int) -> ExpertLayout:
        """Allocate the layout for one MoE layer's choice of experts."""
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
        """Append `out = RMS norm of x`, preceded by `x += added` if `added` is given.

        groups: rows are divided into parts of D features, for weight [D]. Each part in `groups` is
        normalised separately; other parts are skipped. Cannot be combined with `added`.
        """
        dim = len(weight)
        some = groups or slice(0, 1)
        if some.stop * dim > x.width or (groups is None and dim != x.width):
            raise UnsupportedGraph(f"norm of {dim} features over {x}, groups {groups}")
        first, count = some.start * dim, some.stop - some.start
        self._write(
            NORM, x.at + first, x.width, count, dim, self._address(weight.contiguous()),
            out.at + first, out.width, -1 if added is None else added.at, numbers=(eps, 0.0),
        )  # fmt: skip

    def supports_linear(self, x: Buffer, product: Any, y: Buffer) -> bool:
        """Return whether `linear` supports this packed linear layer."""
        if isinstance(product, PackedLinearInt8):
            return y.width % ALIGNMENT == 0
        if not isinstance(product, PackedLinearF32):
            return False
        return y.width % ALIGNMENT == 0 and product.depth == x.width

    def linear(self, x: Buffer, product: Any, y: Buffer) -> None:
        """Append `y = x Wᵀ + b`, where `product` is the packed linear layer."""
        self._add_linears(x, [product], y, [TOKENS], None)

    def expert_linears(
        self, x: Buffer, products: Sequence[Any], y: Buffer, layout: ExpertLayout
    ) -> None:
        """Append one product per expert, for the rows of that expert. x and y have `layout`."""
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
            raise UnsupportedGraph("linear layers of several kinds")
        for product in products:
            if not self.supports_linear(x, product, y):
                raise UnsupportedGraph(f"product from {x} to {y} by {type(product).__name__}")
            assert (x.width, y.width) == (product.num_inputs, product.num_outputs)
        self._kept += products
        if not isinstance(products[0], PackedLinearInt8):
            self._add_each(rows, [self._f32_fields(x, product, y) for product in products])
            return
        qvalues = self.scratch("levels", x.width // 4, layout)
        factors = self.scratch("factors", 1, layout)
        # Quantize all rows before the first product, so that one barrier is enough.
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
        """Append operations, one per range of `rows`, with a single barrier after the last."""
        for number, (own, fields) in enumerate(zip(rows, operations, strict=True)):
            self._write(*fields, rows=own, goes_on=number + 1 < len(rows))

    def attend(self, heads: Buffer, how: AttentionParams, layer: int, out: Buffer) -> None:
        """Append one operation: rotary embedding, cache write of keys and values, and attention."""
        num_sides, _, num_kv_heads, block_size, head_dim = self._cache.shape[1:]
        if (num_sides, num_kv_heads, head_dim) != (2, how.num_kv_heads, how.head_dim):
            raise UnsupportedGraph(
                f"KV cache of shape {list(self._cache.shape)} for {how.num_kv_heads} KV heads"
            )
        if how.num_heads > MAX_GROUP * num_kv_heads:
            raise UnsupportedGraph(f"{how.num_heads} query heads over {num_kv_heads} KV heads")
        assert heads.width == (how.num_heads + 2 * num_kv_heads) * head_dim
        assert out.width == how.num_heads * head_dim
        scores, size = how.scores, self._cache[0].numel()
        angles = how.angles or Buffer(-1, 0)
        scale = head_dim**-0.5 if scores.scale is None else scores.scale
        self._write(
            ATTEND, heads.at, how.num_heads, num_kv_heads, head_dim, block_size, out.at,
            angles.at, angles.width // 2, int(how.interleaved), layer * size, size, size // 2,
            how.window, self._address(_per_head(scores.sinks, how.num_heads, -np.inf)),
            self._address(_per_head(scores.slopes, how.num_heads, 0.0)),
            numbers=(scale, scores.cap),
        )  # fmt: skip

    def gate(self, x: Buffer, kind: str, out: Buffer, layout: ExpertLayout | None = None) -> None:
        """Append `out = f(first half of x) * (second half of x)`.

        kind: the name of f, a key of GATES.
        layout: the layout of x and out if their rows are sorted by expert.
        """
        assert x.width == 2 * out.width
        rows = layout.all_rows() if layout else [TOKENS]
        self._add_each(rows, [(GATE, x.at, out.width, out.at, GATES[kind])] * len(rows))

    def add(self, x: Buffer, more: Buffer) -> None:
        """Append `x += more`."""
        assert x.width == more.width
        self._write(ADD, x.at, x.width, more.at)

    def gemv(self, x: Buffer, weight: Tensor, out: Buffer) -> None:
        """Append `out = x Wᵀ` for a small, unpacked W."""
        assert weight.shape == (out.width, x.width)
        address = self._address(weight.contiguous())
        self._write(SCORE, x.at, x.width, address, out.width, out.at)

    def topk_softmax(
        self, logits: Buffer, layout: ExpertLayout, normalise: bool, weights: Buffer
    ) -> None:
        """Append two operations: choose each token's experts, then sort the choices by expert.

        The first writes `weights` and overwrites `logits`. Only softmax routing without groups and
        bias is supported (see `route`).
        """
        num_experts, top_k = layout.num_experts, layout.top_k
        assert (logits.width, weights.width) == (num_experts, top_k)
        self._write(
            CHOOSE, logits.at, num_experts, top_k, int(normalise), weights.at, layout.choices
        )
        self._write(SORT, layout.at, num_experts, top_k, layout.choices)

    def permute(self, x: Buffer, layout: ExpertLayout, out: Buffer) -> None:
        """Append a copy of each token's row to the rows of its choices in `out` (with `layout`)."""
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
        """Append `out` = weighted sum of each token's expert outputs `made` (with `layout`).

        shared: output of a shared expert, added to the sum.
        gate: output of the shared expert's gate; `shared` is multiplied by the sigmoid of `gate`.
        """
        assert made.width == out.width
        assert out.width % 16 == 0
        self._write(
            MIX, made.at, made.width, weights.at, layout.choices, layout.top_k, out.at,
            -1 if shared is None else shared.at, -1 if gate is None else gate.at,
        )  # fmt: skip

    def build(self) -> "CpuStepGraph":
        """Return the step graph of all operations appended so far."""
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
        start = -storage.data_ptr() // 4 % 16  # so that buffers begin at a cache line
        arena = storage[start : start + self._size]
        num_slots = self._cache[0, 0, :, 0, :, 0].numel()
        ints = np.zeros(self._num_ints, np.int64)
        return CpuStepGraph(table, numbers, ints, arena, _flat(self._cache), num_slots, self._kept)

    def _address(self, tensor: Tensor) -> int:
        """Return the address of a float32 tensor, and keep the tensor alive with the graph."""
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


def _per_head(values: Tensor | None, num_heads: int, none: float) -> Tensor:
    """Return one float32 per head; each is `none` if `values` is None."""
    return torch.full((num_heads,), none) if values is None else values.float().contiguous()


def _flat(cache: Tensor) -> npt.NDArray[Any]:
    """Return a flat view of a KV cache; bfloat16 is reinterpreted as uint16."""
    flat = cache.view(-1)
    if flat.dtype == torch.float32:
        return flat.numpy()
    return flat.view(torch.int16).numpy().view(np.uint16)


@dataclass(frozen=True, slots=True)
class CpuStepGraph:
    """A compiled step graph. Not thread-safe: only one `run` may be active."""

    table: npt.NDArray[np.int64]  # [operations, FIELDS]
    numbers: Floats  # [operations, 2] float parameters
    ints: npt.NDArray[np.int64]  # integers set in each step: see `RowRange` and `ExpertLayout`
    arena: Tensor  # memory of all buffers
    cache: npt.NDArray[Any]  # flat KV cache
    num_slots: int  # number of token slots of the cache
    kept: list[Any]  # owners of the memory that the addresses in `table` point to

    def view(self, buffer: Buffer, num_rows: int) -> Tensor:
        """Return a view of the first `num_rows` rows of a buffer, [num_rows, width]."""
        return self.arena[buffer.at :][: num_rows * buffer.width].view(num_rows, buffer.width)

    def run(self, slots: Ints, context_lens: Ints, block_tables: Ints) -> None:
        """Run the operations for one token of each of T sequences.

        Args:
            slots: [T] cache slots where each token's keys and values are written.
            context_lens: [T] number of positions that each token attends to, itself included.
            block_tables: [T, M] numbers of each sequence's cache blocks.

        Raises:
            IndexError: if a slot is outside of the cache.
        """
        if not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise IndexError(f"slots: {slots.tolist()}, expected from 0 to {self.num_slots} - 1")
        self.ints[TOKENS.count] = len(slots)
        _interpreter(self.cache.dtype == np.uint16)(
            self.table, self.numbers, self.ints, self.arena.numpy(), self.cache,
            slots.astype(np.int64), context_lens.astype(np.int64),
            np.ascontiguousarray(block_tables, np.int32), num_threads=torch.get_num_threads(),
        )  # fmt: skip


def load_cpu_kernels(cache: torch.dtype) -> None:
    """Load the interpreter for a KV cache dtype; compile it if it is not in the cache on disk."""
    _interpreter(cache == torch.bfloat16)


def _interpreter(narrow: bool) -> Any:
    configure_numba()
    from penstock.kernels.step_graph.interpreter import compile_interpreter

    return compile_interpreter(narrow)
