"""Attention whose scores are bent on their way to the softmax.

s = q K^T scale;  s = cap tanh(s / cap) where there is a cap (Gemma 2);
s = s + slope (j - i) of position i and seen position j, where a head has a slope (ALiBi);
out = softmax([s, sink])[without the sink] V where a head has a sink (gpt-oss): a score that
takes its part of the probability and gives nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ScoreMod:
    """How scores are made. The default is the plain form, which has the quickest kernels."""

    scale: float | None = None  # None: 1 / sqrt(D)
    cap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # [Hq]
    slopes: Tensor | None = None  # [Hq]


PLAIN = ScoreMod()


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scores: ScoreMod = PLAIN,
    distances: Tensor | None = None,
) -> Tensor:
    """query [..., L, D], keys and values [..., M, D]; the same leading dimensions.

    mask: 0 or -inf, broadcast to [..., L, M]; None: causal, with L = M. Sinks are shaped to
    broadcast with [..., L, 1], slopes with the distances j - i [..., L, M]. Returns [..., L, D].
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
