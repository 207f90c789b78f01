"""Rotary position embedding (Su et al., 2021).

Feature pairs are half a head apart, (i, i + D/2), as in Llama, or neighbours, (2i, 2i + 1), as in
GPT-J. A pair (u, v) of a head at position p turns by the angle a = p * frequency:

    u' = u cos a - v sin a
    v' = v cos a + u sin a
"""

import torch
from torch import Tensor


def rotary_table(
    frequencies: Tensor,
    num_positions: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    neighbours: bool = False,
) -> Tensor:
    """Cosines and sines of every position, in the form that `rotate_` reads.

    frequencies: [D/2] float32. The result: [num_positions, 2, D]; row 0 holds the cosines of both
    of a pair, row 1 the sines with the sign that each of them takes, both times `scale`.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if neighbours:
        cosines, sines = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)
        both = torch.stack((cosines.flatten(-2), sines.flatten(-2)), dim=1)
    else:
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return (both * scale).to(dtype)


def rotate_(x: Tensor, cos_sin: Tensor, neighbours: bool = False) -> None:
    """Rotates in place: x [T, H, D], cos_sin [T, 2, D] (rows of `rotary_table`), one dtype."""
    if neighbours:
        swapped = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        low, high = x.chunk(2, dim=-1)
        swapped = torch.cat((high, low), dim=-1)
    x.mul_(cos_sin[:, :1]).addcmul_(swapped, cos_sin[:, 1:])


def rotate_reference(
    x: Tensor, positions: Tensor, frequencies: Tensor, neighbours: bool = False
) -> Tensor:
    """What `rotate_` means: x [T, H, D], positions [T], frequencies [D/2]; a new tensor."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    wide, cos, sin = x.to(torch.float32), angles.cos(), angles.sin()
    if neighbours:
        u, v = wide[..., ::2], wide[..., 1::2]
        turned = torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2)
    else:
        u, v = wide.chunk(2, dim=-1)
        turned = torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1)
    return turned.to(x.dtype)
