"""The operators' HTTP port: state, metrics, roles, drain, and explanations of requests."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.router.api import explain
from penstock.router.api.auth import OPERATORS, READERS, ApiKeys
from penstock.router.api.http import (
    AuthMiddleware,
    Json,
    json_response,
    read_body,
)
from penstock.router.api.live import LiveStreams
from penstock.router.api.openai.json_fragments import array
from penstock.router.api.openai.routes import HTTP_HANDLERS, OpenAiApi
from penstock.router.api.page import page_files, page_routes
from penstock.router.config import RouterConfig
from penstock.router.errors import invalid
from penstock.router.frontend import Frontend
from penstock.router.observability.event_log import log_drain
from penstock.router.observability.prometheus import all_metrics
from penstock.router.observability.prometheus_vllm import vllm_metrics
from penstock.router.observability.snapshot import ClusterState, WorkerState, WorkerStats
from penstock.router.observability.step_records import StepColumns
from penstock.router.requests.json_text import dumps
from penstock.router.requests.slices import Slices
from penstock.router.routing import events as ev

ROLES = {"/metrics": READERS, "/status": READERS, "/steps": READERS}
"""By path: the roles whose API keys may call the path; other paths are for operators only."""

OPENMETRICS = "application/openmetrics-text"


def accepts_openmetrics(accept: str) -> bool:
    """Return whether an Accept header names OpenMetrics, in version 1.0.0 or in any version."""
    for accepted in accept.split(","):
        media_type, *parameters = (part.strip().lower() for part in accepted.split(";"))
        versions = [each for each in parameters if each.startswith("version=")]
        if media_type == OPENMETRICS and versions in ([], ["version=1.0.0"]):
            return True
    return False


class OneMetric(Collector):
    """A collector of one metric, because the encoders of prometheus_client take collectors."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


PIECE_BYTES = 64 << 10
"""Size of the pieces of a large response."""


class LargeResponse(Response):
    """A response whose body is sent in pieces. Other callbacks run between the pieces."""

    def __init__(self, body: bytearray, content_type: str) -> None:
        super().__init__(headers={"content-type": content_type, "content-length": str(len(body))})
        self._large_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, slices = self._large_body, Slices()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for start in range(0, len(body), PIECE_BYTES):
            piece = bytes(body[start : start + PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await slices.pause()
        await send({"type": "http.response.body", "body": b""})


END_OF_OPENMETRICS = b"# EOF\n"


def openmetrics_text(metrics: Collector) -> bytes:
    """Return metrics as OpenMetrics text. Their names are valid, so they are not escaped."""
    text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
        metrics, escaping=openmetrics.ALLOWUTF8
    )
    return text


MAX_ADMIN_BYTES = 4096
"""Maximum bytes of a body of /role or /drain. It is low, because the event loop parses the body."""


def admin_app(frontend: Frontend) -> Starlette:
    """Return the HTTP application of the operators' port."""
    api, config = AdminApi(frontend), frontend.config
    routes = [
        Route("/metrics", api.metrics),
        Route("/status", api.status),
        Route("/steps", api.steps),
        Route("/role", api.role, methods=["POST"]),
        Route("/drain", api.drain, methods=["POST"]),
        Route(explain.PATH, explain.Explainer(frontend).http),
        Route("/live", LiveStreams(frontend).http),
        Route("/v1/chat/completions", OpenAiApi(frontend).chat, methods=["POST"]),
        *page_routes(),
    ]
    guard = Middleware(
        AuthMiddleware,
        keys=ApiKeys(config.api_keys),
        host=config.admin_host,
        public=frozenset(page_files()),
        roles=ROLES,
        other_roles=OPERATORS,
    )
    return Starlette(routes=routes, middleware=[guard], exception_handlers=HTTP_HANDLERS)


class AdminApi:
    """The handlers of the operators' routes."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def metrics(self, request: Request) -> Response:
        """Return the metrics: OpenMetrics if the Accept header names it, else Prometheus text."""
        # `choose_encoder` is not used: it raises an error if the header has a version that is not a
        # number, and its encoder for OpenMetrics replaces the colons in the names of vLLM.
        accepts = accepts_openmetrics(request.headers.get("accept", ""))
        encode: Callable[[Collector], bytes] = openmetrics_text if accepts else generate_latest
        content_type = openmetrics.CONTENT_TYPE_LATEST if accepts else CONTENT_TYPE_PLAIN_0_0_4
        slices = Slices()
        body = bytearray()
        name = ""
        state = self._frontend.take_snapshot()
        await slices.pause()
        for fragment in self._collect(state):
            text = encode(OneMetric(fragment)).removesuffix(END_OF_OPENMETRICS)
            body += _without_header(text) if fragment.name == name else text
            name = fragment.name
            await slices.pause()
        if accepts:
            body += END_OF_OPENMETRICS
        return LargeResponse(body, content_type)

    def _collect(self, state: ClusterState) -> Iterator[Metric]:
        """Return the fragments of all metrics; workers that were removed have no metrics."""
        config, totals = self._frontend.config, self._frontend.metrics
        metrics = all_metrics(state, totals)
        if not config.vllm_metrics:
            return metrics
        return chain(metrics, vllm_metrics(config.name, state, totals))

    async def status(self, request: Request) -> Response:
        """Return the state of the cluster as JSON."""
        slices = Slices()
        state = self._frontend.take_snapshot()
        await slices.pause()
        return await _large_json(_status_fragments(state, self._frontend.config), slices)

    async def steps(self, request: Request) -> Response:
        """Return columns of numbers about the latest steps of each worker, by worker name."""
        found = await self._frontend.step_records()
        return await _large_json(_steps_fragments(found), Slices())

    async def role(self, request: Request) -> Response:
        """Assign a role to a worker; decoding requests move away if the new role is prefill.

        The response is 200 once the supervisor has recorded the role, and 503 with Retry-After if
        the supervisor does not confirm the role in time.
        """
        body = await read_body(request, self._frontend.config.bounds)
        worker, role = _worker_and_role(body)
        await self._frontend.assign(worker, role, request.state.key_name)
        return json_response({"worker": worker, "role": role})

    async def drain(self, request: Request) -> Response:
        """Refuse new requests of this router, or accept them again; running requests continue.

        The response has the number of open requests. It is 0 once the drain is complete.
        """
        frontend = self._frontend
        content = _content(await read_body(request, frontend.config.bounds))
        match content:
            case {"drain": bool(wanted), **others} if not others:
                frontend.is_paused = wanted
                frontend.post(ev.Tick())  # reports the readiness to gRPC health
                log_drain(wanted, request.state.key_name)
                return json_response({"drain": wanted, "open": frontend.num_open_requests})
        raise invalid(
            f'the body is not valid: send {{"drain": true}} or {{"drain": false}}, in at most '
            f"{MAX_ADMIN_BYTES} bytes"
        )


def _without_header(text: bytes) -> bytes:
    """Return the text of a fragment of a metric without the comment lines at its beginning."""
    while text.startswith(b"#"):
        text = text.partition(b"\n")[2]
    return text


async def _large_json(fragments: Iterator[str], slices: Slices) -> LargeResponse:
    """Return a response of JSON. Other callbacks run while its fragments are computed."""
    body = bytearray()
    for fragment in fragments:
        body += fragment.encode()
        await slices.pause()
    return LargeResponse(body, "application/json")


def _status_fragments(state: ClusterState, config: RouterConfig) -> Iterator[str]:
    """Yield the state of the cluster and the router's SLOs as JSON, with one worker per fragment.

    Keys are the field names, except in the statistics of workers.
    """
    for number, field in enumerate(fields(state)):
        yield f"{',' if number else '{'}{dumps(field.name)}:"
        if field.name == "workers":
            yield from array(dumps(_worker_json(each)) for each in state.workers)
        else:
            yield dumps(getattr(state, field.name))
    for name in ("ttft_slo_seconds", "tpot_slo_seconds"):
        yield f",{dumps(name)}:{dumps(getattr(config, name))}"
    yield "}"


def _steps_fragments(found: Mapping[str, StepColumns]) -> Iterator[str]:
    """Yield the step records of workers as JSON, with one worker per fragment."""
    yield "{"
    for number, (worker, steps) in enumerate(found.items()):
        yield f"{',' if number else ''}{dumps(worker)}:{dumps(steps)}"
    yield "}"


def _worker_json(worker: WorkerState) -> Json:
    return {
        "worker": worker.worker,
        "role": worker.role,
        "state": worker.state,
        "requests": worker.requests,
        "numbers": None if worker.numbers is None else _worker_stats_json(worker.numbers),
        "indexed_blocks": worker.indexed_blocks,
    }


def _worker_stats_json(stats: WorkerStats) -> Json:
    load = stats.load
    return {
        "running": load.running,
        "places": stats.max_sequences,
        "max_batched_tokens": stats.max_batched_tokens,
        "enough_prompt_tokens": stats.enough_prompt_tokens,
        "block_size": stats.block_size,
        "waiting": load.queued,
        "waiting_tokens": load.queued_tokens,
        "blocks": dict(stats.blocks),
        "kv_tokens": stats.kv_tokens,
        "kv_waste": stats.kv_waste,
        "prompt_tokens": stats.prompt_tokens,
        "prefix_hit_tokens": load.prompt_tokens_cached,
        "preemptions": load.preemptions,
        "prompt_seconds": load.prompt_seconds,
        "step_seconds": load.last_step_seconds,
        "steps": stats.steps,
        "expert_imbalance": load.expert_imbalance,
    }


def _content(body: bytes) -> object:
    """Return the content of a JSON body, or None if the body is too large or is not JSON."""
    try:
        return json.loads(body) if len(body) <= MAX_ADMIN_BYTES else None
    except (ValueError, RecursionError):
        return None


def _worker_and_role(body: bytes) -> tuple[str, str]:
    content = _content(body)
    if isinstance(content, dict) and content.keys() == {"worker", "role"}:
        worker, role = content["worker"], content["role"]
        if isinstance(worker, str) and isinstance(role, str):
            return worker, role
    raise invalid(
        f'the body is not valid: send {{"worker": NAME, "role": ROLE}}, both as text, in at most '
        f"{MAX_ADMIN_BYTES} bytes"
    )
