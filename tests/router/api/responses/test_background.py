"""The limit on the number of background responses of a tenant."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.router.api.responses import background
from penstock.router.api.responses.background import BackgroundRuns
from penstock.router.errors import ServingError
from penstock.router.requests.background_tasks import BackgroundTasks


class StubRun:
    """A run that ends when it is canceled."""

    def __init__(self, name: str) -> None:
        self.response = SimpleNamespace(id=name)
        self.task: asyncio.Task[None] | None = None
        self.events = None
        self.canceled = asyncio.Event()
        self.cancel = self.canceled.set

    async def run(self) -> None:
        await self.canceled.wait()


async def test_limit_holds_for_calls_that_were_checked_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "MAX_PER_TENANT", 1)
    runs = BackgroundRuns(BackgroundTasks())
    first: Any = StubRun("a")
    second: Any = StubRun("b")
    runs.check_limit("me")
    runs.check_limit("me")
    runs.start("me", first)
    with pytest.raises(ServingError, match="background responses"):
        runs.start("me", second)
    assert second.canceled.is_set()
    assert second.task is None
    await runs.cancel("me", "a")
    assert runs.get("me", "a") is None
