"""The decoder: one for all families, set up by a `ModelSpec`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.layers.attention import Attention, StepInputs
from penstock.workers.layers.linear import Linear, empty_linear
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.norm import RmsNorm
from penstock.workers.models.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp

    def __call__(self, hidden: Tensor, step: StepInputs, layer_cache: Tensor) -> None:
        """hidden: [T, hidden_size], changed in place."""
        hidden += self.attention(self.attention_norm(hidden), step, layer_cache)
        hidden += self.mlp(self.mlp_norm(hidden))


@dataclass(frozen=True, slots=True)
class Decoder:
    """The whole model on one device. Its weights are filled in through `tensors`."""

    spec: ModelSpec
    embeddings: Tensor  # [vocab_size, hidden_size]
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Tensor  # [vocab_size, hidden_size]; the embeddings themselves where they are tied
    frequencies: Tensor  # [head_dim / 2] float32: radians a position of the rotary embedding

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    @property
    def device(self) -> torch.device:
        return self.embeddings.device

    def __call__(self, tokens: Tensor, step: StepInputs, cache: Tensor) -> Tensor:
        """Runs T tokens and writes their keys and values.

        tokens: [T] integers; cache: [layers, 2, N, H, S, D]. Returns [T, hidden_size], before
        the last norm.
        """
        hidden = functional.embedding(tokens, self.embeddings)
        for layer, layer_cache in zip(self.layers, cache.unbind(0), strict=True):
            layer(hidden, step, layer_cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] of chosen tokens to [S, vocab_size] float32."""
        return functional.linear(self.norm(hidden), self.head).to(torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint goes: views of the weights, by its name there."""
        found = {
            "model.embed_tokens.weight": self.embeddings,
            "model.norm.weight": self.norm.weight,
        }
        if not self.spec.tie_embeddings:
            found["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            found |= _layer_tensors(layer, f"model.layers.{index}")
        return found


def empty_decoder(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder whose weights are yet to be loaded (on the `meta` device: shapes only)."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(size: int) -> RmsNorm:
        return RmsNorm(empty(size), spec.norm_eps)

    def linear(num_inputs: int, sizes: tuple[int, ...], bias: bool) -> Linear:
        return empty_linear(num_inputs, sizes, bias, dtype, device)

    embeddings = empty(spec.vocab_size, spec.hidden_size)
    # On the host: arithmetic on `meta` tensors makes torch load its compiler, which takes seconds.
    frequencies = rotary_frequencies(spec.rope, spec.head_dim)
    return Decoder(
        spec=spec,
        embeddings=embeddings,
        layers=tuple(_empty_layer(spec, window, norm, linear) for window in spec.windows),
        norm=norm(spec.hidden_size),
        head=embeddings if spec.tie_embeddings else torch.empty_like(embeddings),
        frequencies=frequencies.to(device),
    )


def _empty_layer(
    spec: ModelSpec,
    window: int,
    norm: Callable[[int], RmsNorm],
    linear: Callable[[int, tuple[int, ...], bool], Linear],
) -> DecoderLayer:
    query_size = spec.num_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = Attention(
        qkv=linear(hidden, (query_size, kv_size, kv_size), spec.qkv_bias),
        output=linear(query_size, (hidden,), spec.output_bias),
        q_norm=norm(spec.head_dim) if spec.qk_norm else None,
        k_norm=norm(spec.head_dim) if spec.qk_norm else None,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=window,
    )
    mlp = Mlp(
        gate_up=linear(hidden, (inner, inner), spec.mlp_bias),
        down=linear(inner, (hidden,), spec.mlp_bias),
    )
    return DecoderLayer(norm(hidden), attention, norm(hidden), mlp)


def _layer_tensors(layer: DecoderLayer, prefix: str) -> dict[str, Tensor]:
    attention, mlp = layer.attention, layer.mlp
    found = {
        "input_layernorm.weight": layer.attention_norm.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        **attention.qkv.tensors(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        **attention.output.tensors(["self_attn.o_proj"]),
        **mlp.gate_up.tensors(["mlp.gate_proj", "mlp.up_proj"]),
        **mlp.down.tensors(["mlp.down_proj"]),
    }
    if attention.q_norm is not None and attention.k_norm is not None:
        found["self_attn.q_norm.weight"] = attention.q_norm.weight
        found["self_attn.k_norm.weight"] = attention.k_norm.weight
    return {f"{prefix}.{name}": tensor for name, tensor in found.items()}


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians a position of each feature pair: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    # Llama 3: long waves are stretched, short ones kept, those between blended linearly.
    turns = rope.original_max_len * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
