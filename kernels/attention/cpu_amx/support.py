"""Conditions under which attention on a CPU uses AMX (`cpu_amx/attend`)."""

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.cpu_features import has_amx

FEATURES = 64
"""The number of features per head must be a multiple of this."""

POSITIONS = 16
"""The block size of the KV cache must be a multiple of this."""


def has_amx_loops(dtype: npt.DTypeLike) -> bool:
    """Return whether this CPU has AMX and there are AMX loops for a KV cache of this dtype.

    `dtype` is the dtype of the cache as a flat array: uint16 for bfloat16 or int8 for INT8.
    """
    return np.dtype(dtype) in (np.dtype(np.uint16), np.dtype(np.int8)) and has_amx()


def uses_amx(dtype: npt.DTypeLike, head_dim: int, block_size: int) -> bool:
    """Return whether attention over a KV cache of this dtype and shape uses AMX."""
    return has_amx_loops(dtype) and head_dim % FEATURES == 0 and block_size % POSITIONS == 0
