"""Attention with linear biases that are rounded: what each position adds to scores."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CachedAlibiBias:
    """What position j adds to a head's scores, bfloat16(slope * j), is kept with its key.

    It is a feature more of the key, and of the query that feature is 1. So attention computes
    nothing but products. It is exact in a cache of any floating dtype of 16 bits or more, but for
    positions whose bias float16 cannot hold (above 65,504).
    """

    slopes: Tensor  # [H] bfloat16, of as many KV heads as heads
    num_features: int  # beside a head's own; those behind the first are zero

    def append(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Return `heads` [T, 3 H, D] (queries, keys, values) as a new tensor with `num_features`
        more features per head. positions: [T]."""
        num_heads, own = len(self.slopes), heads.shape[2]
        wide = heads.new_zeros((*heads.shape[:2], own + self.num_features))
        wide[:, :, :own] = heads
        wide[:, :num_heads, own] = 1
        # bfloat16 all through: positions above 256 are rounded too, as transformers has it.
        biases = self.slopes * positions[:, None].to(torch.bfloat16)
        wide[:, num_heads : 2 * num_heads, own] = biases.to(heads.dtype)
        return wide
