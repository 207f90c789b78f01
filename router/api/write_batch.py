"""Collects the writes of one iteration of the event loop and makes them in the next iteration."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class WriteBatch:
    """Collects writes and makes all of them in the next iteration of the event loop.

    A step of a worker adds a token to many responses. If each token was written immediately, a
    system call would run after each token and evict the code that handles tokens from the CPU's
    caches.
    """

    def __init__(self) -> None:
        self._writes: list[Callable[[], None]] = []

    def add(self, write: Callable[[], None]) -> None:
        """Call `write` in the next iteration of the event loop."""
        if not self._writes:
            asyncio.get_running_loop().call_soon(self._make)
        self._writes.append(write)

    def _make(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            try:
                write()
            except Exception:  # an error of one response must not stop the writes of the others
                log.exception("the response of a request could not be written to its connection")
