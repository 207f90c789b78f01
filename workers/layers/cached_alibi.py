"""ALiBi biases rounded to bfloat16 (Falcon), stored in the KV cache with the keys."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CachedAlibiBias:
    """Adds the bias bfloat16(slope * j) to a head's score of position j, by extending the key.

    The bias is stored as an extra feature of the key, and the query has a 1 in this feature, so the
    plain dot product includes the bias. The bias is exact in caches of any floating dtype of at
    least 16 bits, except that a float16 cache cannot store biases above 65,504.
    """

    slopes: Tensor  # [H] bfloat16; there are as many KV heads as query heads
    num_features: int  # number of extra features per head: the bias, then zeros as padding

    def append(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Return a copy of `heads` with `num_features` more features per head.

        Args:
            heads: [T, 3 H, D]: H query heads, then H key heads, then H value heads.
            positions: [T].

        Returns:
            [T, 3 H, D + num_features].
        """
        num_heads, own = len(self.slopes), heads.shape[2]
        wide = heads.new_zeros((*heads.shape[:2], own + self.num_features))
        wide[:, :, :own] = heads
        wide[:, :num_heads, own] = 1
        # As in transformers, positions are bfloat16 too, so positions above 256 are rounded.
        biases = self.slopes * positions[:, None].to(torch.bfloat16)
        wide[:, num_heads : 2 * num_heads, own] = biases.to(heads.dtype)
        return wide
