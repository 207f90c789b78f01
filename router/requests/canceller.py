"""Cancels the requests of calls that end early, a few per callback of the event loop.

A call can have 1,024 requests. If one callback cancelled all of them, it would hold the event loop
for tens of milliseconds.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

MAX_PER_CALLBACK = 16
"""Maximum number of requests that one callback cancels. Cancelling them takes about 1 ms."""


class RequestCanceller:
    """Cancels requests in the order in which they are given.

    Args:
        cancel: cancels one request; it does nothing if the request has already ended.
    """

    def __init__(self, cancel: Callable[[int], None]) -> None:
        self._cancel = cancel
        self._waiting: deque[int] = deque()
        self._is_active = False  # whether `_cancel_some` is running or scheduled

    def cancel(self, requests: Sequence[int]) -> None:
        """Cancel up to `MAX_PER_CALLBACK` requests now, and the rest in later callbacks."""
        self._waiting.extend(requests)
        if not self._is_active:
            self._cancel_some()

    def _cancel_some(self) -> None:
        self._is_active = True
        try:
            for _ in range(min(len(self._waiting), MAX_PER_CALLBACK)):
                self._cancel(self._waiting.popleft())
        finally:
            self._is_active = bool(self._waiting)
            if self._is_active:
                asyncio.get_running_loop().call_soon(self._cancel_some)
