"""Sends response bodies in fragments, at the speed of the client."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.router.requests.slices import Slices

FLUSH_CHARS = 64 << 10
"""Bodies up to about this length are sent in one piece, with a Content-Length."""

NO_HEADERS: Mapping[str, str] = {}


def no_headers() -> Mapping[str, str]:
    """Return no headers."""
    return NO_HEADERS


async def send_json(
    send: Send,
    fragments: Iterable[str],
    headers: Mapping[str, str],
    is_needed: Callable[[], bool] = lambda: True,
) -> None:
    """Send a JSON response whose text comes in fragments.

    `send` waits while the client does not read, so that only a small part of a large body is in
    memory. Other callbacks of the event loop run between the fragments.

    Args:
        send: ASGI's `send`.
        fragments: the body.
        headers: further headers.
        is_needed: returns whether the client still waits; if not, the rest of the body is skipped.
    """
    own = [(name.encode(), value.encode()) for name, value in headers.items()]
    own.append((b"content-type", b"application/json"))
    has_begun = False
    slices = Slices()
    for piece, is_last in _pieces(fragments):
        if not is_needed():
            return
        if piece is not None:
            if not has_begun:
                length = [(b"content-length", b"%d" % len(piece))] if is_last else []
                start = {"type": "http.response.start", "status": 200, "headers": own + length}
                await send(start)
                has_begun = True
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        await slices.pause()


async def send_event(
    send: Send, fragments: Iterable[str], slices: Slices, is_last: bool = False
) -> bool:
    """Send fragments of an event stream in pieces of limited size.

    `slices` lets the event loop run other callbacks after each piece.

    Returns:
        Whether anything was sent.
    """
    has_sent = False
    for piece, ends in _pieces(fragments):
        more = not (ends and is_last)
        if piece or not more:
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            has_sent = True
        await slices.pause()
    return has_sent


class FragmentResponse(Response):
    """A response whose body is JSON text in fragments.

    Args:
        fragments: the body.
        headers: further headers.
    """

    def __init__(self, fragments: Iterable[str], headers: Mapping[str, str] = NO_HEADERS) -> None:
        self._fragments = fragments
        self._own_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._fragments, self._own_headers)


def _pieces(fragments: Iterable[str]) -> Iterator[tuple[bytes | None, bool]]:
    """Join fragments into pieces to send; yield None after a fragment that completes no piece."""
    texts: list[str] = []
    size = 0
    for fragment in fragments:
        texts.append(fragment)
        size += len(fragment)
        if size < FLUSH_CHARS:
            yield None, False
            continue
        yield "".join(texts).encode(), False
        texts.clear()
        size = 0
    yield "".join(texts).encode(), True
