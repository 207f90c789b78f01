"""Excludes tokens from rows of logits by packed bit masks, in place.

Token t is allowed if bit t % 32 of word t // 32 of a mask is set. llguidance uses the same layout.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.checks import check
from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from penstock.kernels.fallback import record_fallback
from penstock.kernels.sampling.op import finite_rows
from penstock.kernels.sampling.triton_token_mask import apply_token_mask_triton_
from penstock.kernels.triton_common.launch import use_triton

BITS = 32


def apply_token_mask_(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set the logits of tokens whose bit is clear to -inf, in place.

    Args:
        logits: [R, V] float32.
        rows: [M] int64 numbers of the rows to mask; a row may occur only once.
        words: [M, W] int32 masks of these rows; W >= ceil(V / 32). Bits from V on are ignored.

    On a GPU, rows outside the logits are ignored.
    """
    check("logits", logits, ("R", "V"), (torch.float32,))
    check("rows", rows, ("M",), (torch.int64,), like=logits)
    check("words", words, (len(rows), "W"), (torch.int32,), like=logits)
    if words.shape[1] * BITS < logits.shape[1]:
        raise ValueError(
            f"`words` has {words.shape[1] * BITS} bits per mask: expected at least "
            f"{logits.shape[1]}, one per token"
        )
    if use_triton(logits):
        apply_token_mask_triton_(logits, rows, words)
    elif logits.device.type == "cpu" and has_numba() and logits.is_contiguous():
        apply_host_masks_(logits, rows.numpy(), words.contiguous().numpy())
    else:
        record_fallback("apply_token_mask_", logits.device, "no kernel for this device")
        logits.copy_(apply_token_mask_reference(logits, rows, words))


def apply_host_masks_(
    logits: Tensor, rows: npt.NDArray[np.int64], words: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Apply token masks in numpy arrays to logits [R, V] on a CPU, in place.

    This takes fewer calls than `finite_rows` and `apply_token_mask_`. The compiled loop raises
    TypeError for arrays of other types.

    Returns:
        A mask [R]: True for rows that had neither NaN nor Inf before the masks were applied.
    """
    if not (len(rows) and has_numba() and logits.is_contiguous()):
        finite: npt.NDArray[np.bool_] = finite_rows(logits).numpy()
        if len(rows):  # torch rejects the strides of an empty numpy array
            apply_token_mask_(logits, torch.from_numpy(rows), torch.from_numpy(words))
        return finite
    if words.shape[1] * BITS < logits.shape[1] or len(words) != len(rows):
        raise ValueError(
            f"words has {len(words)} masks of {words.shape[1] * BITS} bits: expected {len(rows)} "
            f"masks of at least {logits.shape[1]} bits, one per token"
        )
    finite = np.empty(len(logits), np.bool_)
    _cpu_kernels().apply_token_mask(logits.numpy(), rows, words, finite)
    return finite


def apply_token_mask_reference(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Reference implementation of `apply_token_mask_`; return a new tensor."""
    bits = torch.arange(BITS, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    out = logits.clone()
    out[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return out


def load_cpu_kernels() -> None:
    """Load the compiled loop, compiling it if it is not in the cache on disk."""
    if has_numba():
        _cpu_kernels().apply_token_mask.load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.sampling import cpu_token_mask

    return cpu_token_mask
