"""The decoder-only transformer of all model families, configured by a `ModelSpec`."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.workers.layers.attention import StepInputs
from penstock.workers.layers.decoder_layer import DecoderLayer
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.norm import Norm
from penstock.workers.layers.parameter import Parameter, parameter
from penstock.workers.layers.vocab_parallel import gather_logits, vocab_parallel_embedding
from penstock.workers.models.model_builder import ModelBuilder
from penstock.workers.models.rotary_embedding import Rotary, make_rotary
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.weight_map import (
    NamedLinears,
    layer_linears,
    layer_parameters,
    layer_stacks,
)
from penstock.workers.parallel.parallel_groups import SINGLE_RANK, ParallelGroups
from penstock.workers.weights.sharding import local_spec


@dataclass(frozen=True, slots=True)
class DecoderBuffers:
    """Inputs and outputs of a decoder's CPU step graph."""

    hidden: Buffer  # input: the embeddings. The layers then update this buffer.
    angles: tuple[Buffer, ...]  # inputs: cosines and sines of the positions, per rotary table
    # output: logits before the soft cap; None if the graph does not contain the head
    logits: Buffer | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model, or one rank's shard of a model. Weights are loaded through `parameters`."""

    spec: ModelSpec  # spec of this rank's shard
    dtype: torch.dtype
    device: torch.device
    embeddings: Tensor | None  # [vocab_size, hidden_size]; None except on the first stage
    embedding_scale: float  # factor of the embeddings, rounded to their dtype
    embedding_norm: Norm | None
    first_layer: int
    layers: tuple[DecoderLayer, ...]
    norm: Norm | None  # final norm; None except on the last stage
    head: Linear | None  # None except on the last stage. The weight of a tied head is `embeddings`.
    rotaries: tuple[Rotary, ...]  # rotary tables; layers refer to a table by its index
    ranks: ParallelGroups
    linear_methods: str = "float"  # names of all linear methods of the model; see `layout_of`

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
        hidden = self.forward(tokens, step, cache, self.receive(len(tokens)))
        self.send(hidden)
        return hidden

    def receive(self, num_tokens: int) -> Tensor | None:
        """Receive hidden states [T, hidden_size] of the previous stage; None on the first stage."""
        links = self.ranks.links
        if links is None or links.prev_stage is None:
            return None
        return links.receive(self._empty_hidden(num_tokens))

    def forward(
        self, tokens: Tensor, step: StepInputs, cache: Tensor, received: Tensor | None = None
    ) -> Tensor:
        """Run this stage's layers, without the exchange with other stages.

        Args:
            received: [T, hidden_size] result of `receive`; overwritten.
        """
        hidden = self._embed(tokens) if received is None else received
        for layer, layer_cache in zip(self.layers, cache.unbind(0), strict=True):
            layer(hidden, step, layer_cache)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage; do nothing on the last stage.

        No code may change `hidden` afterwards, because the send may still be in progress.
        """
        links = self.ranks.links
        if links is not None and links.next_stage is not None:
            links.send(hidden)

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

    def lower(self, graph: GraphBuilder) -> DecoderBuffers:
        """Append all layers and, if supported, the head to a CPU step graph.

        Raises:
            UnsupportedGraph: if the graph cannot represent a layer.
        """
        if self.ranks is not SINGLE_RANK or self.dtype != torch.float32:
            raise UnsupportedGraph(
                "the CPU step graph supports only torch.float32 on one rank, not "
                f"{self.dtype} on {'one rank' if self.ranks is SINGLE_RANK else 'several ranks'}"
            )
        hidden = graph.alloc(self.spec.hidden_size)
        angles = tuple(graph.alloc(2 * 2 * len(each.frequencies)) for each in self.rotaries)
        for number, layer in enumerate(self.layers):
            layer.lower(graph, hidden, angles, number)
        return DecoderBuffers(hidden, angles, self._lower_head(graph, hidden))

    def _lower_head(self, graph: GraphBuilder, hidden: Buffer) -> Buffer | None:
        """Append final norm and head; return the logits' buffer, or None if unsupported."""
        assert self.norm is not None
        assert self.head is not None
        if not graph.supports_linear(self.head.packed):
            return None
        x, logits = graph.scratch("normalised", hidden.width), graph.alloc(self.spec.vocab_size)
        self.norm.lower(graph, hidden, x)
        self.head.lower(graph, x, logits)
        return logits

    def parameters(self) -> dict[str, Parameter]:
        """Return the tensors to be loaded, by their names in the checkpoint."""
        names = self.spec.names
        found: dict[str, Parameter] = {}
        if self.norm is not None and self.head is not None:
            found |= self.norm.parameters(names.norm)
            head = self.head.parameters([names.head])
            if self.spec.tie_embeddings:
                head[f"{names.embeddings}.weight"] = head.pop(f"{names.head}.weight")
            found |= head
        if self.embeddings is not None:  # the weight of a tied head is in `found` already
            found.setdefault(f"{names.embeddings}.weight", parameter(self, self.embeddings))
        if self.embedding_norm is not None:
            found |= self.embedding_norm.parameters(names.embedding_norm)
        for number, block in enumerate(self.layers, self.first_layer):
            found |= layer_parameters(block, names, number)
        return found

    def linears(self) -> NamedLinears:
        """Yield every `Linear` with the names of its modules.

        Stacked experts, and a head that is tied to the embeddings, are left out.
        """
        if self.head is not None and not self.spec.tie_embeddings:
            yield (self.spec.names.head,), self.head
        for number, block in enumerate(self.layers, self.first_layer):
            yield from layer_linears(block, self.spec.names, number)

    def stacks(self) -> Iterator[tuple[str, ExpertStack]]:
        """Yield every stack of experts with its name in the checkpoint."""
        for number, block in enumerate(self.layers, self.first_layer):
            yield from layer_stacks(block, self.spec.names, number)

    def tensors(self) -> dict[str, Tensor]:
        """Allocate all weights; return views of them by the tensors' names in the checkpoint."""
        return {name: each.data() for name, each in self.parameters().items()}

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
    quantized: bool = False,
) -> Decoder:
    """Create a decoder with uninitialised weights.

    If `device` is `meta`, the weights have only shapes.

    Args:
        spec: spec of the whole model.
        quantized: whether the weights will be quantized; then experts have no float stacks.

    Raises:
        BadShape: if the model cannot be divided among the ranks.
    """
    coord, local = ranks.coord, local_spec(spec, ranks.coord)
    quantized = quantized or (spec.quantization is not None and spec.quantization.method == "mxfp4")
    assembly = ModelBuilder(local, dtype, device, deterministic, ranks, quantized)
    embeddings = embedding_norm = head = None
    num_tokens = len(coord.tokens(spec.vocab_size))
    if coord.is_first:
        embeddings = assembly.empty(num_tokens, spec.hidden_size)
        embedding_norm = assembly.norm(spec.hidden_size) if spec.embedding_norm else None
    if coord.is_last:
        head = assembly.linear(spec.hidden_size, (num_tokens,), spec.head_bias)
        if spec.tie_embeddings and embeddings is not None:
            head.weight = embeddings
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
