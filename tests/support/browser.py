"""A headless Chromium, driven by chromedriver over the W3C WebDriver protocol."""

import asyncio
import base64
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served_router import TIMEOUT_SECONDS

# Key of element references in the WebDriver standard.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="needs Debian's packages chromium and chromium-driver",
)


class Browser:
    """A browser window. `run` executes JavaScript in the page; values are passed as JSON."""

    def __init__(self, http: httpx.AsyncClient, session: str) -> None:
        self._http = http
        self._path = f"/session/{session}"

    async def _post(self, path: str, **body: Any) -> Any:
        reply = await self._http.post(f"{self._path}/{path}", json=body)
        value = reply.json()["value"]
        assert reply.status_code == 200, value
        return value

    async def open(self, url: str) -> None:
        await self._post("url", url=url)

    async def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function and return its result."""
        return await self._post("execute/sync", script=script, args=list(arguments))

    async def text(self, selector: str) -> str:
        """Return the visible text of the first element that matches."""
        found = await self.run(
            "return document.querySelector(arguments[0])?.innerText ?? ''", selector
        )
        return str(found)

    async def until(self, condition: str, *arguments: Any) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not (found := await self.run(f"return {condition}", *arguments)):
                    await asyncio.sleep(0.05)
        assert found, f"never true: {condition}; log: {await self.log()}"
        return found

    async def type(self, selector: str, text: str) -> None:
        """Type into an element, as a user does."""
        found = await self._post("element", using="css selector", value=selector)
        await self._post(f"element/{found[ELEMENT]}/value", text=text)

    async def press(self, *keys: str) -> None:
        """Press keys one after the other in the focused element."""
        pressed = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        await self._post("actions", actions=[{"type": "key", "id": "keys", "actions": pressed}])

    async def click(self, selector: str) -> None:
        found = await self._post("element", using="css selector", value=selector)
        await self._post(f"element/{found[ELEMENT]}/click")

    async def resize(self, width: int, height: int) -> None:
        await self._post("window/rect", width=width, height=height)

    async def devtools(self, command: str, **parameters: Any) -> Any:
        """Run a command of Chromium's DevTools protocol."""
        return await self._post("goog/cdp/execute", cmd=command, params=parameters)

    async def log(self) -> list[str]:
        """Return the page's new console messages, including those about blocked content."""
        return [entry["message"] for entry in await self._post("se/log", type="browser")]

    async def screenshot(self, path: Path) -> None:
        """Write a picture of the visible part of the page."""
        reply = await self._http.get(f"{self._path}/screenshot")
        path.write_bytes(base64.b64decode(reply.json()["value"]))


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """Run a headless Chromium with this profile folder, controlled by a local chromedriver."""
    driver = await asyncio.create_subprocess_exec(
        "chromedriver", "--port=0", stdout=asyncio.subprocess.PIPE
    )
    assert driver.stdout is not None
    try:
        line = b""
        while b"started successfully on port" not in line:
            line = await driver.stdout.readline()
            assert line, "chromedriver has ended"
        port = int(line.decode().rstrip(".\n ").rpartition(" ")[2])
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        options = {
            "args": [*arguments, f"--user-data-dir={profile}", "--no-first-run"],
            "binary": shutil.which("chromium"),
        }
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base, timeout=TIMEOUT_SECONDS) as http:
            reply = await http.post(
                "/session", content=json.dumps({"capabilities": {"alwaysMatch": capabilities}})
            )
            session = reply.json()["value"]
            assert "sessionId" in session, session
            try:
                yield Browser(http, session["sessionId"])
            finally:
                await http.delete(f"/session/{session['sessionId']}")
    finally:
        driver.terminate()
        await driver.wait()
