"""Multi-head latent attention without Triton: torch computes both forms over gathered blocks.

See `mla/op` for the operation and its two forms. The functions compute one sequence at a time, from
its cached rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

Ints: TypeAlias = npt.NDArray[np.integer]

MAX_NAIVE_BYTES = 1 << 26
"""Maximum size in bytes of the keys and values that are expanded at a time. At least one head is
always expanded, even if it is larger."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence with its query tokens of this step."""

    tokens: slice  # rows of the query that hold the sequence's tokens
    blocks: Tensor  # [M] int64 blocks of the sequence
    context: int  # context length, including this step's tokens
    # [tokens, context] float32, 0, or -inf at masked positions. None means no mask for a single
    # token, and a causal mask if the tokens are the whole context.
    mask: Tensor | None

    @classmethod
    def of(cls, query_starts: Ints, context: int, table: Ints, b: int, layer: Tensor) -> "Span":
        """Return the span of the sequence with the number `b`; `table` is its block table."""
        tokens = slice(int(query_starts[b]), int(query_starts[b + 1]))
        blocks = to_device(table[: -(-context // layer.shape[3])], layer.device)
        return cls(tokens, blocks, context, _mask(tokens.stop - tokens.start, context, layer))

    def gather(self, layer: Tensor, scratch: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sequence's cached rows [context, R + P], converted to `dtype`.

        `scratch` is [at least M, S (R + P)].
        """
        blocks = layer.view(layer.shape[1], -1)
        found = torch.index_select(blocks, 0, self.blocks, out=scratch[: len(self.blocks)])
        return found.view(-1, layer.shape[4])[: self.context].to(dtype)


def to_device(numbers: Ints, device: torch.device) -> Tensor:
    """Return an int64 copy of an array on the device."""
    return torch.from_numpy(numbers.astype(np.int64)).to(device)


def _mask(query_len: int, context: int, layer: Tensor) -> Tensor | None:
    if query_len in (1, context):
        return None
    positions = np.arange(context)
    seen = positions <= positions[context - query_len :, None]
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(mask).to(layer.device)


def attend_absorbed_(
    sums: Tensor, query: Tensor, rows: Tensor, mask: Tensor | None, scale: float
) -> None:
    """Compute attention of `query` [L, H, R + P] over the cached `rows` [C, R + P].

    L is the number of query tokens, and C the context length. All heads share the rows. The
    weighted sums of the latents are written to `sums` [H, L, R].
    """
    rank = sums.shape[2]
    if len(query) == 1:
        probs = (query[0] @ rows.T).mul_(scale).softmax(-1)
        torch.matmul(probs, rows[:, :rank], out=sums[:, 0])
        return
    mask = None if mask is None else mask.to(query.dtype)
    # torch's fused attention needs values as wide as keys. The rotated keys are therefore summed,
    # too, and the last P features of the result are dropped.
    shared = rows.expand(1, len(sums), -1, -1)
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], shared, shared, mask, is_causal=mask is None, scale=scale
    )
    sums.copy_(out[0, :, :, :rank])


def attend_expanded_(
    out: Tensor,
    query: Tensor,
    rows: Tensor,
    keys_up: Tensor,
    values_up: Tensor,
    mask: Tensor | None,
    scale: float,
) -> None:
    """Compute the expanded form for `query` [L, H, Q + P] over the cached `rows` [C, R + P].

    L is the number of query tokens, and C the context length. The result is written to `out`
    [L, H, V]. Keys and values are expanded for a few heads at a time, to limit the memory.
    """
    query_dim, rank = keys_up.shape[1:]
    value_dim = values_up.shape[1]
    latents, shared_key = rows[:, :rank], rows[:, rank:]
    mask = None if mask is None else mask.to(query.dtype)
    # Pad keys or values, because torch's fused attention requires equal widths.
    width = max(query.shape[2], value_dim)
    padded = functional.pad(query, (0, width - query.shape[2])).transpose(0, 1)
    for heads in _head_groups(len(keys_up), 2 * len(rows) * width * rows.itemsize):
        shape = (heads.stop - heads.start, len(rows), width)
        keys, values = rows.new_zeros(shape), rows.new_zeros(shape)
        keys[:, :, :query_dim] = latents @ keys_up[heads].transpose(1, 2)
        keys[:, :, query_dim : query.shape[2]] = shared_key
        values[:, :, :value_dim] = latents @ values_up[heads].transpose(1, 2)
        found = functional.scaled_dot_product_attention(
            padded[None, heads], keys[None], values[None], mask, is_causal=mask is None, scale=scale
        )
        out[:, heads] = found[0, :, :, :value_dim].transpose(0, 1)


def _head_groups(num_heads: int, head_bytes: int) -> Iterator[slice]:
    size = max(1, MAX_NAIVE_BYTES // head_bytes)
    for start in range(0, num_heads, size):
        yield slice(start, min(start + size, num_heads))
