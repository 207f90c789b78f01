"""CPU step graphs: run a step of single tokens as one call instead of hundreds.

If every operation is a separate call, a fifth of the time of a single-token step is lost between
the calls: threads are woken, Python code runs, and memory is idle. A step graph stores the same
operations in a table that is built once per model. All threads execute the table together, with a
barrier after each operation (`thread_barrier`). Threads that wait at a barrier prefetch weights of
the next product.

Operations read and write buffers: float32 matrices with one row per token, all in one array (the
arena). The operations call the same inner loops as the separate calls (`linear/cpu_f32_simd`,
`linear/cpu_dequantizing`, `attention/cpu_paged`, ...), so the results are bitwise identical with
and without a step graph. Only the router of a mixture of experts adds in another order; models that
need deterministic results therefore have no step graph with such a router.

`GraphBuilder` is the interface for layers: it checks arguments and records `operations`. `table`
converts the operations to tables of numbers, `graph` stores these tables, and `interpreter`
executes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.kv_cache.format import format_of, num_features
from penstock.kernels.linear.cpu_packed_f32 import PackedLinearF32
from penstock.kernels.linear.cpu_packed_int4 import PackedLinearInt4
from penstock.kernels.linear.cpu_packed_int8 import PackedLinearInt8
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS
from penstock.kernels.linear.quantized import DequantizingLinear
from penstock.kernels.step_graph.graph import CpuStepGraph
from penstock.kernels.step_graph.layout import TOKENS, Buffer, ExpertLayout, RowRange
from penstock.kernels.step_graph.matmul_operations import (
    MatmulF32,
    MatmulInt4,
    MatmulInt8,
    MatmulQuantized,
    Quantize,
    QuantizeBlocks,
)
from penstock.kernels.step_graph.opcodes import ALIGNMENT
from penstock.kernels.step_graph.operations import (
    Add,
    Attend,
    Gate,
    Gemv,
    Norm,
    Operation,
    Permute,
    PermuteIndex,
    TopkSoftmax,
    UnpermuteSum,
)
from penstock.kernels.step_graph.table import fuse_adds

MAX_GROUP = 15
"""Largest number of query heads per KV head that the attention loops of a step graph support."""


class UnsupportedGraph(Exception):
    """Raised if a step graph cannot represent an operation; the message names the operation."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of attention. An input row has query heads, then key heads, then value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # [rows, 2 R] cosines, then sines, of R rotated features (see `rope`); None for no rotation
    angles: Buffer | None
    interleaved: bool  # True if feature pairs are (2i, 2i + 1), False if they are (i, i + R/2)
    window: int  # number of positions in the sliding window; 0 if there is no window
    scores: ScoreMod


class GraphBuilder:
    """Builds a step graph, one operation after another, in the order of execution.

    Args:
        most_rows: maximum number of tokens per step.
        cache: KV cache [L, 2, N, H, S, W] on a CPU, in a format that CPU loops support.
    """

    def __init__(self, most_rows: int, cache: Tensor) -> None:
        if cache.dim() != 6 or not format_of(cache.dtype).array_dtype:
            raise UnsupportedGraph(
                f"the KV cache has the shape {list(cache.shape)} and the dtype {cache.dtype}: "
                "expected 6 dimensions and a dtype that CPU loops support"
            )
        self._rows = most_rows + -most_rows % ALIGNMENT
        self._cache = cache
        self._size = 0
        self._num_ints = 2  # integers 0 and 1 are the row range TOKENS
        self._operations: list[Operation] = []
        self._buffers: dict[tuple[str, int, ExpertLayout | None], Buffer] = {}
        self._layouts: dict[tuple[int, int], ExpertLayout] = {}

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
        """Return the layout for these numbers of experts and choices per token.

        MoE layers run one after another, so layers with equal numbers share a layout.
        """
        key = (num_experts, top_k)
        if key not in self._layouts:
            at = self._num_ints
            self._num_ints += 2 * num_experts + self._rows * top_k
            self._layouts[key] = ExpertLayout(at, at + 2 * num_experts, num_experts, top_k)
        return self._layouts[key]

    def norm(
        self, x: Buffer, weight: Tensor, eps: float, out: Buffer, columns: range | None = None
    ) -> None:
        """Append `out = RMS norm of x`. A directly preceding `add` to x is merged into the norm.

        Args:
            weight: [D].
            columns: range of columns of x. Each group of D columns in this range is normalized
                separately, and only these columns of `out` are written. None means all columns as
                one group.
        """
        normalised = range(x.width) if columns is None else columns
        dim = len(weight)
        if (
            len(normalised) % dim
            or normalised.stop > x.width
            or (columns is None and dim != x.width)
        ):
            raise UnsupportedGraph(
                f"a norm of {dim} features needs whole groups of {dim} columns of a buffer with "
                f"{x.width} columns, not the columns [{normalised.start}, {normalised.stop})"
            )
        assert normalised.step == 1
        assert x.width == out.width
        self._append(Norm(x, _plain(weight), eps, out, normalised.start, len(normalised)))

    def supports_linear(self, linear: Any) -> bool:
        """Return whether `GraphBuilder.linear` supports the packed linear layer `linear`."""
        if isinstance(linear, PackedLinearInt8 | PackedLinearInt4 | DequantizingLinear):
            return linear.num_outputs % ALIGNMENT == 0
        if not isinstance(linear, PackedLinearF32):
            return False
        return linear.num_outputs % ALIGNMENT == 0 and linear.depth == linear.num_inputs

    def linear(self, x: Buffer, linear: Any, out: Buffer) -> None:
        """Append `out = x Wᵀ + b`, where `linear` is the packed linear layer."""
        self._append_linears(x, [linear], out, [TOKENS], None)

    def expert_linears(
        self, x: Buffer, linears: Sequence[Any], out: Buffer, layout: ExpertLayout
    ) -> None:
        """Append one product per expert, for the expert's rows of `x` and `out`.

        The rows of `x` and `out` are sorted by expert, as `layout` describes.
        """
        self._append_linears(x, linears, out, layout.all_rows(), layout)

    def _append_linears(
        self,
        x: Buffer,
        linears: Sequence[Any],
        out: Buffer,
        rows: list[RowRange],
        layout: ExpertLayout | None,
    ) -> None:
        if len({(type(each), getattr(each, "group_inputs", 0)) for each in linears}) != 1:
            raise UnsupportedGraph(
                "one operation cannot combine linear layers of different types or group sizes"
            )
        for linear in linears:
            if not self.supports_linear(linear):
                raise UnsupportedGraph(
                    f"no operation computes a linear layer of type {type(linear).__name__} "
                    f"with {x.width} inputs and {out.width} outputs"
                )
            assert (x.width, out.width) == (linear.num_inputs, linear.num_outputs)
        if isinstance(linears[0], PackedLinearF32):
            self._append_each(rows, [MatmulF32(x, linear, out) for linear in linears])
            return
        if isinstance(linears[0], DequantizingLinear):
            self._append_each(rows, [MatmulQuantized(x, linear, out) for linear in linears])
            return
        # Quantize all rows before the first product, so that one barrier is enough.
        qvalues = self.scratch("quantized values", x.width // 4, layout)
        if isinstance(linears[0], PackedLinearInt4):
            blocks = self._quantize_blocks(x, qvalues, linears[0].run, layout)
            self._append_each(rows, [blocks] * len(rows))
            self._append_each(rows, [MatmulInt4(blocks, linear, out) for linear in linears])
            return
        row_scales = self.scratch("row scales", 1, layout)
        limits = [linear.input_limit for linear in linears]
        self._append_each(rows, [Quantize(x, qvalues, row_scales, limit) for limit in limits])
        self._append_each(
            rows, [MatmulInt8(qvalues, row_scales, linear, out) for linear in linears]
        )

    def _quantize_blocks(
        self, x: Buffer, qvalues: Buffer, run: int, layout: ExpertLayout | None
    ) -> QuantizeBlocks:
        row_scales = self.scratch("block scales", -(-x.width // BLOCK_INPUTS), layout)
        offsets = self.scratch("run offsets", -(-x.width // run), layout)
        return QuantizeBlocks(x, qvalues, row_scales, offsets, run)

    def _append_each(self, rows: list[RowRange], operations: Sequence[Operation]) -> None:
        """Append one operation per range of `rows`; a barrier follows only the last operation."""
        for number, (own, operation) in enumerate(zip(rows, operations, strict=True)):
            self._append(replace(operation, rows=own, continues=number + 1 < len(rows)))

    def attend(self, heads: Buffer, params: AttentionParams, layer: int, out: Buffer) -> None:
        """Append an operation that rotates heads, caches keys and values, and runs attention."""
        num_sides, _, num_kv_heads, block_size, _ = self._cache.shape[1:]
        head_dim = num_features(self._cache)
        if (num_sides, num_kv_heads, head_dim) != (2, params.num_kv_heads, params.head_dim):
            raise UnsupportedGraph(
                f"the KV cache has the shape {list(self._cache.shape)}: expected 2 sides (K and "
                f"V), {params.num_kv_heads} KV heads and {params.head_dim} features per head"
            )
        if params.num_heads > MAX_GROUP * num_kv_heads:
            raise UnsupportedGraph(
                f"{params.num_heads} query heads use {num_kv_heads} KV heads: expected at most "
                f"{MAX_GROUP} query heads per KV head"
            )
        assert heads.width == (params.num_heads + 2 * num_kv_heads) * head_dim
        assert out.width == params.num_heads * head_dim
        scores, layer_size = params.scores, self._cache[0].numel()
        self._append(
            Attend(
                heads=heads,
                out=out,
                num_heads=params.num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                angles=params.angles,
                interleaved=params.interleaved,
                layer_start=layer * layer_size,
                layer_size=layer_size,
                values_start=layer_size // 2,
                window=params.window,
                sinks=_per_head(scores.sinks, params.num_heads, -np.inf),
                slopes=_per_head(scores.slopes, params.num_heads, 0.0),
                scale=head_dim**-0.5 if scores.scale is None else scores.scale,
                cap=scores.cap,
            )
        )

    def gate(self, x: Buffer, kind: str, out: Buffer, layout: ExpertLayout | None = None) -> None:
        """Append `out = f(first half of x) * (second half of x)`.

        Args:
            x: the input.
            kind: the name of f, a key of GATES.
            out: the result.
            layout: the layout of `x` and `out` if their rows are sorted by expert.
        """
        assert x.width == 2 * out.width
        rows = layout.all_rows() if layout else [TOKENS]
        self._append_each(rows, [Gate(x, kind, out)] * len(rows))

    def add(self, x: Buffer, added: Buffer) -> None:
        """Append `x += added`."""
        assert x.width == added.width
        self._append(Add(x, added))

    def gemv(self, x: Buffer, weight: Tensor, out: Buffer) -> None:
        """Append `out = x Wᵀ` for a small, unpacked W."""
        assert weight.shape == (out.width, x.width)
        self._append(Gemv(x, _plain(weight), out))

    def topk_softmax(
        self, logits: Buffer, layout: ExpertLayout, normalise: bool, weights: Buffer
    ) -> None:
        """Append two operations: choose each token's experts, then sort the choices by expert.

        The first operation writes `weights` and overwrites `logits`. Only softmax routing without
        groups and bias is supported (see `route`).
        """
        assert (logits.width, weights.width) == (layout.num_experts, layout.top_k)
        self._append(TopkSoftmax(logits, layout, normalise, weights))
        self._append(PermuteIndex(layout))

    def permute(self, x: Buffer, layout: ExpertLayout, out: Buffer) -> None:
        """Append a copy of each token's row to the rows of its choices in `out` (with `layout`)."""
        assert x.width == out.width
        self._append(Permute(x, layout, out))

    def unpermute_sum(
        self,
        x: Buffer,
        layout: ExpertLayout,
        weights: Buffer,
        out: Buffer,
        shared: Buffer | None = None,
        gate: Buffer | None = None,
    ) -> None:
        """Append `out` = weighted sum of each token's expert outputs `x` (with `layout`).

        If given, `shared` (output of a shared expert) is added to the sum. If `gate` (output of the
        shared expert's gate) is also given, `shared` is multiplied by the sigmoid of `gate` first.
        """
        assert x.width == out.width
        assert out.width % 16 == 0
        self._append(UnpermuteSum(x, layout, weights, out, shared, gate))

    def build(self) -> CpuStepGraph:
        """Return the step graph of all operations appended so far."""
        operations = fuse_adds(self._operations)
        return CpuStepGraph.of(operations, self._size, self._num_ints, self._cache)

    def _append(self, operation: Operation) -> None:
        self._operations.append(operation)


def _plain(weight: Tensor) -> Tensor:
    """Return `weight` as a contiguous tensor.

    Raises:
        UnsupportedGraph: `weight` is not float32 on a CPU.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise UnsupportedGraph(
            f"weights are {weight.dtype} on {weight.device}: expected float32 on a CPU"
        )
    return weight.contiguous()


def _per_head(values: Tensor | None, num_heads: int, none: float) -> Tensor:
    """Return one float32 per head: `values`, or `none` for all heads if `values` is None."""
    return torch.full((num_heads,), none) if values is None else values.float().contiguous()
