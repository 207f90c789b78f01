"""A plain torch engine, as a baseline: eager operations, contiguous KV cache, SDPA.

The weights share the memory of a `Decoder`. The baseline uses only operations of torch:
fused projections, batched decode steps, and attention by `scaled_dot_product_attention`. Prompts
are computed whole and one at a time. Steps with a prompt alternate with decode steps. There are no
CUDA graphs, no paging, no prefix cache and no overlap of steps.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.loadtests.gpu.replay import Prompt
from penstock.workers.layers.attention import Attention
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.norm import RmsNorm
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.rotary_embedding import rotary_frequencies

MASK_MULTIPLE = 64  # lengths in masked attention are rounded up to a multiple of this number


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class TorchModel:
    """A dense decoder of the Llama family. Raises ValueError for any other model.

    Args:
        decoder: the model whose weights are used; they must not be packed.
        max_rows: number of sequences that the KV cache can hold.
        max_len: positions of each sequence, a multiple of MASK_MULTIPLE.
    """

    def __init__(self, decoder: Decoder, max_rows: int, max_len: int) -> None:
        spec = decoder.spec
        assert decoder.norm is not None
        assert decoder.head is not None
        assert decoder.embeddings is not None
        self.layers = [
            _layer(block.attention, block.mlp, block.attention_norm, block.mlp_norm)
            for block in decoder.layers
        ]
        self.heads, self.kv_heads, self.dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.max_len, self.eps, self.norm = max_len, spec.norm_eps, _weight_of(decoder.norm)
        self.embeddings, self.head = decoder.embeddings, decoder.head.weight
        angles = torch.outer(torch.arange(max_len), rotary_frequencies(spec.rope, self.dim))
        self.cos, self.sin = (each.to(decoder.device) for each in (angles.cos(), angles.sin()))
        shape = (len(self.layers), 2, max_rows, self.kv_heads, max_len, self.dim)
        self.kv = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)

    def prefill(self, row: int, tokens: Tensor) -> Tensor:
        """Compute a prompt [T] into a row of the cache and return the next token, []."""
        length = len(tokens)
        angles = self.cos[:length, None], self.sin[:length, None]
        hidden = functional.embedding(tokens, self.embeddings)
        for number, layer in enumerate(self.layers):
            query, key, value = self._project(layer, hidden, angles)
            self.kv[number, 0, row, :, :length] = key.transpose(0, 1)
            self.kv[number, 1, row, :, :length] = value.transpose(0, 1)
            q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            self._finish(layer, hidden, mixed[0].transpose(0, 1).reshape(length, -1))
        return self._next(hidden[-1:])[0]

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, equal: bool) -> Tensor:
        """Compute one token for each of the first R rows and return the next tokens, [R].

        Args:
            tokens: [R] latest token of each row.
            positions: [R] position of each token.
            longest: largest position of all rows, plus 1.
            equal: whether all positions are equal, so that no mask is needed.
        """
        num_rows, mask = len(tokens), None
        if not equal:
            longest = -(-longest // MASK_MULTIPLE) * MASK_MULTIPLE
            columns = torch.arange(longest, device=tokens.device)
            mask = (columns <= positions[:, None])[:, None, None]
        rows = torch.arange(num_rows, device=tokens.device)
        angles = self.cos[positions][:, None], self.sin[positions][:, None]
        hidden = functional.embedding(tokens, self.embeddings)
        for number, layer in enumerate(self.layers):
            query, key, value = self._project(layer, hidden, angles)
            keys, values = self.kv[number, :, :num_rows]
            keys[rows, :, positions] = key
            values[rows, :, positions] = value
            # The query heads of a KV head form one matrix, so that the keys are not copied.
            grouped = query.view(num_rows, self.kv_heads, -1, self.dim)
            mixed = functional.scaled_dot_product_attention(
                grouped, keys[:, :, :longest], values[:, :, :longest], attn_mask=mask
            )
            self._finish(layer, hidden, mixed.reshape(num_rows, -1))
        return self._next(hidden)

    def _project(
        self, layer: Layer, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, Hq, D], keys and values [T, H, D] of hidden states [T, hidden]."""
        x = functional.rms_norm(hidden, hidden.shape[1:], layer.attention_norm, self.eps)
        heads = functional.linear(x, layer.qkv).view(len(x), -1, self.dim)
        both, values = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        (cos, sin), (low, high) = angles, both.float().chunk(2, -1)
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(heads.dtype)
        return rotated[:, : self.heads], rotated[:, self.heads :], values

    def _finish(self, layer: Layer, hidden: Tensor, mixed: Tensor) -> None:
        """Add the outputs of attention and of the feed-forward layer to `hidden`."""
        hidden += functional.linear(mixed, layer.output)
        x = functional.rms_norm(hidden, hidden.shape[1:], layer.mlp_norm, self.eps)
        gate, up = functional.linear(x, layer.gate_up).chunk(2, -1)
        hidden += functional.linear(functional.silu(gate) * up, layer.down)

    def _next(self, hidden: Tensor) -> Tensor:
        x = functional.rms_norm(hidden, hidden.shape[1:], self.norm, self.eps)
        return functional.linear(x, self.head).argmax(-1)


def _layer(attention: object, mlp: object, before: object, between: object) -> Layer:
    if (
        not isinstance(attention, Attention)
        or not isinstance(mlp, Mlp)
        or not isinstance(attention.output, Linear)
        or not isinstance(mlp.down, Linear)
        or attention.q_norm is not None
    ):
        raise ValueError("the torch baseline computes dense models of the Llama family only")
    return Layer(
        _weight_of(before),
        attention.qkv.weight,
        attention.output.weight,
        _weight_of(between),
        mlp.gate_up.weight,
        mlp.down.weight,
    )


def _weight_of(norm: object) -> Tensor:
    if not isinstance(norm, RmsNorm):
        raise ValueError(f"the torch baseline computes RMS norms only, not a {type(norm).__name__}")
    return norm.weight


@dataclass(slots=True)
class _Running:
    number: int
    row: int
    left: int  # number of tokens that are still to be generated


class TorchEngine:
    """Continuous batching over a `TorchModel`.

    A step computes one prompt, or one token per row.
    """

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        device, num_rows = model.kv.device, model.kv.shape[2]
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._lengths = [0] * num_rows  # length of each row, kept on the host; 0 means a free row
        self._queued: deque[tuple[int, Prompt, int]] = deque()
        self._running: list[_Running] = []
        self._prompt_was_last = False

    def submit(self, number: int, prompt: Prompt, max_tokens: int) -> None:
        self._queued.append((number, prompt, max_tokens))

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, int]]:
        has_row = len(self._running) < len(self._lengths)
        computes_prompt = bool(self._queued) and has_row
        if self._prompt_was_last and self._running:
            computes_prompt = False
        self._prompt_was_last = computes_prompt
        return [self._prefill()] if computes_prompt else self._decode()

    def _prefill(self) -> tuple[int, int]:
        number, prompt, max_tokens = self._queued.popleft()
        row = self._lengths.index(0)
        tokens = torch.tensor(prompt, device=self._tokens.device)
        drawn = self._model.prefill(row, tokens)
        if max_tokens > 1:
            self._tokens[row], self._positions[row] = drawn, len(prompt)
            self._lengths[row] = len(prompt)
            self._running.append(_Running(number, row, max_tokens - 1))
        return number, int(drawn)

    def _decode(self) -> list[tuple[int, int]]:
        used = 1 + max(each.row for each in self._running)
        lengths = self._lengths[:used]
        positions = self._positions[:used]
        drawn = self._model.decode(
            self._tokens[:used], positions, 1 + max(lengths), len(set(lengths)) == 1
        )
        self._tokens[:used] = drawn
        # Free rows below `used` are computed too, but their results are ignored.
        positions.add_(1).clamp_(max=self._model.max_len - 1)
        on_host, found = drawn.tolist(), []
        for each in self._running:
            found.append((each.number, on_host[each.row]))
            each.left -= 1
            self._lengths[each.row] += 1
            if not each.left:
                self._lengths[each.row] = 0
        self._running = [each for each in self._running if each.left]
        return found
