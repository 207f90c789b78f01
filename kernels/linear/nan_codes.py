"""Finds FP8 codes (e4m3) that stand for NaN."""

import numpy as np
import torch
from torch import Tensor


def nan_codes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the codes [R, C] uint8 that stand for NaN, as int64 tensors."""
    if codes.device.type != "cpu":
        outputs, inputs = torch.nonzero(codes & 127 == 127, as_tuple=True)
        return outputs, inputs
    # numpy, because torch would wake its threads for each call, which is slow on a busy machine.
    rows, columns = np.nonzero(codes.numpy() & 127 == 127)
    return torch.from_numpy(rows), torch.from_numpy(columns)
