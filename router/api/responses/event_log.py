"""The events of background responses; a stream may start reading at any event."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.router.api.connection import BODY_WRITER, BodyWriter
from penstock.router.api.generation.response import STREAM_HEADERS
from penstock.router.api.generation.sending import FLUSH_CHARS, NO_HEADERS
from penstock.router.errors import Code, ServingError
from penstock.router.requests.slices import Slices

MAX_EVENT_BYTES = 32 << 20
"""Maximum size of the events of one response."""

MAX_TENANT_BYTES = 64 << 20
"""Maximum size of the events of all running responses of a tenant."""

MAX_RUNNING_BYTES = 256 << 20
"""Maximum size of the events of all running responses."""

EVENT_OVERHEAD = 128
"""Bytes that are counted for the Python objects of an event, in addition to its text."""

MAX_KEPT_BYTES = 64 << 20
"""Maximum size of the events of all responses that have ended; the oldest are removed."""


class EventBytes:
    """Counts the bytes of the events of all running responses, in total and by tenant."""

    def __init__(self) -> None:
        self._tenants: Counter[str] = Counter()

    def take(self, tenant: str, size: int, is_required: bool) -> None:
        """Add the bytes of an event.

        Args:
            tenant: the tenant of the response.
            size: number of bytes.
            is_required: whether the bytes are accepted even above the limits.

        Raises:
            ServingError: OVERLOADED if the events of the tenant, or of all tenants, exceed a limit.
        """
        used = self._tenants[tenant] + size, self._tenants.total() + size
        if not is_required and (used[0] > MAX_TENANT_BYTES or used[1] > MAX_RUNNING_BYTES):
            raise ServingError(
                Code.OVERLOADED,
                "the events of background responses that are being generated exceed their memory "
                f"limit ({MAX_TENANT_BYTES} bytes for one API key, {MAX_RUNNING_BYTES} bytes for "
                "all API keys): create fewer responses at a time, or set "
                "'stream' to false",
                "stream",
            )
        self._tenants[tenant] = used[0]

    def release(self, tenant: str, size: int) -> None:
        """Subtract the bytes of a response that has ended."""
        self._tenants[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant]


class EventLog:
    """The events of one response, in order of their sequence numbers.

    Args:
        take: counts the bytes of each event before it is appended (see `EventBytes.take`), or
            raises an error.

    Attributes:
        events: the events so far, each in pieces of limited size.
        num_bytes: size of the events, with `EVENT_OVERHEAD` for each event.
        has_ended: whether no other event follows.
        readers: asyncio events that are set after each new event and at the end.
    """

    def __init__(self, take: Callable[[int, bool], None] = lambda size, is_required: None) -> None:
        self._take = take
        self.events: list[Sequence[bytes]] = []
        self.num_bytes = 0
        self.has_ended = False
        self.readers: set[asyncio.Event] = set()

    async def add(self, fragments: Iterable[str], slices: Slices, are_last: bool = False) -> None:
        """Append the events in `fragments`; the last fragment of each event ends with a blank line.

        An event is left out if its fragments end early.

        Args:
            fragments: the events.
            slices: pauses after each fragment.
            are_last: whether the events report a failure; the limits do not apply to such events.

        Raises:
            ServingError: the events exceed `MAX_EVENT_BYTES`, or the limits of `take`.
        """
        pieces: list[bytes] = []
        texts: list[str] = []
        size = 0
        for fragment in fragments:
            texts.append(fragment)
            size += len(fragment)
            is_last = fragment.endswith("\n\n")
            if is_last or size >= FLUSH_CHARS:
                pieces.append("".join(texts).encode())
                texts.clear()
                size = 0
            if is_last:
                self._append(pieces, are_last)
                pieces = []
            await slices.pause()

    def _append(self, event: Sequence[bytes], is_required: bool) -> None:
        size = sum(map(len, event)) + EVENT_OVERHEAD
        if self.num_bytes + size > MAX_EVENT_BYTES and not is_required:
            raise ServingError(
                Code.TOO_LARGE,
                "the stored events of this background response exceed "
                f"{MAX_EVENT_BYTES} bytes: set 'stream' to false",
                "stream",
            )
        self._take(size, is_required)
        self.num_bytes += size
        self.events.append(event)
        self._wake()

    def end(self) -> None:
        """Record that no other event follows, and wake the readers."""
        self.has_ended = True
        self._wake()

    def _wake(self) -> None:
        for reader in self.readers:
            reader.set()


class EventLogs:
    """The events of the responses that have ended, up to a maximum number of bytes."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # Events of ended responses, by tenant and id.
        self._logs: OrderedDict[tuple[str, str], EventLog] = OrderedDict()

    def put(self, tenant: str, name: str, log: EventLog) -> None:
        """Store the log of a response; above the limit, remove the oldest logs."""
        self._logs[tenant, name] = log
        self._num_bytes += log.num_bytes
        while self._num_bytes > self._max_bytes:
            self.delete(*next(iter(self._logs)))

    def get(self, tenant: str, name: str) -> EventLog | None:
        """Return the events of a response, or None if they have been removed."""
        return self._logs.get((tenant, name))

    def delete(self, tenant: str, name: str) -> None:
        """Remove the events of a response, if they are kept."""
        log = self._logs.pop((tenant, name), None)
        if log is not None:
            self._num_bytes -= log.num_bytes


class EventLogResponse(Response):
    """Streams the events of a log until the log ends. The client may disconnect at any time.

    Args:
        log: the events.
        first: sequence number of the first event to send.
        headers: further headers.
    """

    def __init__(
        self, log: EventLog, first: int = 0, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._log = log
        self._next = first
        self._own_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: BodyWriter = scope["extensions"][BODY_WRITER]
        own = [(name.encode(), value.encode()) for name, value in self._own_headers.items()]
        headers = [*STREAM_HEADERS, *own]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        log, changed, has_left = self._log, asyncio.Event(), asyncio.Event()

        def on_disconnect() -> None:
            has_left.set()
            changed.set()

        body.watch(on_disconnect)
        log.readers.add(changed)
        try:
            while not has_left.is_set():
                changed.clear()
                await self._send_new(send, has_left)
                if log.has_ended and self._next >= len(log.events):
                    break
                await changed.wait()
        finally:
            log.readers.discard(changed)
            body.unwatch()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_new(self, send: Send, has_left: asyncio.Event) -> None:
        """Send the events that have not been sent."""
        slices, events = Slices(), self._log.events
        pieces: list[bytes] = []
        size = 0
        while self._next < len(events) and not has_left.is_set():
            for piece in events[self._next]:
                pieces.append(piece)
                size += len(piece)
            self._next += 1
            if size >= FLUSH_CHARS or self._next >= len(events):
                for chunk in _joined(pieces):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    await slices.pause()
                pieces, size = [], 0


def _joined(pieces: Sequence[bytes]) -> Iterable[bytes]:
    """Join the pieces if they are small in total; otherwise return them unchanged."""
    if len(pieces) > 1 and sum(map(len, pieces)) > 2 * FLUSH_CHARS:
        return pieces
    return (b"".join(pieces),)
