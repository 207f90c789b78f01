"""Tasks for which no client waits. A router waits for the end of these tasks before it stops."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

POLL_SECONDS = 0.05
END_SECONDS = 5.0
"""Longest time in seconds that a task may still run after its requests have ended."""


class BackgroundTasks:
    """The running background tasks of a router."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Run `work` as a task and return the task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, has_requests: Callable[[], bool], seconds: float) -> None:
        """Wait up to `seconds` until neither requests nor tasks are left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while has_requests() or self._tasks:
                    await asyncio.sleep(POLL_SECONDS)

    async def end(self, seconds: float = END_SECONDS) -> None:
        """Wait up to `seconds` for the tasks, after their requests have ended; then cancel them."""
        if not self._tasks:
            return
        _, pending = await asyncio.wait(set(self._tasks), timeout=seconds)
        for task in pending:
            task.cancel()
