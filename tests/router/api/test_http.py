"""Behaviour that all HTTP routes share: keys, hosts, bodies, connections, health."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from penstock.router.config import RequestBounds, RouterConfig
from tests.support.openai_errors import check_form
from tests.support.served_router import Served, serving, until
from tests.support.stub_worker import StubWorker

BODY = {"prompt": "hi", "max_tokens": 2}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/stub"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/version"),
    ("GET", "/nothing/here"),
    ("OPTIONS", "/v1/completions"),
]


def client_of(served: Served, **options: object) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.url, timeout=30, **options)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_api_key_is_required_except_for_health(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=("first-key", "second-key"))
    async with serving(keyed, StubWorker()) as served, client_of(served) as http:
        for method, path in ROUTES:
            for header in ("", "Bearer", "Bearer nearly", "Basic first-key", "first-key"):
                response = await http.request(method, path, headers={"authorization": header})
                assert response.status_code == 401, (method, path, header)
                assert check_form(response)["type"] == "authentication_error"
        assert (await http.get("/health")).status_code == 200
        for key in keyed.api_keys:
            headers = {"authorization": f"Bearer {key}"}
            response = await http.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == 200
        # Tenants do not share cached prefixes, and no salt is an API key.
        salts = {submit.salt for submit in served.worker.submits}
        assert len(salts) == 2
        assert not salts & {key.encode() for key in keyed.api_keys}


async def test_public_routes(served: Served) -> None:
    async with client_of(served) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert "version" in (await http.get("/version")).json()
        missing = await http.get("/v1/nothing")
        assert missing.status_code == 404
        check_form(missing)
        wrong = await http.get("/v1/completions")
        assert wrong.status_code == 405
        check_form(wrong)


async def test_health_gives_the_reason_when_not_ready(config: RouterConfig) -> None:
    async with serving(config) as served, client_of(served) as http:
        response = await http.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "no worker is connected")
        async with StubWorker() as worker:
            await served.router.set_workers({worker.name: worker.address})
            await until(lambda: not served.router.frontend.why_not_ready())
            assert (await http.get("/health")).status_code == 200
        await until(served.router.frontend.why_not_ready)
        assert (await http.get("/health")).status_code == 503


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", ""])
async def test_host_header_other_than_loopback_is_refused(served: Served, host: str) -> None:
    async with client_of(served) as http:
        response = await http.get("/v1/models", headers={"host": host})
        assert response.status_code == 403
        check_form(response)
        for good in ("localhost", "localhost:1", "127.0.0.1:8000", "[::1]:5", "[::1]"):
            assert (await http.get("/v1/models", headers={"host": good})).status_code == 200


async def test_cross_origin_requests_are_refused(served: Served) -> None:
    async with client_of(served) as http:
        origin = {"origin": "http://evil.example"}
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = await http.post(
                "/v1/completions",
                content=b'{"prompt": "hi"}',
                headers={**origin, "content-type": kind},
            )
            assert response.status_code == 400
            assert "Content-Type" in check_form(response)["message"]
        preflight = await http.options("/v1/completions", headers=origin)
        assert preflight.status_code == 405
        assert not [name for name in preflight.headers if name.startswith("access-control")]


async def test_large_bodies_are_refused_early(config: RouterConfig) -> None:
    small = replace(config, bounds=RequestBounds(max_body_bytes=1000))
    async with serving(small, StubWorker()) as served, client_of(served) as http:
        response = await http.post("/v1/completions", json={"prompt": "x" * 2000})
        assert response.status_code == 413
        check_form(response)

        async def chunks() -> object:
            for _ in range(20):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        response = await http.post("/v1/completions", content=chunks(), headers=headers)  # type: ignore[arg-type]
        assert response.status_code == 413
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def read_all(served: Served, sent: bytes) -> bytes:
    """Send bytes on a raw connection; return all bytes that the server sends before closing it."""
    host, port = served.router.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.slow
async def test_headers_and_bodies_are_bounded_in_size_and_time(config: RouterConfig) -> None:
    tight = replace(config, bounds=RequestBounds(max_header_bytes=4096, receive_seconds=2.0))
    async with serving(tight, StubWorker()) as served:
        many = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 100) for i in range(100))
        answer = await read_all(served, b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + many)
        assert answer.startswith(b"HTTP/1.1 400")
        assert await read_all(served, b"") == b""
        assert await read_all(served, b"GET /health HTTP/1.1\r\nhost: loc") == b""
        body = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        assert b"did not arrive within" in await read_all(served, body)
        async with client_of(served) as http:
            assert (await http.get("/health")).status_code == 200


async def test_garbage_is_answered_with_400(served: Served) -> None:
    assert (await read_all(served, b"\x16\x03\x01\x02\x00garbage\r\n\r\n")).startswith(
        b"HTTP/1.1 400"
    )


async def test_request_id_of_the_client_is_kept(served: Served) -> None:
    async with client_of(served) as http:
        response = await http.post(
            "/v1/completions", json=BODY, headers={"x-request-id": "order-66"}
        )
        assert response.headers["x-request-id"] == "order-66"
        assert served.worker.submits[0].request_id == "order-66"
