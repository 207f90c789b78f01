"""Rotary position embedding in its half-split form (Su et al., 2021; the layout of Llama).

Feature pairs are (i, i + D/2). Of a head x at position p, with angles a_i = p * frequency_i:

    y_i       = x_i cos a_i - x_{i + D/2} sin a_i
    y_{i+D/2} = x_{i + D/2} cos a_i + x_i sin a_i
"""

import torch
from torch import Tensor


def rotary_table(
    frequencies: Tensor, num_positions: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Cosines and sines of every position, in the form that `rotate_` reads.

    frequencies: [D/2] float32. The result: [num_positions, 2, D]; row 0 holds the cosines of both
    halves, row 1 the sines with the sign that their half takes, both times `scale`.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return (both * scale).to(dtype)


def rotate_(x: Tensor, cos_sin: Tensor) -> None:
    """Rotates in place: x [T, H, D], cos_sin [T, 2, D] (rows of `rotary_table`), one dtype."""
    low, high = x.chunk(2, dim=-1)
    swapped = torch.cat((high, low), dim=-1)
    x.mul_(cos_sin[:, :1]).addcmul_(swapped, cos_sin[:, 1:])


def pairs_to_halves_(x: Tensor) -> None:
    """From feature pairs (2i, 2i + 1), as DeepSeek has them, to those of `rotate_`, in place.

    x: [..., D]. Scores do not change where queries and keys both are so reordered.
    """
    x.copy_(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1))


def rotate_reference(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """What `rotate_` means: x [T, H, D], positions [T], frequencies [D/2]; a new tensor."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    low, high = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
