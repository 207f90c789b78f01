"""A JSON response from stored fragments."""

from collections.abc import Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.router.api.generation.sending import send_json


class StoredBody(Response):
    """A response whose body is stored as JSON in fragments, each of whole characters."""

    def __init__(self, body: Sequence[bytes]) -> None:
        self._fragments = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._texts(), {})

    def _texts(self) -> Iterator[str]:
        for fragment in self._fragments:
            yield fragment.decode()
