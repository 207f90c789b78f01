"""The decoder-only transformer of all model families, configured by a `ModelSpec`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.layers.attention import Attention, StepInputs
from penstock.workers.layers.decoder_layer import DecoderLayer
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.norm import Norm
from penstock.workers.layers.vocab_parallel import gather_logits, vocab_parallel_embedding
from penstock.workers.models.model_builder import ModelBuilder
from penstock.workers.models.rotary import Rotary, make_rotary
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.weight_map import layer_tensors
from penstock.workers.parallel.parallel_groups import SINGLE_RANK, ParallelGroups
from penstock.workers.weights.sharding import local_spec


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model, or one rank's shard of a model. Weights are loaded through `tensors`."""

    spec: ModelSpec  # spec of this rank's shard
    dtype: torch.dtype
    device: torch.device
    embeddings: Tensor | None  # [vocab_size, hidden_size]; None except on the first stage
    embedding_scale: float  # rounded to the dtype of the embeddings
    embedding_norm: Norm | None
    first_layer: int
    layers: tuple[DecoderLayer, ...]
    norm: Norm | None  # final norm; None except on the last stage
    head: Linear | None  # None except on the last stage; if tied, its weight is `embeddings`
    rotaries: tuple[Rotary, ...]  # rotary tables; layers refer to a table by its index
    ranks: ParallelGroups

    def __call__(self, tokens: Tensor, step: StepInputs, cache: Tensor) -> Tensor:
        """Run this stage's layers on T tokens and write their keys and values to the cache.

        With several stages, receive the hidden states from the previous stage, and send the result
        to the next stage.

        Args:
            tokens: [T] token ids.
            step: inputs that all layers share.
            cache: `KvCache.data`.

        Returns:
            Hidden states [T, hidden_size], before the final norm.
        """
        links = self.ranks.links
        if links is not None and links.prev_stage is not None:
            hidden = self._empty_hidden(len(tokens))
            links.receive(hidden)
        else:
            hidden = self._embed(tokens)
        for layer, layer_cache in zip(self.layers, cache.unbind(0), strict=True):
            layer(hidden, step, layer_cache)
        if links is not None and links.next_stage is not None:
            links.send(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of S tokens.

        Args:
            hidden: [S, hidden_size] hidden states of the tokens.

        Returns:
            [S, vocab_size] float32; [S, 0] on all stages except the last.
        """
        if self.head is None or self.norm is None:
            return hidden.new_empty((len(hidden), 0), dtype=torch.float32)
        logits = self.head(self.norm(hidden)).to(torch.float32)
        if self.ranks.stage is not None:
            logits = gather_logits(logits, self.spec.vocab_size, self.ranks.stage)
        return self.cap_logits(logits)

    def cap_logits(self, logits: Tensor) -> Tensor:
        """Apply the soft cap to the logits in place, if the model has a soft cap."""
        cap = self.spec.logit_cap
        return logits if not cap else logits.div_(cap).tanh_().mul_(cap)

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the weights, to be loaded, by the tensors' names in the checkpoint."""
        names = self.spec.names
        found: dict[str, Tensor] = {}
        if self.norm is not None and self.head is not None:
            found = self.norm.tensors(names.norm) | self.head.tensors([names.head])
            if self.spec.tie_embeddings:
                found[f"{names.embeddings}.weight"] = found.pop(f"{names.head}.weight")
        if self.embeddings is not None:
            found[f"{names.embeddings}.weight"] = self.embeddings
        if self.embedding_norm is not None:
            found |= self.embedding_norm.tensors(names.embedding_norm)
        for number, block in enumerate(self.layers, self.first_layer):
            found |= layer_tensors(block, names, number)
        return found

    def finish_loading(self) -> None:
        """Reorder weights that have another layout in the checkpoint. Call once after loading."""
        for block in self.layers:
            if self.spec.qkv_grouped and isinstance(block.attention, Attention):
                block.attention.ungroup()

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.embeddings is not None
        ranks = self.ranks
        if ranks.stage is None:
            hidden = functional.embedding(tokens, self.embeddings)
        else:
            first = ranks.coord.tokens(self.spec.vocab_size).start
            hidden = vocab_parallel_embedding(tokens, self.embeddings, first, ranks.stage)
        if self.embedding_scale != 1:
            hidden *= self.embedding_scale
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden)

    def _empty_hidden(self, num_tokens: int) -> Tensor:
        shape = (num_tokens, self.spec.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def empty_decoder(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
    ranks: ParallelGroups = SINGLE_RANK,
) -> Decoder:
    """Create a decoder with uninitialised weights (on the `meta` device: shapes only).

    Args:
        spec: spec of the whole model.

    Raises:
        BadShape: if the model cannot be divided among the ranks.
    """
    coord, local = ranks.coord, local_spec(spec, ranks.coord)
    assembly = ModelBuilder(local, dtype, device, deterministic, ranks)
    embeddings = embedding_norm = head = None
    num_tokens = len(coord.tokens(spec.vocab_size))
    if coord.is_first:
        embeddings = assembly.empty(num_tokens, spec.hidden_size)
        embedding_norm = assembly.norm(spec.hidden_size) if spec.embedding_norm else None
    if coord.is_last:
        tied = embeddings if spec.tie_embeddings else None
        weight = assembly.empty(num_tokens, spec.hidden_size) if tied is None else tied
        head_bias = assembly.empty(num_tokens) if spec.head_bias else None
        head = Linear(weight, head_bias, (num_tokens,))
    layers = coord.layers(spec.num_layers)
    return Decoder(
        spec=local,
        dtype=dtype,
        device=device,
        embeddings=embeddings,
        embedding_scale=float(torch.tensor(spec.embedding_scale, dtype=dtype)),
        embedding_norm=embedding_norm,
        first_layer=layers.start,
        layers=tuple(assembly.decoder_layer(number) for number in range(len(layers))),
        norm=assembly.norm(spec.hidden_size) if coord.is_last else None,
        head=head,
        rotaries=tuple(make_rotary(rope, spec.rotated_dim, device) for rope in spec.ropes),
        ranks=ranks,
    )
