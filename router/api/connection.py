"""HTTP connections with limits that uvicorn lacks, on bytes, times and the number of connections.

All limits apply even before a request is authenticated.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.router.api.connection_limits import ConnectionLimits
from penstock.router.api.http import add_common_headers, error_response
from penstock.router.api.write_batch import WriteBatch
from penstock.router.errors import Code, ServingError, invalid

log = logging.getLogger(__name__)

BODY_WRITER = "penstock.body_writer"
"""Key of the `BodyWriter` in the extensions of a request's ASGI scope."""


MAX_PIPELINED = 16
"""Number of a connection's requests that may wait for the running one before reading pauses.

While reading is paused, the router does not notice that the client has disconnected.
"""


MAX_COLLECTED = 64 << 10
"""Number of collected bytes of a response above which the bytes are written immediately."""


class BodyWriter:
    """Collects the bytes of a response, and writes them in the event loop's next iteration.

    A `BodyWriter` replaces the transport in uvicorn's state of the request. Therefore one system
    call writes the status, the headers and the first events, and one writes the last event and the
    end of the body. `write_chunk` adds parts of a chunked body without a task switch; ASGI's `send`
    needs one.

    Args:
        cycle: uvicorn's state of the request.
        transport: the connection.
        batch: after a `write`, calls `flush` in the next iteration of the event loop.

    Attributes:
        cycle: uvicorn's state of the request.
        flow: while the client reads too slowly, `flow.write_paused` is true and `send` waits.
        is_closing: like `is_closing` of an asyncio transport.
    """

    __slots__ = ("_batch", "_on_disconnect", "_transport", "_unsent", "cycle", "flow", "is_closing")

    def __init__(
        self, cycle: RequestResponseCycle, transport: asyncio.Transport, batch: WriteBatch
    ) -> None:
        self.cycle = cycle
        self.flow = cycle.flow
        self.is_closing = transport.is_closing
        self._transport = transport
        self._batch = batch
        self._unsent = b""
        self._on_disconnect: Callable[[], None] | None = None

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` when the client disconnects, or now if it has disconnected.

        Unlike ASGI's `receive`, this needs no waiting task. The request's body must have been read.
        """
        if self.cycle.disconnected:
            on_disconnect()
        else:
            self._on_disconnect = on_disconnect
            self.flow.resume_reading()  # while reading is paused, a disconnect is not noticed

    def unwatch(self) -> None:
        """Remove the callback of `watch`, so that an idle connection holds no reference to it."""
        self._on_disconnect = None

    def disconnected(self) -> None:
        """Drop the collected bytes, since the client has disconnected."""
        self._unsent = b""
        cycle, on_disconnect = self.cycle, self._on_disconnect
        if cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if on_disconnect is not None:
            on_disconnect()

    def write_chunk(self, part: bytes) -> None:
        """Write a part of the body; usable once the response has started.

        This runs for every token: keep it fast.
        """
        if not self._unsent:
            self._batch.add(self.flush)
        self._unsent += b"%x\r\n%b\r\n" % (len(part), part)
        if len(self._unsent) > MAX_COLLECTED:
            self.flush()

    def write(self, data: bytes) -> None:
        """Write bytes of the response, like `write` of an asyncio transport."""
        if not self._unsent:
            self._batch.add(self.flush)
        self._unsent += data
        if len(self._unsent) > MAX_COLLECTED:
            self.flush()

    def flush(self) -> None:
        """Write the collected bytes, or drop them if the client has disconnected."""
        unsent, self._unsent = self._unsent, b""
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent)

    def close(self) -> None:
        """Close the connection after the collected bytes, like `close` of an asyncio transport."""
        self.flush()
        self._transport.close()


class BoundedConnection(HttpToolsProtocol):
    """A connection that is closed if its client sends too much or too slowly, or does not read.

    - Bytes of a request's head, and bytes of its body outside of chunks (chunk sizes, trailers),
      are counted as they arrive, because the parser accepts headers of any length.
    - At most one timer runs while no request is complete. Only a new request, a complete head or a
      complete response restarts this timer; an empty line does not.
    - A connection that is too old is closed after its next response.
    - If the connection responds to a request before the request's body is complete, it closes after
      this response.
    """

    limits: ConnectionLimits

    @classmethod
    def with_limits(cls, limits: ConnectionLimits) -> type["BoundedConnection"]:
        """Return a subclass with the given limits; uvicorn creates the instances."""
        return type(cls.__name__, (cls,), {"limits": limits})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unprotected_app = self.app
        self.app = self._call_app
        self._address = ""
        self._raw_bytes = 0  # bytes since the parser last completed a head or got a part of a body
        self._is_in_head = False
        self._ignores_input = False
        self._is_last_response = False
        # The first response after this time closes the connection.
        self._last_response_at = self.loop.time() + self.limits.bounds.http_age_seconds
        self._running: BodyWriter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self.limits.open(self._address):
            self._start_timer(self.limits.receive_seconds)
        else:
            self._refuse(
                ServingError(
                    Code.UNAVAILABLE,
                    "too many connections to this server are open: try again later",
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.close(self._address)
        self._stop_timer()
        self._stop_write_timer()
        if self._running is not None:
            # uvicorn marks only the newest request as disconnected; an older one may still run.
            self._running.disconnected()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not (self._ignores_input or self.transport.is_closing()):
            available = self.limits.max_head_bytes - self._raw_bytes
            if available <= 0:
                self._end_malformed(
                    "the head or the trailer of the request exceeds "
                    f"{self.limits.max_head_bytes} bytes"
                )
                return
            part, rest = rest[:available], rest[available:]
            self._raw_bytes += len(part)
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade:  # ignore the upgrade and all later input
                self.cycle.keep_alive = False
                self._ignores_input = True
            except httptools.HttpParserError:
                if not self.transport.is_closing():
                    self._end_malformed("the request is not valid HTTP")

    def on_message_begin(self) -> None:
        if self.transport.is_closing():
            raise httptools.HttpParserError("the connection is closed")
        super().on_message_begin()
        self._is_in_head = True
        self._start_timer(self.limits.receive_seconds)

    def on_headers_complete(self) -> None:
        self._raw_bytes = 0
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        body = BodyWriter(self.cycle, self.transport, self.limits.batch)
        self.cycle.transport = body  # type: ignore[assignment]
        self.scope["extensions"] = {BODY_WRITER: body}  # type: ignore[dict-item]
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # undo uvicorn's pause, which would hide a disconnect

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._raw_bytes = 0
        super().on_message_complete()
        if self._is_last_response and self.cycle.response_complete:
            self._close()

    def on_response_complete(self) -> None:
        if self._running is not None:
            self._running.flush()  # before the response to the next request
        super().on_response_complete()
        # Stop uvicorn's timer for idle connections, because an empty line from the client would
        # stop it. The timer of this class is used instead.
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            self._watch_unsent()
        elif self._is_last_response and not self.cycle.more_body:
            self._close()
        elif self._is_last_response:
            # If the connection was closed now, while the client still sends the body of its
            # request, the client could lose the response.
            self.transport.write_eof()
            self._start_timer(self.limits.bounds.linger_seconds)
        elif self.cycle.response_complete and not self._is_in_head:
            self._start_timer(self.limits.bounds.idle_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_timer()

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application.

        If it responds before the request's end, or if the connection is old, the connection is
        closed after the response.
        """
        body: BodyWriter = scope["extensions"][BODY_WRITER]
        self._running, cycle = body, body.cycle
        if scope["method"] == "POST":  # other requests, such as health checks, are cheap
            await self.limits.pacer.wait()

        async def send_checked(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            is_early = is_start and cycle.more_body
            if is_early or (is_start and self.loop.time() > self._last_response_at):
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)
            if is_early:
                cycle.keep_alive = True  # prevents an immediate close by uvicorn
                self._is_last_response = True

        await self._unprotected_app(scope, receive, send_checked)

    def _end_malformed(self, reason: str) -> None:
        """Refuse invalid input; complete requests that came before it still get their responses."""
        self.limits.on_malformed()
        log.debug("malformed request: %s", reason)
        self._ignores_input = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            is_answered = self._is_last_response
        elif not cycle.more_body:
            cycle.keep_alive = False
            return
        elif self.pipeline:  # the previous response is not complete
            self.transport.abort()
            return
        else:
            is_answered = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if is_answered:
            self._close()
        else:
            self._refuse(invalid(reason))

    def _refuse(self, error: ServingError) -> None:
        """Send an error without calling the application, and close the connection."""
        self.transport.write(_last_response(error_response(error)))
        self._close()

    def _close(self) -> None:
        if self._running is not None:
            self._running.flush()
        self._stop_timer()
        self.transport.close()
        self._watch_unsent()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_unsent(self) -> None:
        """Abort the connection later if the client does not read what is in the send buffer."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and self._write_timer is None:
            seconds = self.limits.bounds.write_seconds
            self._write_timer = self.loop.call_later(seconds, self._check_progress, unsent)

    def _check_progress(self, unsent_before: int) -> None:
        """Abort the connection if none of its send buffer was sent since the last check."""
        self._write_timer = None
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_unsent()
        else:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _last_response(response: Response) -> bytes:
    """Return the bytes of a response after which the connection is closed."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    add_common_headers(headers, "")
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
