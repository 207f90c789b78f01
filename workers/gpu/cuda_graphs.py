"""Captured CUDA graphs of decode steps: a step needs one launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.attention.backends.interface import HostBatch
from penstock.workers.gpu.graph_buckets import GraphBucket, GraphBuckets
from penstock.workers.gpu.inputs import DecodeInputs, DeviceBatch
from penstock.workers.scheduling.sequence import StepPlan

Prepare = Callable[[HostBatch], None]
"""Function that does the host's work for a step, before the step is captured or replayed."""

Compute = Callable[[DeviceBatch], Tensor]
"""Function that maps a batch to hidden states [T, hidden_size]. It only launches kernels and does
not wait for the device."""


class Captures(Protocol):
    """Interface for capturing and replaying GPU work; implemented by `CudaCaptures`."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture the kernels that `compute` launches, and return a function that replays them."""
        ...


class CudaCaptures:
    """Captures CUDA graphs that share one memory pool; only one graph may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()  # warm-up run: compiles kernels and initialises libraries
        graph = torch.cuda.CUDAGraph()
        # "thread_local" lets other threads, such as those of KV transfers, use CUDA during the
        # capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Callable[[], None]
    hidden: Tensor  # [rows, hidden_size]: view of the output buffer that all graphs share


class DecodeGraphs:
    """The captured decode steps of one model runner."""

    def __init__(
        self,
        buckets: GraphBuckets,
        inputs: DecodeInputs,
        prepare: Prepare,
        compute: Compute,
        captures: Captures,
    ) -> None:
        self._buckets = buckets
        self._inputs = inputs
        self._prepare = prepare
        self._compute = compute
        self._captures = captures
        self._captured: dict[GraphBucket, _Captured] = {}
        self._hidden: Tensor | None = None

    def capture(self, buckets: list[GraphBucket], progress: Callable[[int, int], None]) -> None:
        """Capture a graph for each bucket, in order; the first bucket must have the most rows.

        progress: called with (number of captured graphs, total), first with (0, total).
        """
        progress(0, len(buckets))
        for number, rung in enumerate(buckets, 1):
            self._captured[rung] = self._capture(rung)
            progress(number, len(buckets))

    def run(
        self, plan: StepPlan, drawn: Tensor | None, received: Tensor | None = None
    ) -> Tensor | None:
        """Run a step's graph and return hidden states [B, hidden_size], valid until the next run.

        Return None if no captured graph fits the step.

        drawn, received: see `DecodeInputs.fill`.
        """
        rung = self._buckets.bucket_for(plan)
        captured = None if rung is None else self._captured.get(rung)
        if rung is None or captured is None:
            return None
        self._prepare(self._inputs.fill(plan, rung.rows, drawn, received))
        captured.replay()
        return captured.hidden[: len(plan.rows)]

    def _capture(self, rung: GraphBucket) -> _Captured:
        batch = self._inputs.batch(rung.rows, rung.context)
        self._prepare(self._inputs.padding_rows(rung.rows))
        if self._hidden is None:
            self._hidden = torch.empty_like(self._compute(batch))
        hidden = self._hidden[: rung.rows]
        replay = self._captures.capture(lambda: _write(hidden, self._compute(batch)))
        return _Captured(replay, hidden)


def _write(hidden: Tensor, computed: Tensor) -> None:
    hidden.copy_(computed)
