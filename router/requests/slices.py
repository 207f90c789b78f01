"""Divides long work of the event loop into slices, so that other streams are not delayed."""

import asyncio
import time
from typing import Any

SLICE_SECONDS = 0.002


class Slices:
    """Measures how long a piece of work has blocked the event loop.

    The work calls `pause` between its short steps.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pause(self) -> None:
        """Let other callbacks run if the current slice has lasted `SLICE_SECONDS`."""
        if time.perf_counter() - self._began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


async def release(items: list[Any]) -> None:
    """Remove all items of a list in slices, because their memory may take long to free."""
    slices = Slices()
    while items:
        items.pop()
        await slices.pause()
