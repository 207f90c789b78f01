"""Calls a function in a later callback of the event loop, once for any number of reasons."""

import asyncio
from collections.abc import Callable


class CallOnce:
    """Calls a function in the next iteration of the event loop after `schedule`.

    Args:
        function: the function. It may schedule the next call.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._is_scheduled = False

    def schedule(self) -> None:
        """Schedule a call, unless a scheduled call has not begun."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._is_scheduled = False
        self._function()
