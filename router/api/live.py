"""The stream of the cluster's state for the operators' page: one line of JSON per update."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

# Starlette needs this module for its first streamed response. The import takes 40 ms of CPU time,
# so it must not run on the event loop.
import anyio._backends._asyncio  # noqa: F401
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.router.errors import Code, ServingError
from penstock.router.frontend import Frontend
from penstock.router.observability.snapshot import ClusterState, WorkerState
from penstock.router.requests.slices import Slices

Fields: TypeAlias = dict[str, Any]

UPDATE_SECONDS = 1.0
WORKERS_PER_SECOND = 250
"""Above this number of workers, updates are less frequent, which limits the router's CPU time."""
MAX_STREAMS = 16
"""Maximum number of open streams; further streams are refused with OVERLOADED."""

WORKER_COLUMNS = (
    *("worker", "role", "state", "requests", "running", "places", "waiting", "waiting_tokens"),
    *("used", "leased", "reserved", "cached", "free"),
    *("step_seconds", "preemptions", "hit_fraction"),
)
"""Columns of the rows of `workers`; a worker without recent figures has only the first four."""


class LiveStreams:
    """The open streams of a router. All streams use the same snapshot for an update."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._num_open = 0
        self._state: ClusterState | None = None
        self._state_at = float("-inf")

    async def http(self, request: Request) -> Response:
        """Return a response that sends updates until the client or the router closes it."""
        if self._num_open >= MAX_STREAMS:
            raise ServingError(
                Code.OVERLOADED,
                f"{MAX_STREAMS} live pages are open, the maximum: close one",
                retry_after=10,
            )
        return StreamingResponse(
            self._lines(), media_type="application/x-ndjson", headers={"cache-control": "no-store"}
        )

    async def _lines(self) -> AsyncIterator[str]:
        self._num_open += 1
        try:
            updates = Updates(self._frontend)
            while not self._frontend.is_stopped:
                state = self._snapshot()
                yield await updates.line(state)
                wait = max(UPDATE_SECONDS, len(state.workers) / WORKERS_PER_SECOND)
                end = asyncio.get_running_loop().time() + wait
                while not self._frontend.is_stopped and asyncio.get_running_loop().time() < end:
                    await asyncio.sleep(UPDATE_SECONDS)
        finally:
            self._num_open -= 1

    def _snapshot(self) -> ClusterState:
        now = asyncio.get_running_loop().time()
        if self._state is None or now - self._state_at >= UPDATE_SECONDS / 2:
            self._state, self._state_at = self._frontend.take_snapshot(), now
        return self._state


class Updates:
    """The updates of one stream.

    The first update has all workers, decisions and samples, and later updates only the changes.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        # The row that was sent last for each worker, by worker name.
        self._rows: dict[str, list[Any]] = {}
        self._decision = 0  # number of the last decision that was sent
        self._sample = 0  # number of the last sample that was sent

    async def line(self, state: ClusterState) -> str:
        """Return the next update as a line of JSON."""
        decisions = [
            each for each in self._frontend.explanations.decisions if each.number > self._decision
        ]
        samples = [each for each in self._frontend.history.samples if each.number > self._sample]
        self._decision = decisions[-1].number if decisions else self._decision
        self._sample = samples[-1].number if samples else self._sample
        content = {
            **_head(state),
            "router": self._frontend.config.name,
            "columns": WORKER_COLUMNS,
            "decisions": [each._asdict() for each in decisions],
            "samples": [each._asdict() for each in samples],
            "workers": await self._changed_rows(state.workers),
            "gone": self._forget_others(state.workers),
        }
        return json.dumps(content, separators=(",", ":")) + "\n"

    async def _changed_rows(self, workers: Sequence[WorkerState]) -> list[list[Any]]:
        changed, slices = [], Slices()
        for worker in workers:
            row = worker_row(worker)
            if self._rows.get(worker.worker) != row:
                self._rows[worker.worker] = row
                changed.append(row)
            await slices.pause()
        return changed

    def _forget_others(self, workers: Sequence[WorkerState]) -> list[str]:
        gone = sorted(self._rows.keys() - {worker.worker for worker in workers})
        for name in gone:
            del self._rows[name]
        return gone


def _head(state: ClusterState) -> Fields:
    return {
        "model": state.model,
        "version": state.version,
        "not_ready": state.not_ready,
        "streams": state.streams,
        "waiting": state.waiting,
        "waiting_tokens": state.waiting_tokens,
        "failovers": state.failovers,
        "kv_transfers": state.kv_transfers,
        "kv_transfers_failed": state.kv_transfers_failed,
        "kv_transfer_bytes": state.kv_transfer_bytes,
        "finished": dict(state.finished),
        "pools": [asdict(pool) for pool in state.pools],
        "routers": [asdict(router) for router in state.routers],
        "scaling": [asdict(each) for each in state.scaling.decisions],
    }


def worker_row(worker: WorkerState) -> list[Any]:
    """Return the figures of a worker in the order of `WORKER_COLUMNS`."""
    row = [worker.worker, worker.role, worker.state, worker.requests]
    if worker.numbers is None:
        return row
    load, stats = worker.numbers.load, worker.numbers
    prompt_tokens = stats.prompt_tokens
    hits = load.prompt_tokens_cached / prompt_tokens if prompt_tokens else 0.0
    return [
        *row,
        *(load.running, stats.max_sequences, load.queued, load.queued_tokens),
        *(load.used_blocks, load.leased_blocks, load.reserved_blocks),
        *(load.cached_blocks, load.free_blocks),
        *(round(load.last_step_seconds, 5), load.preemptions, round(hits, 3)),
    ]
