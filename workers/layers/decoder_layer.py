"""One decoder layer: attention and feed-forward on the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.workers.layers.attention import Attention, StepInputs
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.layers.mla import LatentAttention
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import MoE
from penstock.workers.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward; the output of each is added to the residual stream.

    The model family determines the norms before and after attention and feed-forward. If `parallel`
    is True, attention and feed-forward read the same hidden states. In this case, if `mlp_norm` is
    None, the feed-forward layer reads the output of `attention_norm`.
    """

    attention_norm: Norm | None
    attention: Attention | LatentAttention
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | MoE | ExpertParallelMoE
    mlp_post_norm: Norm | None
    parallel: bool = False

    def __call__(self, hidden: Tensor, step: StepInputs, layer_cache: Tensor) -> None:
        """Run the layer, and update `hidden` and the cache in place.

        Args:
            hidden: [T, hidden_size], the residual stream.
            step: inputs that all layers share.
            layer_cache: this layer's part of the KV cache.
        """
        x = hidden if self.attention_norm is None else self.attention_norm(hidden)
        if self.parallel:
            made = self.mlp(x if self.mlp_norm is None else self.mlp_norm(hidden))
            hidden += self.attention(x, step, layer_cache)
            hidden += made
            return
        x = self.attention(x, step, layer_cache)
        if self.attention_post_norm is not None:
            x = self.attention_post_norm(x)
        x = self.mlp(
            hidden.add_(x) if self.mlp_norm is None else self.mlp_norm.add_and_norm(hidden, x)
        )
        hidden += x if self.mlp_post_norm is None else self.mlp_post_norm(x)

    def lower(
        self, graph: GraphBuilder, hidden: Buffer, angles: Sequence[Buffer], layer: int
    ) -> None:
        """Append the layer to a CPU step graph, in the order of `__call__`.

        Args:
            hidden: the residual stream, which the layer updates.
            angles: for each rotary table, cosines and sines of the tokens' positions.
            layer: number of this layer in the KV cache.
        """
        if self.parallel or self.attention_norm is None or self.mlp_norm is None:
            raise UnsupportedGraph(
                "the CPU step graph does not support a layer whose attention and MLP run in "
                "parallel, or that lacks a norm before attention or before the MLP"
            )
        x, made = graph.scratch("normalised", hidden.width), graph.scratch("made", hidden.width)
        self.attention_norm.lower(graph, hidden, x)
        self.attention.lower(graph, x, angles, layer, made)
        if self.attention_post_norm is not None:
            self.attention_post_norm.lower(graph, made, made)
        graph.add(hidden, made)
        self.mlp_norm.lower(graph, hidden, x)
        self.mlp.lower(graph, x, made)
        if self.mlp_post_norm is not None:
            self.mlp_post_norm.lower(graph, made, made)
        graph.add(hidden, made)
