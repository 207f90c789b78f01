"""A JSON response from fragments."""

from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.router.api.generation.sending import send_json


class FragmentResponse(Response):
    """A response whose body is JSON text in fragments."""

    def __init__(self, fragments: Iterable[str]) -> None:
        self._fragments = fragments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._fragments, {})
