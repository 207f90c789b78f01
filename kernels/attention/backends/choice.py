"""Chooses the attention backend when a worker starts, and tests it on small batches first."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.backends import flash_attention, flashinfer
from penstock.kernels.attention.backends.interface import (
    AttentionBackend,
    AttentionRequest,
    HostBatch,
)
from penstock.kernels.attention.backends.native import NativeBackend
from penstock.kernels.attention.op import paged_attention, paged_attention_reference
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton_launch import Batch

log = logging.getLogger(__name__)

MAX_ERROR = 0.03
"""Largest accepted difference between a backend's result and the reference, divided by the largest
value of the reference. The rounding of bfloat16 probabilities and outputs causes less than 0.01."""

TRIAL_COLUMNS = 3  # columns of the test's block tables: maximum number of blocks per sequence


@dataclass(frozen=True, slots=True)
class _External:
    module: str
    supports: Callable[[AttentionRequest], str]
    create: Callable[[AttentionRequest, torch.device], AttentionBackend]


EXTERNAL = {
    "flashinfer": _External(
        flashinfer.MODULE, flashinfer.supports, flashinfer.FlashInferBackend.of
    ),
    "fa3": _External(
        flash_attention.MODULE,
        flash_attention.supports,
        flash_attention.FlashAttentionBackend.of,
    ),
}
"""Backends of other libraries, by the value of `attention_backend`."""


def choose_attention_backend(
    name: str,
    request: AttentionRequest,
    device: torch.device,
    on_all_ranks: Callable[[bool], bool] = lambda usable: usable,
) -> AttentionBackend:
    """Return the backend `name`, or the native backend if `name` cannot be used.

    The function logs the choice and, if `name` cannot be used, the reason.

    Args:
        name: "auto" (the native backend), or a key of `EXTERNAL`.
        on_all_ranks: Gets whether this rank can use the backend; returns whether all ranks of the
            worker can. Not called for "auto".
    """
    ours = NativeBackend.of(request)
    if name == "auto":
        log.info("attention backend: %s", ours.name)
        return ours
    backend, reason = _create_external(EXTERNAL[name], request, device)
    all_can_use = on_all_ranks(backend is not None)
    if backend is not None and all_can_use:
        log.info("attention backend: %s", backend.name)
        return backend
    reason = reason or "another rank of this worker cannot use it"
    log.warning("attention backend %s is not used: %s; using %s", name, reason, ours.name)
    return ours


def _create_external(
    external: _External, request: AttentionRequest, device: torch.device
) -> tuple[AttentionBackend | None, str]:
    """Return a tested backend and "", or None and the reason why it cannot be used."""
    if reason := external.supports(request):
        return None, reason
    if find_spec(external.module) is None:
        return None, f"the module {external.module} is not installed"
    try:
        try_backend(external.create(request, device), request, device)
        # The tested backend may keep buffers that fit only the test, so create a new one.
        return external.create(request, device), ""
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return None, f"its first call failed: {type(error).__name__}: {first_line}"


def try_backend(backend: AttentionBackend, request: AttentionRequest, device: torch.device) -> None:
    """Compute two small steps with a backend, and compare the results with the reference.

    The first step has a prefill chunk, which follows a cached prefix, and two sequences with a
    single token. The second step is a decode step, planned like a step that a CUDA graph captures.

    Raises:
        ValueError: a result is wrong. Exceptions of the backend are passed on as well.
    """
    size = request.block_size
    longest = TRIAL_COLUMNS * size
    first = min(5, size)
    mixed = HostBatch(
        np.cumsum([0, first, 1, 1]).astype(np.int32),
        np.array([size + first, longest, 1], np.int32),
        np.array([[4, 1, 0], [2, 6, 3], [5, 0, 0]], np.int32),
    )
    decode = HostBatch(
        np.arange(3, dtype=np.int32),
        np.array([longest - 1, 2 * size], np.int32),
        np.array([[7, 5, 2], [1, 3, 0]], np.int32),
        is_captured=True,
    )
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, request.dtype)
    shape = (2, 8, request.num_kv_heads, size, request.head_dim)
    layer = torch.randn(shape, generator=generator).to(dtype)
    scores = ScoreMod(request.scale, request.cap)
    for batch in (mixed, decode):
        num_tokens = int(batch.query_starts[-1])
        query = torch.randn(
            (num_tokens, request.num_heads, request.head_dim), generator=generator
        ).to(dtype)
        backend.prepare(batch)
        for window in sorted(set(request.windows)):
            found = _compute(backend, batch, query.to(device), layer.to(device), window, scores)
            expected = paged_attention_reference(
                query.float(),
                layer.float(),
                batch.query_starts,
                batch.context_lens,
                batch.block_tables,
                window,
                scores,
            )
            _check(found.cpu().float(), expected, window)


def _compute(
    backend: AttentionBackend,
    batch: HostBatch,
    query: Tensor,
    layer: Tensor,
    window: int,
    scores: ScoreMod,
) -> Tensor:
    arrays: list[Any] = [batch.query_starts, batch.context_lens, batch.block_tables]
    there = Batch(*(torch.from_numpy(each).to(query.device) for each in arrays))
    max_query = int(np.diff(batch.query_starts).max())
    plan = backend.plan(there, layer, max_query, int(batch.context_lens.max()), window)
    return paged_attention(query, layer, plan, scores)


def _check(found: Tensor, expected: Tensor, window: int) -> None:
    if found.shape != expected.shape:
        raise ValueError(
            f"its result has the shape {list(found.shape)}: expected {list(expected.shape)}"
        )
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= MAX_ERROR:  # unlike `>`, `not <=` also rejects NaN
        raise ValueError(
            f"with a window of {window} positions (0: no window), its largest error is {error:.2g} "
            f"times the largest value of the reference: expected at most {MAX_ERROR}"
        )
