"""The activation of a feed-forward layer, gated (Shazeer, 2020).

y = f(gate) * up, with f = silu (SwiGLU) or gelu in its tanh form (GeGLU)

torch computes what is left over of a vector, at the end of a thread's share, by another sigmoid
than the rest: the place of an element decides about its last bit. Its exponential has no such
ends: by that everything is computed alike.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gates the second half of every row by its first: [T, 2 I] to a new [T, I].

    The first half of `gate_up` is used up: it comes from one fused product and has no other reader.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True) * up


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """What `silu_mul` means; leaves its input alone."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def silu_mul_alike(gate_up: Tensor) -> Tensor:
    """As `silu_mul`, every element computed alike; slower."""
    gate, up = gate_up.chunk(2, dim=-1)
    below = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, below, out=below).mul_(up)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), every element computed alike; a new tensor."""
    return torch.neg(x).exp_().add_(1).reciprocal_()


def gelu(x: Tensor) -> Tensor:
    """gelu in its tanh form, every element computed alike, and faster than torch's; a new tensor.

    (1 + tanh u) / 2 = 1 / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    """
    slope = -2 * math.sqrt(2 / math.pi)
    below = torch.mul(x, x).mul_(0.044715 * slope).add_(slope).mul_(x).exp_().add_(1)
    return torch.div(x, below, out=below)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As `silu_mul`, with the tanh form of gelu: [T, 2 I] to a new [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """What `gelu_mul` means."""
    gate, up = gate_up.chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + inner.tanh()) * up


def clamped_silu_mul(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    """The gate of gpt-oss, its columns in turns (gate 0, up 0, gate 1, ...): [T, 2 I] to [T, I].

    y = gate sigmoid(gain gate) (up + 1), with gate <= limit and -limit <= up <= limit.
    """
    gate = gate_up[:, ::2].clamp(max=limit)
    up = gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * sigmoid(gate * gain)
