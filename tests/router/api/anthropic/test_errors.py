"""Errors below /v1/messages: the official client's exception, and Anthropic's error format."""

import asyncio
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest

from penstock.protos import worker_pb2
from penstock.router.api.anthropic.errors import STATUSES, anthropic_error, error_body
from penstock.router.config import RequestBounds, RouterConfig
from penstock.router.errors import Code, ServingError, invalid
from tests.support.anthropic_client import HELLO, connect, message_of
from tests.support.api_keys import EVERY_ROLE, METRICS, user_keys
from tests.support.openai_errors import check_form
from tests.support.served_router import Served, serving, until
from tests.support.stub_worker import StubWorker

BODY = {"model": "stub", "max_tokens": 1000, "messages": HELLO}


async def refused(client: Any, expected: type[Exception], **fields: Any) -> Any:
    """Return the client's exception; check its type and its request id."""
    call: dict[str, Any] = {"extra_headers": {"x-request-id": "me"}, **BODY, **fields}
    with pytest.raises(expected) as refusal:
        await client.messages.create(**call)
    assert type(refusal.value) is expected
    error: Any = refusal.value
    assert error.request_id == error.body["request_id"] == "me"
    assert error.type == error.body["error"]["type"]
    check_form(error.response)
    return error


def test_every_code_has_a_status_and_a_type() -> None:
    assert STATUSES.keys() == set(Code)


def test_message_names_the_field() -> None:
    error = invalid("it has 9 tokens: shorten it", "messages")
    assert error_body(error, "me")["error"]["message"] == "messages: it has 9 tokens: shorten it"
    named = invalid("messages is empty", "messages")
    assert error_body(named, "me")["error"]["message"] == "messages is empty"


def test_retry_after_is_sent() -> None:
    error = ServingError(Code.UNAVAILABLE, "call again", retry_after=1.5)
    response = anthropic_error(error, "me")
    assert (response.status_code, response.headers["retry-after"]) == (529, "2")


async def test_invalid_and_unknown_requests(served: Served) -> None:
    async with connect(served) as client:
        error = await refused(client, anthropic.BadRequestError, max_tokens=-1)
        assert (error.type, message_of(error)) == (
            "invalid_request_error",
            "max_tokens is -1: it must be at least 0",
        )
        error = await refused(client, anthropic.NotFoundError, model="claude")
        assert error.type == "not_found_error"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="claude", messages=HELLO)
    async with httpx.AsyncClient(base_url=served.url) as http:
        for method, path, status in (
            ("GET", "/v1/messages", 405),
            ("POST", "/v1/messages/nothing", 404),
        ):
            response = await http.request(method, path)
            assert response.status_code == status
            check_form(response)
        other = await http.post("/v1/messagesx")
        assert other.json()["error"]["code"] == 404, "OpenAI's form"
        response = await http.post(
            "/v1/messages", content=b"{", headers=[(b"x-request-id", b"\xff")]
        )
        assert check_form(response)["type"] == "invalid_request_error"
        assert response.headers["request-id"].startswith("req_")


async def test_keys(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=(*user_keys("a-key"), *EVERY_ROLE))
    async with serving(keyed, StubWorker()) as served:
        async with connect(served, "another") as client:
            error = await refused(client, anthropic.AuthenticationError)
            assert error.type == "authentication_error"
        async with connect(served, METRICS) as client:
            error = await refused(client, anthropic.PermissionDeniedError)
            assert error.type == "permission_error"
        async with connect(served, "a-key") as client:
            assert (await client.messages.create(**BODY)).stop_reason == "max_tokens"
        async with httpx.AsyncClient(base_url=served.url) as http:
            for headers in ({"x-api-key": "a-key"}, {"authorization": "Bearer a-key"}):
                for path in ("/v1/messages", "/v1/models"):
                    method = "POST" if path == "/v1/messages" else "GET"
                    body = BODY if method == "POST" else None
                    response = await http.request(method, path, json=body, headers=headers)
                    assert response.status_code == 200
        salts = {submit.salt for submit in served.worker.submits}
        assert len(salts) == 1, "the same key is the same tenant in both headers"


async def test_large_body(config: RouterConfig) -> None:
    small = replace(config, bounds=RequestBounds(max_body_bytes=1000))
    async with serving(small, StubWorker()) as served, connect(served) as client:
        error = await refused(client, anthropic.ContentTooLargeError, system="x" * 2000)
        assert error.type == "request_too_large"


async def test_full_queue(config: RouterConfig) -> None:
    async with (
        serving(replace(config, max_queued_requests=1)) as served,
        connect(served) as client,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(client.messages.create(**BODY))
        await until(lambda: served.router.frontend.num_open_requests == 1)
        error = await refused(client, anthropic.RateLimitError)
        assert error.type == "rate_limit_error"
        assert int(error.response.headers["retry-after"]) >= 1
        first.cancel()


async def test_time_limit(config: RouterConfig) -> None:
    worker = StubWorker()
    async with serving(replace(config, timeout=0.05), worker) as served, connect(served) as client:
        worker.stepping.clear()
        error = await refused(client, anthropic.GatewayTimeoutError)
        assert error.type == "timeout_error"


async def test_server_that_stops(config: RouterConfig) -> None:
    async with serving(config, StubWorker()) as served, connect(served) as client:
        served.router.frontend.is_draining = True
        error = await refused(client, anthropic.OverloadedError)
        assert error.type == "overloaded_error"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_error_of_a_worker(config: RouterConfig, has_begun: bool) -> None:
    worker = StubWorker()
    async with serving(config, worker) as served, connect(served) as client:
        if not has_begun:
            worker.stepping.clear()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(read_stream(client, worker, has_begun))
            await until(lambda: worker.submits)
            if not has_begun:
                fail(worker)
            kinds, error = await task
    assert kinds == (["message_start", "content_block_start"] if has_begun else [])
    assert error.type == error.body["error"]["type"] == "api_error"
    assert error.body["request_id"] == "me"
    assert "/srv" not in message_of(error)
    assert error.status_code == (200 if has_begun else 500)


async def read_stream(client: Any, worker: StubWorker, fails: bool) -> tuple[list[str], Any]:
    """Read a stream until its error; return the types of all events but deltas, and the error."""
    kinds: list[str] = []
    try:
        headers = {"x-request-id": "me"}
        stream = await client.messages.create(**BODY, stream=True, extra_headers=headers)
        async for event in stream:
            if event.type != "content_block_delta":
                kinds.append(event.type)
            elif worker.stepping.is_set() and fails:
                worker.stepping.clear()
                fail(worker)
    except anthropic.APIStatusError as error:
        return kinds, error
    raise AssertionError("the stream ended without an error")


def fail(worker: StubWorker) -> None:
    """End the worker's only request with an error."""
    step = worker_pb2.Step()
    (submit,) = worker.submits
    step.ended.add(
        request=submit.request, attempt=submit.attempt, reason='Traceback: File "/srv/engine.py"'
    )
    worker.send(worker_pb2.ToRouter(step=step))
