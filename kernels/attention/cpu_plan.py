"""Attention that reads blocks in place, on a CPU: the way to its kernel.

The kernel (`cpu_paged`) computes in float32, over a cache of float32 or bfloat16. It is compiled
when it is first asked for, of one of these: by `prepare`, while something else is waited for, or by
the first call.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.cpu_common.numba_runtime import configure_numba

Ints = npt.NDArray[np.integer[Any]]


def supports_cpu_paged(device: torch.device, dtype: torch.dtype) -> bool:
    """The rule by which the kernel is taken, for a cache of this dtype; all else has the torch
    form."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def load_cpu_kernels(dtype: torch.dtype) -> None:
    """Loads the kernel for a cache of this dtype; compiles it, the first time on a machine."""
    _kernel(dtype)


MAX_ROWS = 96
"""Of a tile: its tokens times the query heads of a KV head, which read a block together. More only
where a single token has more."""


@dataclass(frozen=True, slots=True)
class CpuPagedPlan:
    """Tokens of some sequences, all of each."""

    tables: npt.NDArray[np.int32]  # [B, M] of the whole batch
    spans: Ints  # [P, 4] of each sequence: which, its first row, its rows, what the first sees
    window: int
    tiles: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)  # by their most tokens

    @classmethod
    def of(
        cls, rows: Ints, query_starts: Ints, context_lens: Ints, tables: Ints, window: int
    ) -> "CpuPagedPlan":
        """All tokens of these sequences; arguments as of `plan_attention`."""
        lengths = np.diff(query_starts)[rows]
        columns = (rows, query_starts[rows], lengths, context_lens[rows] - lengths + 1)
        spans = np.stack(columns, 1).astype(np.int32)
        return cls(np.ascontiguousarray(tables, np.int32), spans, window)

    def _tiles(self, tokens: int) -> npt.NDArray[np.int32]:
        """[P, 4] as `cpu_paged` has them, of at most so many tokens."""
        if tokens not in self.tiles:
            lengths = self.spans[:, 2]
            num_tiles = -(-lengths // tokens)
            # Within its sequence, which tile it is, and the tokens before it.
            ends = np.cumsum(num_tiles)
            before = (np.arange(num_tiles.sum()) - (ends - num_tiles).repeat(num_tiles)) * tokens
            found = self.spans.repeat(num_tiles, 0)
            found[:, 1] += before
            found[:, 2] = np.minimum(found[:, 2] - before, tokens)
            found[:, 3] += before
            self.tiles[tokens] = found.astype(np.int32, copy=False)
        return self.tiles[tokens]

    def attend_(self, out: Tensor, query: Tensor, layer: Tensor, scores: ScoreMod = PLAIN) -> None:
        """Writes these tokens' rows of out [T, Hq, D] contiguous; query [T, Hq, D] of the whole
        batch, layer [2, N, H, S, D], or [1, N, 1, S, D] where keys are values too.

        Where out is no float32 it is rounded to at the end, and all its rows are written.
        """
        if out.dtype != torch.float32:
            wide = torch.empty(out.shape)
            self.attend_(wide, query.float(), layer, scores)
            out.copy_(wide)
            return
        _, num_heads, head_dim = query.shape
        num_sides, num_blocks, num_kv_heads, block_size, _ = layer.shape
        sinks = _by_head(scores.sinks, num_heads, -np.inf)
        slopes = _by_head(scores.slopes, num_heads, 0.0)
        _kernel(layer.dtype)(
            query.numpy(),
            _rows(layer),
            (num_sides - 1) * num_blocks * num_kv_heads * block_size * head_dim,
            num_kv_heads,
            block_size,
            self.tables,
            self._tiles(max(1, MAX_ROWS // (num_heads // num_kv_heads))),
            self.window,
            1 / math.sqrt(head_dim) if scores.scale is None else scores.scale,
            scores.cap,
            sinks,
            slopes,
            out.numpy(),
            num_threads=torch.get_num_threads(),
        )


def _by_head(values: Tensor | None, num_heads: int, none: float) -> npt.NDArray[np.float32]:
    if values is None:
        return np.full(num_heads, none, np.float32)
    return values.float().numpy()


def _rows(layer: Tensor) -> npt.NDArray[Any]:
    """The layer flat, as the kernel takes it."""
    if layer.dtype == torch.float32:
        return layer.view(-1).numpy()
    return layer.view(-1).view(torch.int16).numpy().view(np.uint16)


def _kernel(dtype: torch.dtype) -> Any:
    """For a cache of this dtype."""
    configure_numba()
    from penstock.kernels.attention.cpu_paged import compile_paged_attention

    return compile_paged_attention(dtype == torch.bfloat16)
