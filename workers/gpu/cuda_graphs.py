"""Decode steps as captured graphs: one launch a step instead of hundreds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.workers.gpu.graph_buckets import GraphBucket, GraphBuckets
from penstock.workers.gpu.inputs import DecodeInputs, DeviceBatch
from penstock.workers.scheduling.sequence import StepPlan

Compute = Callable[[DeviceBatch], Tensor]
"""From a batch in its places to hidden states [T, hidden_size]; launches, and waits for nothing."""


class Captures(Protocol):
    """What captures."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What does the same again, on the same memory."""
        ...


class CudaCaptures:
    """Graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()  # kernels are compiled and libraries set up by the first call
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile: a KV transfer's do.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Callable[[], None]
    hidden: Tensor  # [rows, hidden_size], the first rows of what all graphs write


class DecodeGraphs:
    """The captured decode steps of one runner."""

    def __init__(
        self, buckets: GraphBuckets, inputs: DecodeInputs, compute: Compute, captures: Captures
    ) -> None:
        self._buckets = buckets
        self._inputs = inputs
        self._compute = compute
        self._captures = captures
        self._captured: dict[GraphBucket, _Captured] = {}
        self._hidden: Tensor | None = None

    def capture(self, buckets: list[GraphBucket], progress: Callable[[int, int], None]) -> None:
        """Captures these, in order; the first has the most rows."""
        progress(0, len(buckets))
        for number, rung in enumerate(buckets, 1):
            self._captured[rung] = self._capture(rung)
            progress(number, len(buckets))

    def run(self, plan: StepPlan, drawn: Tensor | None) -> Tensor | None:
        """The hidden states [B, hidden_size] of a step, there until the next run; None if no graph
        was captured for it. `drawn`: see `DecodeInputs.fill`."""
        rung = self._buckets.bucket_for(plan)
        captured = None if rung is None else self._captured.get(rung)
        if rung is None or captured is None:
            return None
        self._inputs.fill(plan, rung.rows, drawn)
        captured.replay()
        return captured.hidden[: len(plan.rows)]

    def _capture(self, rung: GraphBucket) -> _Captured:
        batch = self._inputs.batch(rung.rows, rung.context)
        if self._hidden is None:
            self._hidden = torch.empty_like(self._compute(batch))
        hidden = self._hidden[: rung.rows]
        replay = self._captures.capture(lambda: _write(hidden, self._compute(batch)))
        return _Captured(replay, hidden)


def _write(hidden: Tensor, computed: Tensor) -> None:
    hidden.copy_(computed)
