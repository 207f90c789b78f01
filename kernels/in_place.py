"""Attention that reads blocks in place, on a CPU: the way to its kernel.

The kernel (`paged_tiles`) is compiled when it is first imported, so that it is imported only where
it is used: by `prepare`, while something else is waited for, or by the first call.
"""

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.scores import PLAIN, Scores

Ints = npt.NDArray[np.integer[Any]]


def can_read_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """The rule by which the kernel is taken; all else has the torch form."""
    return device.type == "cpu" and dtype == torch.float32


def prepare(device: torch.device, dtype: torch.dtype) -> Thread:
    """Starts to load the kernel, where it will be used; to be joined."""
    thread = Thread(target=_kernel if can_read_in_place(device, dtype) else int, daemon=True)
    thread.start()
    return thread


TILE = 8
"""Query tokens that read a block together, at most."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """Tokens of some sequences, in tiles."""

    tables: npt.NDArray[np.int32]  # [B, M] of the whole batch
    tiles: npt.NDArray[np.int32]  # [P, 4] see `paged_tiles`
    window: int

    @classmethod
    def of(
        cls, rows: Ints, query_starts: Ints, context_lens: Ints, tables: Ints, window: int
    ) -> "InPlace":
        """All tokens of these sequences; arguments as of `plan_attention`."""
        lengths = np.diff(query_starts)[rows]
        num_tiles = -(-lengths // TILE)
        # Within its sequence, which tile it is, and the tokens before it.
        number = np.arange(num_tiles.sum()) - (np.cumsum(num_tiles) - num_tiles).repeat(num_tiles)
        before = number * TILE
        at = np.repeat(rows, num_tiles)
        left = lengths.repeat(num_tiles) - before
        columns = (
            at,
            query_starts[at] + before,
            np.minimum(left, TILE),
            context_lens[at] - left + 1,
        )
        tiles = np.stack(columns, 1).astype(np.int32)
        return cls(np.ascontiguousarray(tables, np.int32), tiles, window)

    def attend_(self, out: Tensor, query: Tensor, layer: Tensor, scores: Scores = PLAIN) -> None:
        """Writes these tokens' rows of out [T, Hq, D] contiguous; query [T, Hq, D] of the whole
        batch, layer [2, N, H, S, D], or [1, N, 1, S, D] where keys are values too."""
        _, num_heads, head_dim = query.shape
        num_sides, num_blocks, num_kv_heads, block_size, _ = layer.shape
        sinks = _by_head(scores.sinks, num_heads, -np.inf)
        slopes = _by_head(scores.slopes, num_heads, 0.0)
        _kernel()(
            query.numpy(),
            layer.view(-1, head_dim).numpy(),
            (num_sides - 1) * num_blocks * num_kv_heads * block_size,
            num_kv_heads,
            block_size,
            self.tables,
            self.tiles,
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


def _kernel() -> Any:
    import numba

    settings: Any = numba.config
    if not settings.CACHE_DIR:
        settings.CACHE_DIR = str(_cache_folder())
    # OpenMP is what torch computes with: one pool of threads for both.
    settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    from penstock.kernels.paged_tiles import paged_tiles

    return paged_tiles


def _cache_folder() -> Path:
    """Where compiled kernels are kept; one that lasts as this process where there is no home."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = root / "penstock" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
    return folder
