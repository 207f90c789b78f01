"""Model runner for GPUs: replays captured decode graphs, and does not wait for the device."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.backends.interface import AttentionBackend, HostBatch
from penstock.kernels.attention.backends.native import NativeBackend
from penstock.kernels.attention.triton_launch import Batch
from penstock.kernels.attention.triton_plan import TiledPlanner
from penstock.kernels.mla.op import plan_mla_on_device
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.gpu.cuda_graphs import Captures, CudaCaptures, DecodeGraphs
from penstock.workers.gpu.graph_buckets import GraphBucket, GraphBuckets
from penstock.workers.gpu.inputs import DecodeInputs, DeviceBatch
from penstock.workers.gpu.pinned import put
from penstock.workers.layers.attention import StepInputs
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.layers.moe import MoE
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.protocols import Model
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.scheduling.sequence import StepPlan

log = logging.getLogger(__name__)


class DeviceRunner(ModelRunner):
    """A `ModelRunner` for a GPU; it returns tensors before the device has computed them.

    The last block of the cache is a scratch block; no plan may use it. A step overwrites the
    hidden states and captured inputs of the previous step. Therefore all steps, and all kernels
    that read a step's logits, must be launched on one stream.

    All ranks of a worker capture the same graphs in the same order, because a graph contains the
    collectives of a stage. Hidden states are exchanged between stages outside of the graphs.
    """

    def __init__(
        self,
        decoder: Model,
        cache: KvCache,
        buckets: GraphBuckets,
        deterministic: bool = False,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Create a runner; if `attention` is None, it uses Penstock's own attention kernels."""
        super().__init__(decoder, cache, deterministic, num_positions=buckets.contexts[-1])
        self._buckets = buckets
        self._device = decoder.device
        self._attention = attention or NativeBackend("triton", deterministic)
        self._latent_planner = TiledPlanner(deterministic)
        # The decoder, if pipeline stages may exchange its hidden states. None for a model of
        # `transformers`, which is never divided into stages.
        self._stage = decoder if isinstance(decoder, Decoder) else None
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(
        self,
        captures: Captures,
        progress: Callable[[int, int], None] = lambda done, total: None,
        buckets: list[GraphBucket] | None = None,
    ) -> None:
        """Capture a decode step for each bucket.

        If the model's steps may wait for the device (see `waits_for_device`), return without
        capturing; all steps then run uncaptured.

        Args:
            captures: captures the steps.
            progress: called with the number of graphs captured so far (at first 0) and their total.
            buckets: buckets to capture, largest first; None: all buckets.
        """
        if reason := waits_for_device(self.decoder):
            log.info("decode steps run without CUDA graphs: %s", reason)
            return
        num_blocks, _, block_size = self.cache.data.shape[2:5]
        num_columns = -(-self._buckets.contexts[-1] // block_size)
        max_rows = self._buckets.rows[-1]
        inputs = DecodeInputs(
            max_rows,
            num_columns,
            block_size,
            num_blocks - 1,
            self._device,
            self._received_buffer(max_rows),
        )
        compute = self._compute_captured
        self._graphs = DecodeGraphs(self._buckets, inputs, self._prepare, compute, captures)
        self._graphs.capture(self._buckets.buckets() if buckets is None else buckets, progress)

    def drop_graphs(self) -> None:
        """Drop all graphs, which frees their memory and removes their references to this runner."""
        self._graphs = None

    def _received_buffer(self, max_rows: int) -> Tensor | None:
        if self._stage is None or self._stage.ranks.coord.is_first:
            return None
        shape = (max_rows, self._stage.spec.hidden_size)
        return torch.zeros(shape, dtype=self._stage.dtype, device=self._device)

    def _hidden(self, plan: StepPlan, drawn: Tensor | None) -> Tensor:
        received = None if self._stage is None else self._stage.receive(len(plan.tokens))
        found = None if self._graphs is None else self._graphs.run(plan, drawn, received)
        hidden = self._run_uncaptured(plan, drawn, received) if found is None else found
        if self._stage is not None and not self._stage.ranks.coord.is_last:
            # Send a copy, because the next replay may overwrite `found` before it has been sent.
            self._stage.send(hidden if found is None else found.clone())
        return hidden

    def _run_uncaptured(
        self, plan: StepPlan, drawn: Tensor | None, received: Tensor | None
    ) -> Tensor:
        self._prepare(HostBatch(plan.query_starts, plan.context_lens, plan.block_tables))
        return self._compute(self._batch(plan, drawn, received))

    def _prepare(self, batch: HostBatch) -> None:
        """Do the host's work for the attention of the next step."""
        self._attention.prepare(batch)
        if self._latent:
            self._latent_planner.prepare(batch.query_starts, batch.context_lens, batch.is_captured)

    def _batch(self, plan: StepPlan, drawn: Tensor | None, received: Tensor | None) -> DeviceBatch:
        """Copy the inputs of an uncaptured step into new tensors on the device."""
        device = self._device
        return DeviceBatch(
            tokens=put(plan.tokens, device) if drawn is None else drawn,
            positions=put(plan.positions, device),
            slots=put(plan.slots, device),
            query_starts=put(plan.query_starts, device),
            context_lens=put(plan.context_lens, device),
            block_tables=put(plan.block_tables, device),
            max_query=int(np.diff(plan.query_starts).max()),
            max_context=int(plan.context_lens.max()),
            received=received,
        )

    def _compute_captured(self, batch: DeviceBatch) -> Tensor:
        """Compute a step to be captured; do not modify `batch.received`, which is a graph input."""
        if batch.received is not None:
            batch = replace(batch, received=batch.received.clone())
        return self._compute(batch)

    def _compute(self, batch: DeviceBatch) -> Tensor:
        """Return hidden states [T, hidden_size]; only launch kernels, to allow graph capture."""
        layer, latent = self.cache.data[0], self._latent
        positions = batch.positions.to(torch.int64)
        where = Batch(batch.query_starts, batch.context_lens, batch.block_tables)
        most = (batch.max_query, batch.max_context)
        planner = self._latent_planner
        step = StepInputs(
            positions=positions,
            cos_sin=self._rope_rows(positions),
            cache_rows=self._cache_rows(batch.slots.to(torch.int64)),
            plans={
                window: self._attention.plan(where, layer, *most, window)
                for window in self._windows
            },
            latent=(
                plan_mla_on_device(*where, layer, latent.rank, planner, batch.max_context)
                if latent
                else None
            ),
        )
        if self._stage is None:
            return self.decoder(batch.tokens, step, self.cache.data)
        return self._stage.forward(batch.tokens, step, self.cache.data, batch.received)


def capture_graphs(runner: ModelRunner, progress: Callable[[int, int], None]) -> None:
    """Capture the CUDA graphs of a runner for a GPU; do nothing for another runner."""
    if isinstance(runner, DeviceRunner):
        runner.capture(CudaCaptures(runner.decoder.device), progress)


def waits_for_device(model: Model) -> str:
    """Return why the steps of `model` may wait for the device; empty if they never do."""
    if not isinstance(model, Decoder):
        return "models of the transformers backend may read tensors on the host"
    for layer in model.layers:
        if isinstance(layer.mlp, MoE | ExpertParallelMoE) and layer.mlp.grouped is None:
            return "experts that cannot be stacked are chosen on the host"
    return ""
