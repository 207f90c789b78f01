"""Changes to attention scores before the softmax: scale, soft cap, ALiBi slopes and sinks.

    s = q K^T scale
    s = cap tanh(s / cap)         soft cap (Gemma 2)
    s = s + slope (j - i)         ALiBi, for a query at position i and a key at position j
    out = softmax([s, sink]) V    attention sink (gpt-oss)

A sink is one extra score per query head. The sink takes part in the softmax, but it has no value
vector, so its softmax weight is dropped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ScoreMod:
    """Changes to attention scores before the softmax.

    The default only scales the scores. It is the fastest.
    """

    scale: float | None = None  # factor of the scores; None means 1 / sqrt(features per head)
    cap: float = 0.0  # soft cap; 0 if there is none
    sinks: Tensor | None = None  # [Hq] attention sink of each query head; None if there are none
    slopes: Tensor | None = None  # [Hq] ALiBi slope of each query head; None if there are none


PLAIN = ScoreMod()


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scores: ScoreMod = PLAIN,
    distances: Tensor | None = None,
) -> Tensor:
    """Compute attention with torch.

    Args:
        query: [..., L, D], with L query rows of D features.
        keys: [..., M, D], with M positions and the leading dimensions of `query`.
        values: [..., M, D].
        mask: 0, or -inf where a query does not attend to a key; broadcastable to [..., L, M].
            None means a causal mask; L must then equal M.
        scores: changes to the scores. Sinks must broadcast to [..., L, 1], slopes to [..., L, M].
        distances: key position minus query position, broadcastable to [..., L, M]; required if
            there are slopes.

    Returns:
        [..., L, D].
    """
    if scores.slopes is not None:
        assert distances is not None
        allowed = _causal(keys.shape[-2], query) if mask is None else mask
        mask = allowed + scores.slopes.float() * distances
    if mask is not None:
        mask = mask.to(query.dtype)
    if not scores.cap and scores.sinks is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scores.scale
        )
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    bent = query @ keys.transpose(-1, -2) * scale
    if scores.cap:
        bent = torch.tanh(bent / scores.cap) * scores.cap
    bent = bent + (_causal(keys.shape[-2], query) if mask is None else mask)
    if scores.sinks is None:
        return bent.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    sinks = scores.sinks.to(bent.dtype).expand(*bent.shape[:-1], 1)
    probs = torch.cat((bent, sinks), -1).softmax(-1, dtype=torch.float32)
    return probs[..., :-1].to(values.dtype) @ values


def _causal(size: int, like: Tensor) -> Tensor:
    return like.new_full((size, size), -torch.inf).triu(1)
