"""A Llama model in plain torch.

The parameters have the names that Hugging Face uses, without the prefix `model.`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama model. The fields have the same names as in config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 32
    vocab_size: int = 2048
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Scale each vector to a root mean square of 1, then multiply it by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_table(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and the sines for the positions from 0 to `length` - 1.

    Both tensors are [length, head_dim].
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings to queries or keys [batch, heads, length, head_dim]."""
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        key_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Compute the attention of x [batch, length, hidden].

        Args:
            x: hidden states [batch, length, hidden].
            rope: cosines and sines, as `rope_table` returns them.
            mask: bool [batch, 1, length, length], true where a token (row) attends to another
                (column).
        """
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(
            rotate(q, rope), rotate(k, rope), v, attn_mask=mask, enable_gqa=True
        )
        return cast(Tensor, self.o_proj(out.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to x [batch, length, hidden]."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """Pre-norm decoder layer: attention and MLP, each with a residual connection."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Apply the layer to x [batch, length, hidden].

        Args:
            x: hidden states [batch, length, hidden].
            rope: cosines and sines, as `rope_table` returns them.
            mask: bool [batch, 1, length, length], true where a token (row) attends to another
                (column).
        """
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """The whole Llama model. The embedding matrix is also used as the output head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rope_table(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif "proj" in name:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden states [batch, length, hidden] of tokens.

        Args:
            tokens: int64 [batch, length] token ids.
            mask: bool [batch, 1, length, length], true where a token (row) attends to another
                (column).
        """
        x = self.embed_tokens(tokens)
        length = tokens.shape[1]
        rope = (cast(Tensor, self.cos)[:length], cast(Tensor, self.sin)[:length])
        for layer in self.layers:
            x = layer(x, rope, mask)
        return cast(Tensor, self.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] for hidden states [..., hidden]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(weight.numel() for weight in self.parameters())
