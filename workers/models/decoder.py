"""The decoder: one for all families, set up by a `ModelSpec`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.layers.attention import Attention, StepInputs
from penstock.workers.layers.block import Block
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.norm import Norm
from penstock.workers.models.assembly import Assembly
from penstock.workers.models.rotary import Rotary, make_rotary
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tensors import block_tensors


@dataclass(frozen=True, slots=True)
class Decoder:
    """The whole model on one device. Its weights are filled in through `tensors`."""

    spec: ModelSpec
    embeddings: Tensor  # [vocab_size, hidden_size]
    embedding_scale: float  # as it is in the embeddings' dtype
    layers: tuple[Block, ...]
    norm: Norm
    head: Linear  # to the vocabulary; its weight is the embeddings where they are tied
    rotaries: tuple[Rotary, ...]  # the layers name theirs by number

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    @property
    def device(self) -> torch.device:
        return self.embeddings.device

    def __call__(self, tokens: Tensor, step: StepInputs, cache: Tensor) -> Tensor:
        """Runs T tokens and writes their keys and values.

        tokens: [T] integers; cache: the data of a `KvCache`. Returns [T, hidden_size], before
        the last norm.
        """
        hidden = functional.embedding(tokens, self.embeddings)
        if self.embedding_scale != 1:
            hidden *= self.embedding_scale
        for layer, layer_cache in zip(self.layers, cache.unbind(0), strict=True):
            layer(hidden, step, layer_cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] of chosen tokens to [S, vocab_size] float32."""
        logits = self.head(self.norm(hidden)).to(torch.float32)
        cap = self.spec.logit_cap
        return logits if not cap else logits.div_(cap).tanh_().mul_(cap)

    def tensors(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint goes: views of the weights, by its name there."""
        names = self.spec.names
        found = {f"{names.embeddings}.weight": self.embeddings, **self.norm.tensors(names.norm)}
        head = self.head.tensors([names.head])
        if self.spec.tie_embeddings:
            del head[f"{names.head}.weight"]
        found |= head
        for number, block in enumerate(self.layers):
            found |= block_tensors(block, names, number)
        return found

    def settle(self) -> None:
        """Puts what was loaded as the checkpoint has it into our order; once."""
        for block in self.layers:
            if self.spec.qkv_grouped and isinstance(block.attention, Attention):
                block.attention.ungroup()


def empty_decoder(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, deterministic: bool = False
) -> Decoder:
    """A decoder whose weights are yet to be loaded (on the `meta` device: shapes only)."""
    assembly = Assembly(spec, dtype, device, deterministic)
    embeddings = assembly.empty(spec.vocab_size, spec.hidden_size)
    head = embeddings if spec.tie_embeddings else torch.empty_like(embeddings)
    head_bias = assembly.empty(spec.vocab_size) if spec.head_bias else None
    return Decoder(
        spec=spec,
        embeddings=embeddings,
        embedding_scale=float(torch.tensor(spec.embedding_scale, dtype=dtype)),
        layers=tuple(assembly.block(number) for number in range(spec.num_layers)),
        norm=assembly.norm(spec.hidden_size),
        head=Linear(head, head_bias, (spec.vocab_size,)),
        rotaries=tuple(make_rotary(rope, spec.rotated_dim, device) for rope in spec.ropes),
    )
