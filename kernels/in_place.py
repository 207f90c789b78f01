"""Attention of single query tokens that reads blocks in place, on a CPU: the way to its kernel.

The kernel (`paged_decode`) is compiled when it is first imported, so that it is imported only where
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


@dataclass(frozen=True, slots=True)
class InPlace:
    """Sequences with one query token each."""

    tokens: slice | Tensor  # [B] their rows of the query
    tables: npt.NDArray[np.int32]  # [B, M]
    contexts: npt.NDArray[np.int32]  # [B]
    window: int

    @classmethod
    def of(
        cls, rows: Ints, query_starts: Ints, context_lens: Ints, tables: Ints, window: int
    ) -> "InPlace":
        """Of these rows of the batch; arguments as of `plan_attention`."""
        contexts = context_lens[rows].astype(np.int32)
        everything = len(rows) == len(context_lens) == query_starts[-1]
        tokens = torch.from_numpy(query_starts[rows].astype(np.int64))
        return cls(
            slice(None) if everything else tokens,
            np.ascontiguousarray(tables[rows], np.int32),
            contexts,
            window,
        )

    def attend(self, query: Tensor, layer: Tensor, scores: Scores = PLAIN) -> Tensor:
        """query [T, Hq, D] of the whole batch, layer [2, N, H, S, D]; [B, Hq, D]."""
        query = query[self.tokens]
        _, num_heads, head_dim = query.shape
        _, num_blocks, num_kv_heads, block_size, _ = layer.shape
        sinks = _by_head(scores.sinks, num_heads, -np.inf)
        slopes = _by_head(scores.slopes, num_heads, 0.0)
        out = torch.empty(query.shape, dtype=query.dtype)
        _kernel()(
            query.numpy(),
            layer.view(-1, head_dim).numpy(),
            num_blocks,
            num_kv_heads,
            block_size,
            self.tables,
            self.contexts,
            self.window,
            1 / math.sqrt(head_dim) if scores.scale is None else scores.scale,
            scores.cap,
            sinks,
            slopes,
            out.numpy(),
            num_threads=torch.get_num_threads(),
        )
        return out


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
    from penstock.kernels.paged_decode import paged_decode

    return paged_decode


def _cache_folder() -> Path:
    """Where compiled kernels are kept; one that lasts as this process where there is no home."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = root / "penstock" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
    return folder
