"""HTTP routes for operators: /metrics, /status, and /role, which changes a worker's role."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from penstock.router.api.auth import ApiKeys
from penstock.router.api.http import Json, is_loopback, json_response, read_body
from penstock.router.errors import invalid
from penstock.router.frontend import Frontend
from penstock.router.observability.prometheus import all_metrics
from penstock.router.observability.prometheus_vllm import vllm_metrics
from penstock.router.observability.snapshot import ClusterState, WorkerStats


class SnapshotCollector(Collector):
    """A collector that builds the metrics at each scrape, so that they contain no stale workers."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registration takes no snapshot

    def collect(self) -> Iterator[Metric]:
        state, tally, config = (
            self._frontend.take_snapshot(),
            self._frontend.metrics,
            self._frontend.config,
        )
        yield from all_metrics(state, tally)
        if config.vllm_metrics:
            yield from vllm_metrics(config.name, state, tally)


class AdminApi:
    """The handlers of the operators' routes."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._keys = ApiKeys(frontend.config.api_keys)
        self._registry = CollectorRegistry()
        self._registry.register(SnapshotCollector(frontend))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in the format that the Accept header prefers."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def status(self, request: Request) -> Response:
        """Return the state of the cluster as JSON."""
        return json_response(status_json(self._frontend.take_snapshot()))

    async def role(self, request: Request) -> Response:
        """Assign a role to a worker; decoding requests move away if the new role is prefill.

        The response is 200 once the supervisor has recorded the role, and 503 with Retry-After if
        the supervisor does not confirm the role in time.
        """
        config = self._frontend.config
        header = request.headers.get("authorization")
        self._keys.check_operator(header, is_loopback(config.host))
        worker, role = _worker_and_role(await read_body(request, config.bounds))
        await self._frontend.assign(worker, role)
        return json_response({"worker": worker, "role": role})


def status_json(state: ClusterState) -> Json:
    """Convert a state to JSON; keys are the field names, except in worker statistics."""
    status = asdict(state)
    for worker, entry in zip(state.workers, status["workers"], strict=True):
        entry["numbers"] = None if worker.numbers is None else _worker_stats_json(worker.numbers)
    return status


def _worker_stats_json(stats: WorkerStats) -> Json:
    load = stats.load
    return {
        "running": load.running,
        "places": stats.max_sequences,
        "waiting": load.queued,
        "waiting_tokens": load.queued_tokens,
        "blocks": dict(stats.blocks),
        "kv_waste": stats.kv_waste,
        "prompt_tokens": stats.prompt_tokens,
        "prefix_hit_tokens": load.prompt_tokens_cached,
        "preemptions": load.preemptions,
        "prompt_seconds": load.prompt_seconds,
        "step_seconds": load.last_step_seconds,
        "steps": asdict(stats.steps),
        "expert_imbalance": load.expert_imbalance,
    }


def _worker_and_role(body: bytes) -> tuple[str, str]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and content.keys() == {"worker", "role"}:
        worker, role = content["worker"], content["role"]
        if isinstance(worker, str) and isinstance(role, str):
            return worker, role
    raise invalid('send {"worker": NAME, "role": ROLE}, both as text')
