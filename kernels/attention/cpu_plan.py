"""Plans attention that reads the blocks in place on a CPU, and calls the kernel.

The kernel (`cpu_paged`) uses float32 arithmetic over a cache of float32, bfloat16, FP8 or INT8
(`kv_cache/format`). Each of these formats has its own compiled version of the kernel.
`load_cpu_kernels` or the first call of a version compiles the version. See `attention/op` for the
letters of shapes.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.cpu_amx.support import uses_amx
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.cpu_common.numba_runtime import configure_numba
from penstock.kernels.kv_cache.format import flat_array, format_of, num_features

Ints = npt.NDArray[np.integer[Any]]


def supports_cpu_paged(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the CPU kernel supports a KV cache of this dtype on this device.

    If the kernel does not support the cache, attention is computed with plain torch operations.
    """
    return device.type == "cpu" and bool(format_of(dtype).array_dtype)


def reads_with_amx(layer: Tensor) -> bool:
    """Return whether the CPU kernel computes attention over this layer's cache with AMX."""
    array_dtype = format_of(layer.dtype).array_dtype
    return bool(array_dtype) and uses_amx(array_dtype, num_features(layer), layer.shape[3])


def loops_name(dtype: torch.dtype) -> str:
    """Return the name of the group of compiled loops for a KV cache of this dtype."""
    return f"attention-{format_of(dtype).name}"


def load_cpu_kernels(dtype: torch.dtype) -> None:
    """Load the kernel for a KV cache of this dtype from disk; compile it if it is not there."""
    _kernel(dtype)


MAX_SCORES = 1 << 20
"""Largest number of scores of a tile with AMX, so that they fit in the caches: 4 MiB. A tile of
MIN_ROWS rows may have more."""

MIN_ROWS = 16
"""Number of query rows that fill the tiles of AMX."""

MAX_ROWS = 96
"""Maximum number of query rows of a tile; a tile of a single token may have more. The number of
rows is the number of tokens times the query heads per KV head. The kernel reads a block once for
all rows of a tile."""


@dataclass(frozen=True, slots=True)
class CpuPagedPlan:
    """Plan of one step for all query tokens of some sequences of the batch."""

    tables: npt.NDArray[np.int32]  # [B, M] block tables of the whole batch
    # [P, 4], one row per sequence of this plan: number of the sequence, index in the batch of its
    # first query token, number of query tokens, context length of the first query token.
    spans: Ints
    window: int
    # Stores the results of `_tiles`; the key is the maximum number of tokens per tile.
    tiles: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rows: Ints, query_starts: Ints, context_lens: Ints, tables: Ints, window: int
    ) -> "CpuPagedPlan":
        """Plan attention for all query tokens of the sequences with the indices `rows`.

        The other arguments are those of `plan_attention`.
        """
        lengths = np.diff(query_starts)[rows]
        columns = (rows, query_starts[rows], lengths, context_lens[rows] - lengths + 1)
        spans = np.stack(columns, 1).astype(np.int32)
        return cls(np.ascontiguousarray(tables, np.int32), spans, window)

    def _tiles(self, tokens: int) -> npt.NDArray[np.int32]:
        """Return the tiles [P, 4] for `cpu_paged`. A tile has at most `tokens` tokens.

        The columns are those of `spans`.
        """
        if tokens not in self.tiles:
            lengths = self.spans[:, 2]
            num_tiles = -(-lengths // tokens)
            # `before` counts the tokens of the same sequence in earlier tiles.
            ends = np.cumsum(num_tiles)
            before = (np.arange(num_tiles.sum()) - (ends - num_tiles).repeat(num_tiles)) * tokens
            found = self.spans.repeat(num_tiles, 0)
            found[:, 1] += before
            found[:, 2] = np.minimum(found[:, 2] - before, tokens)
            found[:, 3] += before
            self.tiles[tokens] = found.astype(np.int32, copy=False)
        return self.tiles[tokens]

    def _tile_tokens(self, group: int, num_kv_heads: int, layer: Tensor) -> int:
        """Return the maximum number of tokens per tile.

        Args:
            group: number of query heads per KV head.
            num_kv_heads: number of KV heads.
            layer: the cache of a layer.
        """
        num_rows, lengths = MAX_ROWS, self.spans[:, 2]
        if reads_with_amx(layer):
            longest = int((self.spans[:, 3] + lengths).max(initial=1))
            seen = min(longest, self.window + MAX_ROWS) if self.window else longest
            num_rows = max(MIN_ROWS, min(MAX_ROWS, MAX_SCORES // seen))
        # If there are few tokens, use smaller tiles, so that no thread is idle.
        per_thread = -(-int(lengths.sum()) * num_kv_heads // torch.get_num_threads())
        return max(1, min(num_rows // group, per_thread))

    def attend_(self, out: Tensor, query: Tensor, layer: Tensor, scores: ScoreMod = PLAIN) -> None:
        """Compute attention for the tokens of this plan, and write the results to `out`.

        Args:
            out: [T, Hq, D] contiguous. If the dtype of `out` is not float32, results are rounded
                to this dtype, and rows of tokens that are not in the plan get undefined values.
            query: [T, Hq, D] of the whole batch.
            layer: [2, N, H, S, W], or [1, N, 1, S, W] if the keys are also the values; W is D,
                or D + 2 for codes with scales (`kv_cache/format`).
            scores: changes to the scores before the softmax.
        """
        if out.dtype != torch.float32:
            wide = torch.empty(out.shape)
            self.attend_(wide, query.float(), layer, scores)
            out.copy_(wide)
            return
        _, num_heads, head_dim = query.shape
        num_sides, _, num_kv_heads, block_size, _ = layer.shape
        sinks = _by_head(scores.sinks, num_heads, -np.inf)
        slopes = _by_head(scores.slopes, num_heads, 0.0)
        _kernel(layer.dtype)(
            query.numpy(),
            flat_array(layer),
            layer.numel() // num_sides * (num_sides - 1),
            num_kv_heads,
            block_size,
            self.tables,
            self._tiles(self._tile_tokens(num_heads // num_kv_heads, num_kv_heads, layer)),
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


def _kernel(dtype: torch.dtype) -> Any:
    """Return the compiled kernel for a KV cache of this dtype."""
    configure_numba()
    from penstock.kernels.attention.cpu_paged import compile_paged_attention

    return compile_paged_attention(format_of(dtype).array_dtype)
