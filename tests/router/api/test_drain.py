"""POST /drain: an operator stops and resumes the intake of a router."""

import asyncio
import logging
from dataclasses import replace

import pytest

from penstock.router.config import RouterConfig
from tests.support.api_keys import EVERY_ROLE, METRICS, OPERATOR, user_keys
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

BODY = {"prompt": "hi", "max_tokens": 50}


async def test_drained_router_ends_its_requests_and_can_be_resumed(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served.worker.stepping.clear()
    async with client_of(served) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(lambda: served.worker.runs)
        reply = await http.post("/drain", json={"drain": True})
        assert (reply.status_code, reply.json()) == (200, {"drain": True, "open": 1})
        assert (await http.get("/status")).json()["not_ready"] == "the router is draining"
        assert (await http.get("/health")).status_code == 503
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        served.worker.stepping.set()
        assert (await running).json()["usage"]["completion_tokens"] == 50
        reply = await http.post("/drain", json={"drain": False})
        assert reply.json() == {"drain": False, "open": 0}
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    drains = [record for record in caplog.records if record.message == "drain"]
    assert [vars(record)["fields"] for record in drains] == [
        {"drain": True, "by": "anonymous"},
        {"drain": False, "by": "anonymous"},
    ]


@pytest.mark.parametrize(
    ("key", "status"), [("", 401), ("a-key", 403), (METRICS, 403), (OPERATOR, 200)]
)
async def test_only_operators_may_drain(config: RouterConfig, key: str, status: int) -> None:
    keyed = replace(config, api_keys=(*user_keys("a-key"), *EVERY_ROLE))
    async with serving(keyed, StubWorker()) as served, client_of(served, key) as http:
        assert (await http.post("/drain", json={"drain": True})).status_code == status
        assert served.router.frontend.is_paused == (status == 200)


@pytest.mark.parametrize(
    "body", [{}, [], {"drain": 1}, {"drain": True, "now": True}, {"drain": "x" * 5000}]
)
async def test_invalid_body_is_refused(served: Served, body: object) -> None:
    async with client_of(served) as http:
        reply = await http.post("/drain", json=body)
        assert reply.status_code == 400
        assert 'send {"drain": true}' in reply.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200
