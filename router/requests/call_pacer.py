"""Delays the starts of calls, so that a burst of calls does not block the event loop."""

import asyncio
from collections import deque


class CallPacer:
    """Lets calls begin in order of arrival, one in each iteration of the event loop.

    Beginning a call takes almost a millisecond. If all calls of a burst began in one iteration,
    submissions and tokens would have to wait until the last call has begun.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._has_begun = False  # whether a call has begun in this iteration of the event loop

    async def wait(self) -> None:
        """Wait until the call may begin.

        Returns immediately if no call has begun in this iteration of the event loop.
        """
        loop = asyncio.get_running_loop()
        if self._has_begun:
            start: asyncio.Future[None] = loop.create_future()
            self._waiting.append(start)
            await start
        else:
            self._has_begun = True
            loop.call_soon(self._start_next, loop)

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next waiting call begin, in the next iteration of the event loop."""
        while self._waiting:
            start = self._waiting.popleft()
            if not start.done():  # the call was not cancelled while it waited
                start.set_result(None)
                loop.call_soon(self._start_next, loop)
                return
        self._has_begun = False
