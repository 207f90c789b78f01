"""ORCA load reports in vLLM's two formats, for clients that send `endpoint-load-metrics-format`.

The tests cover the row "header endpoint-load-metrics" of `review_rows.txt`, a review of the OpenAI
API.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock.protos import worker_pb2 as pb
from penstock.router.config import RouterConfig
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED, HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
}
TEXT = "TEXT named_metrics.kv_cache_usage_perc=0.12, named_metrics.num_requests_waiting=3.0"
NAMED = {"kv_cache_usage_perc": 0.12, "num_requests_waiting": 3.0}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def loaded(config: RouterConfig) -> AsyncIterator[Served]:
    """A router with an idle worker, and with a loaded worker that drains and takes no requests."""
    idle, busy = StubWorker("w0"), StubWorker("w1")
    idle.welcome.num_blocks = 96
    async with serving(config, idle, busy) as served:
        load = pb.Load(used_blocks=10, leased_blocks=4, reserved_blocks=2, free_blocks=16)
        load.MergeFrom(pb.Load(queued=2, receiving=1))
        busy.send(pb.ToRouter(draining=pb.Draining()))
        busy.send(pb.ToRouter(step=pb.Step(load=load)))
        workers = served.router.frontend.workers

        def is_loaded() -> bool:
            found = {each.worker: each for each in workers()}
            return found["w1"].state == "draining" and found["w1"].load.queued == 2

        await until(is_loaded)
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def http(loaded: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(loaded) as http:
        yield http


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_response_has_the_load_in_the_requested_format(
    http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    body = BODIES[path] | {"stream": stream}
    for name in ("TEXT", "text"):
        reply = await http.post(path, json=body, headers={ASKED: name})
        assert (reply.status_code, reply.headers[HEADER]) == (200, TEXT)
    for name in ("JSON", "Json"):
        reply = await http.post(path, json=body, headers={ASKED: name})
        word, _, report = reply.headers[HEADER].partition(" ")
        assert (word, json.loads(report)) == ("JSON", {"named_metrics": NAMED})


@pytest.mark.parametrize("headers", [{}, {ASKED: ""}, {ASKED: "BINARY"}])
async def test_response_has_no_load_without_a_known_format(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    reply = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert reply.status_code == 200
    assert HEADER not in reply.headers


async def test_error_has_no_load(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/chat/completions", json={}, headers={ASKED: "TEXT"})
    assert reply.status_code == 400
    assert HEADER not in reply.headers
