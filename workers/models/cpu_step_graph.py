"""Runs decode steps (one token per sequence) of a decoder as a CPU step graph.

Step graphs support float32 models on one rank with gated feed-forward layers and RMS norms (Llama,
Mistral, Qwen, Gemma and similar), including experts chosen by a plain softmax. Other models call
each operation separately. Each layer's `lower` appends the layer's operations to the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.kernels.cpu_common.deferred_loops import is_deferred
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.graph import CpuStepGraph, load_cpu_kernels, loops_name
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.models.decoder import Decoder, DecoderBuffers
from penstock.workers.models.protocols import Model
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.scheduling.sequence import Ints, StepPlan

MAX_ROWS = 128
"""Maximum number of tokens of a step that runs as a graph. In larger steps, a graph saves hardly
any time."""


@dataclass(frozen=True, slots=True)
class DecodeStepGraph:
    """Step graph of a decoder; runs steps in which every sequence has one token."""

    decoder: Decoder
    graph: CpuStepGraph
    buffers: DecoderBuffers
    loops: str  # name of the group of compiled loops

    def supports(self, plan: StepPlan) -> bool:
        """Return whether the graph can run this step now."""
        return len(plan.tokens) == len(plan.rows) <= MAX_ROWS and not is_deferred(self.loops)

    def run(
        self,
        plan: StepPlan,
        tokens: Ints,
        rotary: tuple[Tensor, ...],
        beside: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run a step and return its logits.

        Args:
            plan: the step, with one token per sequence.
            tokens: [T] token ids.
            rotary: the complete rotary tables, each [positions, 2, R].
            beside: starts work on other threads. Called right before the graph runs, because the
                graph releases the GIL. If threads started earlier, they would compete with this
                thread for the GIL.

        Returns:
            [T, vocab_size], valid until the next run.
        """
        decoder, graph, buffers, num_rows = self.decoder, self.graph, self.buffers, len(tokens)
        assert decoder.embeddings is not None
        hidden = graph.view(buffers.hidden, num_rows)
        np.take(decoder.embeddings.numpy(), tokens, 0, hidden.numpy())
        if decoder.embedding_scale != 1:
            hidden *= decoder.embedding_scale
        for buffer, table in zip(buffers.angles, rotary, strict=True):
            rows = graph.view(buffer, num_rows).numpy()
            np.take(table.view(len(table), -1).numpy(), plan.positions, 0, rows)
        if beside is not None:
            beside()
        graph.run(plan.slots, plan.context_lens, plan.block_tables)
        if buffers.logits is None:
            return decoder.logits(hidden)
        return decoder.cap_logits(graph.view(buffers.logits, num_rows))


def build_cpu_step_graph(decoder: Model, cache: KvCache) -> DecodeStepGraph | None:
    """Build the step graph of a model and its cache; return None for an unsupported model.

    If the loops of the graph are deferred, the graph supports no step until they are loaded.
    """
    device = cache.data.device
    if not isinstance(decoder, Decoder) or device.type != "cpu" or runs_kernels(device):
        return None
    if decoder.embedding_norm is not None:  # `DecodeStepGraph.run` cannot apply this norm
        return None
    try:
        graph = GraphBuilder(MAX_ROWS, cache.data)
        buffers = decoder.lower(graph)
    except UnsupportedGraph:
        return None
    built = graph.build()
    loops = loops_name(cache.data.dtype, built.extensions)
    if not is_deferred(loops):
        load_cpu_kernels(cache.data.dtype, built.extensions)
    return DecodeStepGraph(decoder, built, buffers, loops)
