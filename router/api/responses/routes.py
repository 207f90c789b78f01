"""The routes of the Responses API: /v1/responses."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.router.api.generation.bodies import read_request
from penstock.router.api.generation.calls import GenerationCalls, SubmittedCall
from penstock.router.api.generation.response import GenerationResponse
from penstock.router.api.http import json_response
from penstock.router.api.responses.body import ResponsesRequest
from penstock.router.api.responses.formatter import FinishedResponse, ResponsesFormatter
from penstock.router.api.responses.input_items import list_page
from penstock.router.api.responses.kept import KeptContent
from penstock.router.api.responses.response_object import ResponseObject
from penstock.router.api.responses.store import ResponseStore
from penstock.router.api.responses.stored import (
    ResponseRecorder,
    StoredItems,
    StoredResponse,
    joined_chat,
    own_items,
)
from penstock.router.api.responses.stored_body import StoredBody
from penstock.router.errors import invalid
from penstock.router.frontend import Frontend

PATH = "/v1/responses"


class ResponsesApi:
    """The handlers of the Responses API."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._calls = GenerationCalls(frontend)
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = PATH + "/{id}"
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(one, self.retrieve),
            Route(one, self.delete, methods=["DELETE"]),
            Route(one + "/cancel", self.cancel, methods=["POST"]),
            Route(one + "/input_items", self.input_items),
        ]

    async def create(self, request: Request) -> Response:
        """Generate a response."""
        parsed = await read_request("response", request, self._frontend)
        body: ResponsesRequest = parsed.body
        tenant: str = request.state.tenant
        content = KeptContent.read(parsed.kept)
        history = self._history(tenant, body.previous_response_id)
        chat = parsed.messages
        items = (*history, own_items(chat, content))
        most = self._frontend.config.bounds.max_body_bytes
        chat = joined_chat(chat, content, history, most)
        name = f"resp_{secrets.token_hex(16)}"
        call = await self._calls.start_chat(request, replace(parsed, chat=chat), name)
        formatter = self._formatter(call, body, content, tenant, items)
        return GenerationResponse(call.answers, formatter, call.request_id, bool(body.stream))

    def _history(self, tenant: str, previous: str | None) -> Sequence[StoredItems]:
        """Return the items of the conversation that the body continues."""
        if previous is None:
            return ()
        name = "previous_response_id"
        found = self._store.get(tenant, previous, name)
        if not found.is_complete:
            raise invalid(f"the response {previous[:80]!r} has failed: continue another one", name)
        return found.conversation

    def _formatter(
        self,
        call: SubmittedCall,
        body: ResponsesRequest,
        content: KeptContent,
        tenant: str,
        items: Sequence[StoredItems],
    ) -> ResponsesFormatter:
        def record(finished: FinishedResponse) -> Iterator[str]:
            if body.store is False:
                return
            recorder = ResponseRecorder(call.name, items)
            yield from recorder.record(finished)
            assert recorder.stored is not None
            self._store.put(tenant, recorder.stored)

        response = ResponseObject(
            id=call.name,
            created_at=int(time.time()),
            model=self._frontend.model.name,
            sampling=call.sampling,
            shown=content.shown.decode(),
        )
        token_bytes = self._frontend.tokenizer.token_bytes
        return ResponsesFormatter(
            response, call, token_bytes, body.num_logprobs() is not None, record
        )

    # ------------------------------------------------------------ stored responses

    def _stored(self, request: Request) -> StoredResponse:
        return self._store.get(request.state.tenant, request.path_params["id"])

    async def retrieve(self, request: Request) -> Response:
        """Return a stored response."""
        _check_query(request, {"stream": ("false",), "include_obfuscation": ("false",)})
        return StoredBody(self._stored(request).body)

    async def delete(self, request: Request) -> Response:
        """Remove a stored response."""
        name = request.path_params["id"]
        self._store.delete(request.state.tenant, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Refuse to cancel a response, which has ended."""
        self._stored(request)
        raise invalid("the response has ended, so that it cannot be canceled")

    async def input_items(self, request: Request) -> Response:
        """Return a page of the input items of a stored response."""
        _check_query(request, {"after": None, "limit": None, "order": ("asc", "desc")})
        stored = self._stored(request)
        return StoredBody(await list_page(stored.input, request.query_params))


def _check_query(request: Request, known: dict[str, Sequence[str] | None]) -> None:
    """Refuse parameters of the query that are not known, or have other values."""
    for name, value in request.query_params.items():
        values = known.get(name, ())
        if values is not None and value not in values:
            expected = f"expected {' or '.join(values)}" if values else "leave it out"
            raise invalid(f"the parameter {name[:80]} is not supported: {expected}", name[:80])
