"""Packs the rows of a matrix into panels, from which SIMD loops load whole vectors.

A panel contains PANEL rows, stored column by column.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu_common.cpu_features import vector_width

PANEL = 3 * vector_width()
"""Number of rows of a panel: three vectors of float32."""


def count_panels(num_rows: int) -> int:
    """Return the number of panels of a matrix with `num_rows` rows."""
    return -(-num_rows // PANEL)


def to_panels(rows: Tensor) -> Any:
    """Rearrange N rows of C columns to P panels: a flat numpy array [P, C, PANEL].

    Rows past the last one are zero.
    """
    panels = torch.zeros(count_panels(len(rows)), rows.shape[1], PANEL, dtype=rows.dtype)
    for panel, outputs in zip(panels, torch.split(rows, PANEL), strict=True):
        panel[:, : len(outputs)] = outputs.T
    return panels.view(-1).numpy()


def padded_bias(bias: Tensor | None, num_rows: int) -> Any:
    """Return the bias of a matrix with `num_rows` rows as a float32 array, padded to whole panels.

    The padding is zero. If `bias` is None, all elements are zero.
    """
    padded = torch.zeros(count_panels(num_rows) * PANEL)
    if bias is not None:
        padded[:num_rows] = bias
    return padded.numpy()
