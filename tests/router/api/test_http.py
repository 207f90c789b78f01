"""Behaviour that all HTTP routes share: keys, hosts, bodies, connections, health."""

import asyncio
import logging
from dataclasses import replace

import httpx
import pytest

from penstock.router.config import RequestBounds, RouterConfig
from tests.support.api_keys import EVERY_ROLE, METRICS, user_keys
from tests.support.openai_errors import check_form
from tests.support.served_router import ByPath, Served, serving, until
from tests.support.stub_worker import StubWorker

BODY = {"prompt": "hi", "max_tokens": 2}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/stub"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/messages/nothing"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/v1/responses/resp_1/input_items"),
    ("GET", "/version"),
    ("GET", "/nothing/here"),
    ("OPTIONS", "/v1/completions"),
]


def client_of(served: Served, **options: object) -> httpx.AsyncClient:
    """Return a client of both HTTP ports."""
    transport = ByPath(served)
    return httpx.AsyncClient(base_url=served.url, timeout=30, transport=transport, **options)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_api_key_is_required_except_for_health(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=user_keys("first-key", "second-key"))
    async with serving(keyed, StubWorker()) as served, client_of(served) as http:
        for method, path in ROUTES:
            for header in ("", "Bearer", "Bearer nearly", "Basic first-key", "first-key"):
                response = await http.request(method, path, headers={"authorization": header})
                assert response.status_code == 401, (method, path, header)
                assert check_form(response)["type"] == "authentication_error"
        assert (await http.get("/health")).status_code == 200
        for key in ("first-key", "second-key"):
            headers = {"authorization": f"Bearer {key}"}
            response = await http.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == 200
        # Different tenants have different salts, and no salt contains the API key.
        salts = {submit.salt for submit in served.worker.submits}
        assert len(salts) == 2
        assert not salts & {b"first-key", b"second-key"}


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


PREFLIGHT = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize("allowed", [("https://chat.example",), ("*",)])
async def test_pages_of_allowed_origins_may_call_the_api(
    config: RouterConfig, allowed: tuple[str, ...]
) -> None:
    open_to_pages = replace(config, allowed_origins=allowed, api_keys=user_keys("a-key"))
    async with serving(open_to_pages, StubWorker()) as served, client_of(served) as http:
        preflight = await http.options("/v1/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200, "a browser sends no API key in a preflight"
        granted = {"*", "https://chat.example"}
        assert preflight.headers["access-control-allow-origin"] in granted
        methods = preflight.headers["access-control-allow-methods"]
        assert {"GET", "POST", "DELETE"} <= set(methods.split(", "))
        names = preflight.headers["access-control-allow-headers"]
        assert {"authorization", "x-stainless-lang"} <= set(names.split(","))

        headers = {"origin": "https://chat.example", "authorization": "Bearer a-key"}
        for stream in (False, True):
            body = {**BODY, "stream": stream}
            response = await http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] in granted
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        refused = await http.get("/v1/models", headers={"origin": "https://chat.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] in granted, "pages see the error"


async def test_other_origins_and_operators_paths_stay_closed_to_pages(config: RouterConfig) -> None:
    open_to_one = replace(config, allowed_origins=("https://chat.example",))
    async with serving(open_to_one, StubWorker()) as served, client_of(served) as http:
        evil = {**PREFLIGHT, "origin": "https://evil.example"}
        for path, headers in (("/v1/completions", evil), ("/role", PREFLIGHT), ("/role", evil)):
            preflight = await http.options(path, headers=headers)
            assert preflight.status_code in (400, 405)
            assert "access-control-allow-origin" not in preflight.headers
        answer = await http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


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


async def test_malformed_requests_are_counted_and_not_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    metrics = served.router.frontend.metrics
    for number in range(1, 4):
        await read_all(served, b"\x16\x03\x01garbage\r\n\r\n")
        assert metrics.malformed_requests == number
    async with client_of(served) as http:
        assert "penstock_malformed_requests_total 3.0" in (await http.get("/metrics")).text
    assert not [each for each in caplog.records if not each.name.startswith("httpx")]


@pytest.mark.parametrize("path", ["/health", "/health/"])
async def test_health_is_public_with_and_without_a_slash(config: RouterConfig, path: str) -> None:
    keyed = replace(config, api_keys=user_keys("a-key"))
    async with serving(keyed, StubWorker()) as served, client_of(served) as http:
        response = await http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("own", ["order-66", ""], ids=["client's id", "new id"])
async def test_all_answers_have_a_request_id_and_no_sniffing(
    config: RouterConfig, own: str
) -> None:
    keyed = replace(config, api_keys=(*user_keys("a-key"), *EVERY_ROLE))
    good, scraper = ({"authorization": f"Bearer {key}"} for key in ("a-key", METRICS))
    sent = {"x-request-id": own} if own else {}
    cases = [
        ("GET", "/health", {}, None, 200),
        ("GET", "/v1/models", {}, None, 401),
        ("GET", "/v1/models", good, None, 200),
        ("GET", "/v1/models", {**good, "host": "evil.example"}, None, 403),
        ("GET", "/nothing", good, None, 404),
        ("GET", "/metrics", good, None, 403),
        ("GET", "/metrics", scraper, None, 200),
        ("POST", "/v1/completions", good, {"prompt": ""}, 400),
        ("POST", "/v1/completions", good, BODY, 200),
        ("POST", "/v1/completions", good, {**BODY, "stream": True}, 200),
    ]
    ids = set()
    async with serving(keyed, StubWorker()) as served, client_of(served) as http:
        for method, path, headers, body, status in cases:
            response = await http.request(method, path, headers={**headers, **sent}, json=body)
            assert response.status_code == status, path
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]
            ids.add(response.headers["x-request-id"])
        garbage = await read_all(served, b"\x16\x03\x01garbage\r\n\r\n")
        assert b"x-request-id: req-" in garbage
        assert b"x-content-type-options: nosniff" in garbage
    assert ids == {own} if own else len(ids) == len(cases) and "" not in ids


async def test_unsafe_request_id_of_a_client_is_not_repeated(served: Served) -> None:
    async with client_of(served) as http:
        headers = {"x-request-id": b"caf\xe9\t1"}
        response = await http.get("/v1/models", headers=headers)  # type: ignore[arg-type]
        assert response.headers["x-request-id"].startswith("req-")


async def test_request_id_of_the_client_is_kept(served: Served) -> None:
    async with client_of(served) as http:
        response = await http.post(
            "/v1/completions", json=BODY, headers={"x-request-id": "order-66"}
        )
        assert response.headers["x-request-id"] == "order-66"
        assert served.worker.submits[0].request_id == "order-66"
