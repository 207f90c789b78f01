"""The operators' page in headless Chromium: what an operator sees and does."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.router.config import RouterConfig
from penstock.router.server import serve_router
from tests.support.api_keys import EVERY_ROLE, OPERATOR
from tests.support.browser import Browser, browser, needs_chromium
from tests.support.served_router import FORK_SERVER, Served, client_of, serving
from tests.support.stub_worker import StubWorker

pytestmark = [needs_chromium, pytest.mark.process]

LIVE = "document.getElementById('connection').dataset.state === 'live'"
ROW = (
    "[...document.querySelectorAll('#worker-table tbody tr')]"
    ".find((row) => row.cells[0].innerText === arguments[0])?.cells[2].innerText === arguments[1]"
)


@pytest_asyncio.fixture
async def window(tmp_path: Path) -> AsyncIterator[Browser]:
    async with browser(tmp_path / "profile") as window:
        yield window


@contextlib.asynccontextmanager
async def pair(config: RouterConfig) -> AsyncIterator[Served]:
    """Serve a prefill and two decode workers that generate slowly enough to be seen."""
    peers: dict[str, StubWorker] = {}
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    workers = [
        StubWorker(name, role, lambda prompt: [70] * 4096, peers, step_seconds=0.02)
        for name, role in roles.items()
    ]
    async with serving(config, *workers) as served:
        yield served


async def test_state_decisions_and_explanations_appear_as_they_happen(
    config: RouterConfig, window: Browser
) -> None:
    async with pair(config) as served, client_of(served) as http:
        await window.open(served.admin_url)
        await window.until(LIVE)
        assert "stub" in await window.text("h1")
        for name in ("p0", "d0", "d1"):
            await window.until(ROW, name, "ready")
        reply = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
        name = reply.headers["x-request-id"]
        await window.until("document.querySelector('#decision-table .link')")
        assert await window.text("#decision-table .link") == name
        await window.click("#decision-table .link")
        await window.until("document.querySelector('#explanation .timeline')")
        text = await window.text("#explanation")
        assert "placed on p0, then d" in text
        assert "ended after 3 tokens" in text
        assert await window.log() == []


async def test_worker_that_is_killed_and_replaced_is_shown(
    config: RouterConfig, window: Browser
) -> None:
    async with pair(config) as served:
        await window.open(served.admin_url)
        await window.until(ROW, "d0", "ready")
        worker = next(each for each in served.workers if each.name == "d0")
        port = int(worker.address.rpartition(":")[2])
        await worker.stop()
        await window.until(ROW, "d0", "down")
        worker.welcome.incarnation = "d0-2"
        await worker.start(port)
        await window.until(ROW, "d0", "ready")


async def test_playground_streams_and_shows_the_worker_of_each_token(
    config: RouterConfig, window: Browser
) -> None:
    async with pair(config) as served:
        await window.open(served.admin_url)
        await window.until(LIVE)
        await window.run("document.querySelector('[name=max_tokens]').value = 200")
        await window.run("document.querySelector('[name=temperature]').value = 0.5")
        await window.type("#message", "Hello")
        await window.click("#send")
        await window.until("document.querySelectorAll('.token').length > 5")
        runs = [worker for worker in served.workers if worker.runs]
        submit = served.workers[0].submits[0]
        assert submit.params.temperature == 0.5
        assert submit.params.max_tokens == 200
        for worker in runs:
            await worker.stop()
        await window.until("document.querySelectorAll('.token[data-worker]').length > 5")
        shown = await window.run(
            "return [...new Set([...document.querySelectorAll('.token')].map((t) => t.title))]"
        )
        assert len(shown) >= 3, "the prompt's worker, the lost one and the next one"
        assert set(shown) <= {"p0", "d0", "d1"}
        await window.until("!document.getElementById('send').disabled")


async def test_playground_can_be_stopped(config: RouterConfig, window: Browser) -> None:
    async with pair(config) as served:
        await window.open(served.admin_url)
        await window.until(LIVE)
        await window.run("document.querySelector('[name=max_tokens]').value = 1500")
        await window.type("#message", "Hello")
        await window.click("#send")
        await window.until("document.querySelectorAll('.token').length > 5")
        await window.click("#stop")
        await window.until("document.getElementById('chat-status').innerText === 'stopped'")
        await window.until(
            "[...document.querySelectorAll('#tiles div')].some((tile) => "
            "tile.innerText.replace(/\\s+/g, ' ').trim() === 'open requests 0')"
        )


async def test_wrong_key_is_refused_and_the_right_one_stays_in_the_tab(
    config: RouterConfig, window: Browser
) -> None:
    async with pair(replace(config, api_keys=EVERY_ROLE)) as served:
        await window.open(served.admin_url)
        await window.until("document.getElementById('key-dialog').open")
        await window.press("\ue00c")  # Escape must not close the dialog
        assert await window.run("return document.getElementById('key-dialog').open")
        await window.type("#key", "sesame-of-nobody\ue007")  # \ue007 is Enter
        await window.until("document.getElementById('key-error').innerText.includes('API key')")
        assert not await window.run(f"return {LIVE}")
        await window.type("#key", f"{OPERATOR}\ue007")
        await window.until(LIVE)
        stored = "return [localStorage.length, document.cookie, location.href.includes('sesame')]"
        assert await window.run(stored) == [0, "", False]
        await window.run("location.reload()")
        await window.until(LIVE)
        await window.click("#forget")
        await window.until("document.getElementById('key-dialog').open")


async def test_dropped_connection_is_shown_and_comes_back(
    config: RouterConfig, window: Browser
) -> None:
    async with pair(config) as served:
        await window.open(served.admin_url)
        await window.until(LIVE)
        port = int(served.admin_url.rpartition(":")[2])
        await served.router.stop()
        await window.until("document.getElementById('connection').dataset.state === 'lost'")
        again = replace(config, http_port=0, grpc_port=0, admin_port=port)
        router = await serve_router(again, FORK_SERVER)
        try:
            await window.until(LIVE)
            assert "no worker" in await window.text("#tiles")
        finally:
            await router.stop()


@pytest.mark.parametrize("width", [360, 1600])
async def test_page_never_scrolls_sideways_and_everything_has_a_name(
    config: RouterConfig, window: Browser, width: int
) -> None:
    async with pair(config) as served:
        await window.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        await window.open(served.admin_url)
        await window.until(LIVE)
        await window.until("document.querySelectorAll('#worker-table tbody tr').length === 3")
        assert await window.run("return document.documentElement.scrollWidth <= innerWidth")
        tree = await window.devtools("Accessibility.getFullAXTree")
        roles = {"button", "link", "textbox", "searchbox", "spinbutton", "image", "region"}
        unnamed = [
            node["role"]["value"]
            for node in tree["nodes"]
            if not node["ignored"]
            and node["role"]["value"] in roles
            and not node.get("name", {}).get("value")
        ]
        assert unnamed == []


async def test_page_is_used_with_the_keyboard_alone(config: RouterConfig, window: Browser) -> None:
    async with pair(config) as served:
        await window.open(served.admin_url)
        await window.until(LIVE)
        await window.until("document.querySelectorAll('#worker-table tbody tr').length === 3")
        reached = []
        for _ in range(45):
            await window.press("\ue004")  # the Tab key
            reached.append(
                await window.run(
                    "const e = document.activeElement; return e.id || e.innerText || e.ariaLabel"
                )
            )
        assert reached[0] == "Skip to content"
        for name in ("worker-filter", "state", "explain-id", "message", "send"):
            assert name in reached
