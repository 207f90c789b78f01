"""HTTP connections with limits that uvicorn lacks, on the size and time of a request's head."""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedConnection(HttpToolsProtocol):
    """A connection that closes if a request's head is too large or arrives too slowly.

    The head is the request line and the headers.
    """

    max_head_bytes = 64 << 10
    head_seconds = 30.0

    @classmethod
    def with_limits(cls, max_head_bytes: int, head_seconds: float) -> type["BoundedConnection"]:
        """Return a subclass with the given limits; uvicorn creates the instances."""
        bounds = {"max_head_bytes": max_head_bytes, "head_seconds": head_seconds}
        return type(cls.__name__, (cls,), bounds)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_received()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_received()
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes:
            raise httptools.HttpParserError("the request's head is too large")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._close_slow)

    def _head_received(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_slow(self) -> None:
        self._head_timer = None
        self.transport.close()
