"""Converts K-quants of GGUF to float32: blocks of 256 items, in groups that each have a scale.

The layouts of the blocks are those of the structs in ggml-common.h. Except for Q6_K and Q3_K, an
item is scale * q - minimum. The scale is `d`, a float16 number of the block, times an integer
of the group. The minimum is `dmin`, another float16 number, times another integer of the group.
"""

import torch
from torch import Tensor


def as_float(pairs: Tensor) -> Tensor:
    """Return float16 numbers as float32: [n, 2 * m] uint8 to [n, m]."""
    return pairs.contiguous().view(torch.float16).float()


def bits(packed: Tensor, width: int, count: int) -> Tensor:
    """Unpack `count` numbers of `width` bits from each byte: [..., k] uint8 to [..., count, k].

    Number j of a byte begins at bit `j * width`; bit 0 is the lowest.
    """
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << width) - 1)


def nibbles(packed: Tensor) -> Tensor:
    """Return [n, 2 * k] numbers of 4 bits: the low halves of [n, k] bytes, then the high halves."""
    return bits(packed, 4, 2).flatten(1)


def _groups(q: Tensor, scales: Tensor) -> Tensor:
    """Return scale * q for [n, 256] numbers and [n, groups] scales: [n, groups, group]."""
    return scales.unsqueeze(-1) * q.float().view(len(q), scales.shape[1], -1)


def _q2_k(blocks: Tensor) -> Tensor:
    """Convert 16 groups of 16 items.

    Bytes: 16 with 4-bit scales (low half) and minima (high half); 64 with 2 bits per item; d; dmin.
    """
    packed, d = blocks[:, :16], as_float(blocks[:, 80:84])
    q = bits(blocks[:, 16:80].view(-1, 2, 32), 2, 4).flatten(1)
    scales, least = d[:, :1] * (packed & 15).float(), d[:, 1:] * (packed >> 4).float()
    return (_groups(q, scales) - least.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """Convert 16 groups of 16 items.

    Bytes: 32 with the high bit of each item; 64 with 2 low bits per item; 12 with scales; d. If an
    item's high bit is 0, 4 is subtracted. The 16 scales have 6 bits, with an offset of -32. Their
    low 4 bits are in the first 8 of the 12 bytes: scales 0 to 7 in the low halves, scales 8 to 15
    in the high halves. Their high 2 bits are in the last 4 bytes.
    """
    high = bits(blocks[:, :32], 1, 8).flatten(1)
    low = bits(blocks[:, 32:96].view(-1, 2, 32), 2, 4).flatten(1)
    packed = blocks[:, 96:108]
    scales = nibbles(packed[:, :8]) | (bits(packed[:, 8:], 2, 4).flatten(1) << 4)
    factors = as_float(blocks[:, 108:110]) * (scales.float() - 32.0)
    return _groups(low.float() - (1 - high.float()) * 4.0, factors).flatten(1)


def _scales_and_least(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 6-bit scales and minima of Q4_K and Q5_K: [n, 12] bytes to [n, 8] numbers each.

    Scales 0 to 3 are the low 6 bits of bytes 0 to 3, and minima 0 to 3 those of bytes 4 to 7.
    Scales 4 to 7 have their low 4 bits in the low halves of bytes 8 to 11, and their high 2 bits in
    the top bits of bytes 0 to 3. Minima 4 to 7 use the high halves and bytes 4 to 7 instead.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    least = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return scales, least


def _q4_k(blocks: Tensor) -> Tensor:
    """Convert 8 groups of 32. Bytes: d; dmin; 12 of scales and minima; 128 of 4 bits per item."""
    return _with_least(blocks, bits(blocks[:, 16:].view(-1, 4, 32), 4, 2).flatten(1))


def _q5_k(blocks: Tensor) -> Tensor:
    """Convert blocks like those of Q4_K, but with 32 bytes of high bits before the low bits."""
    high = bits(blocks[:, 16:48], 1, 8).flatten(1)
    low = bits(blocks[:, 48:].view(-1, 4, 32), 4, 2).flatten(1)
    return _with_least(blocks, low | (high << 4))


def _with_least(blocks: Tensor, q: Tensor) -> Tensor:
    d = as_float(blocks[:, :4])
    scales, least = _scales_and_least(blocks[:, 4:16])
    products = _groups(q, d[:, :1] * scales.float())
    return (products - (d[:, 1:] * least.float()).unsqueeze(-1)).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """Convert 16 groups of 16 items; an item is d * scale * (q - 32), with an int8 scale.

    Bytes: 128 with 4 low bits per item; 64 with 2 high bits per item; 16 scales; d.
    """
    low = bits(blocks[:, :128].view(-1, 2, 64), 4, 2).flatten(1)
    high = bits(blocks[:, 128:192].view(-1, 2, 32), 2, 4).flatten(1)
    factors = as_float(blocks[:, 208:210]) * blocks[:, 192:208].view(torch.int8).float()
    return _groups((low | (high << 4)).float() - 32.0, factors).flatten(1)


K_QUANTS = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
"""Conversion functions by the name of GGUF's type."""
