"""Errors of the OpenAI API: each has OpenAI's format and raises the right exception in the client.

The tests cover the rows "error" of `review_rows.txt`, a review of the OpenAI API.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from penstock.router.config import RequestBounds, RouterConfig
from tests.support.api_keys import EVERY_ROLE, METRICS, user_keys
from tests.support.failing_steps import fail_after
from tests.support.openai_client import HELLO, connect, serving_with_client
from tests.support.served_router import Served, serving, until
from tests.support.stub_worker import StubWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL: dict[str, Any] = {"model": "stub", "messages": HELLO, "max_tokens": 5}


def check(error: openai.APIStatusError, status: int, kind: str) -> None:
    """Check an error's form: its members, type, code, and the id of the request."""
    body: Any = error.body
    assert body.keys() == {"message", "type", "param", "code"}
    assert (error.status_code, error.type, body["code"]) == (status, kind, status)
    assert error.request_id


async def test_statuses_of_wrong_requests(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as invalid:
        await client.chat.completions.create(**CALL, n=0)
    check(invalid.value, 400, "invalid_request_error")
    for path in ("/nothing", "/models/gpt"):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.get(path, cast_to=object)
        check(missing.value, 404, "not_found_error")
    with pytest.raises(openai.APIStatusError) as method:
        await client.get("/chat/completions", cast_to=object)
    check(method.value, 405, "invalid_request_error")
    with pytest.raises(openai.PermissionDeniedError) as host:
        await client.with_options(default_headers={"Host": "evil.example"}).models.list()
    check(host.value, 403, "permission_error")


async def test_keys_of_other_roles_and_unknown_keys(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=(*user_keys("a-key"), *EVERY_ROLE))
    async with serving(keyed, StubWorker()) as served, connect(served) as client:
        for call in (client.models.list, lambda: client.chat.completions.create(**CALL)):
            with pytest.raises(openai.AuthenticationError) as unknown:
                await call()
            check(unknown.value, 401, "authentication_error")
            assert unknown.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.PermissionDeniedError) as role:
            await client.with_options(api_key=METRICS).chat.completions.create(**CALL)
        check(role.value, 403, "permission_error")
        assert (await client.with_options(api_key="a-key").chat.completions.create(**CALL)).choices


async def test_too_large_body(config: RouterConfig) -> None:
    small = replace(config, bounds=RequestBounds(max_body_bytes=1000))
    async with serving_with_client(small) as (_, client):
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model="stub", prompt="x" * 2000)
        check(large.value, 413, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_a_status_with_a_retry_time(config: RouterConfig, stream: bool) -> None:
    async with (
        serving(replace(config, max_queued_requests=1)) as served,
        connect(served) as client,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(client.chat.completions.create(**CALL))
        await until(lambda: served.router.frontend.num_open_requests == 1)
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(**CALL, stream=stream)
        check(full.value, 429, "rate_limit_error")
        assert int(full.value.response.headers["retry-after"]) >= 1
        first.cancel()


async def test_refusal_of_a_stream_is_a_status(client: Any) -> None:
    for api in (client.chat.completions, client.completions):
        given = {"messages": HELLO} if api is client.chat.completions else {"prompt": "x"}
        with pytest.raises(openai.BadRequestError) as invalid:
            await api.create(model="stub", **given, top_p=2, stream=True)
        check(invalid.value, 400, "invalid_request_error")


@pytest.mark.parametrize("api", ["chat", "completion"])
async def test_error_in_a_stream_is_its_last_event(
    client: Any, served: Served, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    fail_after(served.worker, 4, monkeypatch)
    options = {"model": "stub", "max_tokens": 9, "stream": True, "logprobs": True}
    if api == "chat":
        stream: AsyncIterator[Any] = await client.chat.completions.create(**options, messages=HELLO)
    else:
        stream = await client.completions.create(**{**options, "logprobs": 1}, prompt="x")
    chunks = []
    failure: Any = None
    try:
        async for chunk in stream:
            chunks.append(chunk)
    except openai.APIError as error:
        failure = error
    logged = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    tokens = [token for one in logged for token in (one.content if api == "chat" else one.tokens)]
    assert len(tokens) == 4
    assert "out of memory" in failure.message
    assert failure.body["type"] == "internal_error"


OWN = {"X-Request-Id": "mine-1"}


async def test_every_answer_and_refusal_has_the_id_of_its_request(client: Any) -> None:
    for headers in (OWN, {}):
        found = [
            (await client.models.list(extra_headers=headers))._request_id,
            (await client.chat.completions.create(**CALL, extra_headers=headers))._request_id,
        ]
        raw = client.chat.completions.with_streaming_response.create
        async with raw(**CALL, stream=True, extra_headers=headers) as response:
            found.append(response.request_id)
        for refused in (
            client.completions.create(model="stub", prompt="", extra_headers=headers),
            client.models.retrieve("gpt", extra_headers=headers),
            client.get("/nothing", cast_to=object, options={"headers": headers}),
        ):
            with pytest.raises(openai.APIStatusError) as refusal:
                await refused
            found.append(refusal.value.request_id)
        assert all(found)
        assert len(set(found)) == (1 if headers else len(found))
        assert ("mine-1" in found) == bool(headers)


async def test_health_needs_no_key_with_or_without_a_slash(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=user_keys("a-key"))
    async with serving(keyed, StubWorker()) as served, connect(served) as client:
        for path in ("/../health", "/../health/"):
            assert await client.get(path, cast_to=object) == {"status": "ok"}
