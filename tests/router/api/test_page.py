"""The operators' page: its files, and the stream of updates that it reads."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.router.api.live import MAX_STREAMS, WORKER_COLUMNS
from penstock.router.api.page import FOLDER, page_files
from penstock.router.config import RouterConfig
from tests.support.api_keys import EVERY_ROLE, METRICS, OPERATOR, user_keys
from tests.support.served_router import Served, client_of, serving
from tests.support.stub_worker import StubWorker

BODY = {"prompt": "hi", "max_tokens": 3}
KEYS = (*user_keys("a-user-of-this"), *EVERY_ROLE)
FILES = sorted(path for path in FOLDER.iterdir())


async def test_page_is_served_without_a_key_and_with_a_strict_policy(config: RouterConfig) -> None:
    async with (
        serving(replace(config, api_keys=KEYS)) as served,
        httpx.AsyncClient(base_url=served.admin_url) as http,
    ):
        for path, file in page_files().items():
            reply = await http.get(path)
            assert (reply.status_code, reply.content) == (200, file.read_bytes())
            policy = dict(
                part.strip().split(" ", 1)
                for part in reply.headers["content-security-policy"].split(";")
            )
            assert policy["default-src"] == "'none'"
            assert set(policy.values()) == {"'none'", "'self'"}
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["referrer-policy"] == "no-referrer"
        clients = await http.get(f"{served.url}/page/app.js")
        assert clients.status_code == 401, "clients' port does not serve the page"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_refers_only_to_files_of_the_page_and_has_no_inline_code(path: Any) -> None:
    text = path.read_text()
    outside = [url for url in re.findall(r"\w+://[^\s\"']+", text) if "www.w3.org" not in url]
    assert outside == []
    for forbidden in ("innerHTML", "eval(", "document.write", "localStorage", "document.cookie"):
        assert forbidden not in text
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
        assert re.findall(r"<script[^>]*>([^<]+)</script>", text) == []
        for name in re.findall(r"(?:src|href)=\"(/[^\"]*)\"", text):
            assert name in page_files()
    for name in re.findall(r"from \"\./([\w.]+)\"", text):
        assert f"/page/{name}" in page_files()


async def test_every_script_finds_its_elements() -> None:
    html = (FOLDER / "index.html").read_text()
    known = set(re.findall(r"\sid=\"([\w-]+)\"", html))
    used = {
        name for path in FILES for name in re.findall(r"byId\(\"([\w-]+)\"\)", path.read_text())
    }
    assert used
    assert used <= known
    for name in re.findall(r"aria-labelledby=\"([\w-]+)\"|href=\"#([\w-]+)\"", html):
        assert name[0] in known or name[1] in known


async def updates(http: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("GET", "/live") as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            yield json.loads(line)


def operator(served: Served, key: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=served.admin_url, headers=headers, timeout=60)


async def test_only_operators_get_updates_and_the_playground(config: RouterConfig) -> None:
    async with serving(replace(config, api_keys=KEYS), StubWorker()) as served:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for key, expected in (("a-user-of-this", 403), (METRICS, 403), ("", 401), (OPERATOR, 200)):
            async with operator(served, key) as http:
                reply = await http.post("/v1/chat/completions", json=chat)
                assert reply.status_code == expected
                async with http.stream("GET", "/live") as stream:
                    assert stream.status_code == expected


async def test_later_updates_have_only_what_has_changed(config: RouterConfig) -> None:
    workers = [StubWorker("w0"), StubWorker("w1")]
    async with (
        serving(config, *workers) as served,
        client_of(served) as client,
        operator(served) as http,
    ):
        stream = updates(http)
        first = await anext(stream)
        assert (first["model"], first["router"]) == ("stub", "router-0")
        assert first["columns"] == list(WORKER_COLUMNS)
        assert [row[0] for row in first["workers"]] == ["w0", "w1"]
        assert first["decisions"] == first["gone"] == []
        reply = await client.post("/v1/completions", json=BODY)
        second = await anext(stream)
        (decision,) = second["decisions"]
        assert decision["request_id"] == reply.headers["x-request-id"]
        assert decision["reason"] == "routing: cost"
        assert [row[0] for row in second["workers"]] == [decision["worker"]]
        await served.router.set_workers({"w0": workers[0].address})
        third = await anext(stream)
        assert third["decisions"] == []
        assert third["gone"] == ["w1"]
        await stream.aclose()  # type: ignore[attr-defined]


async def test_number_of_streams_is_bounded_and_closed_ones_do_not_count(
    config: RouterConfig,
) -> None:
    async with serving(config, StubWorker()) as served, operator(served) as http:
        streams = [updates(http) for _ in range(MAX_STREAMS)]
        for stream in streams:
            await anext(stream)
        assert (await http.get("/live")).status_code == 429
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        status = 429
        while status == 429:
            async with http.stream("GET", "/live") as reply:
                status = reply.status_code
            await asyncio.sleep(0.05)
        assert status == 200


async def test_streams_end_when_the_router_stops(config: RouterConfig) -> None:
    async with serving(config, StubWorker()) as served, operator(served) as http:
        stream = updates(http)
        await anext(stream)
        stopping = asyncio.create_task(served.router.stop())
        async for _ in stream:
            pass
        await stopping
