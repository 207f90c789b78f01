"""The routes of the Responses API: /v1/responses."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.router.api.generation.bodies import read_request, while_connected
from penstock.router.api.generation.calls import GenerationCalls, SubmittedCall
from penstock.router.api.generation.load_report import load_headers
from penstock.router.api.generation.parsed_body import ParsedBody
from penstock.router.api.generation.response import GenerationResponse
from penstock.router.api.generation.sending import FragmentResponse
from penstock.router.api.http import json_response
from penstock.router.api.responses.background import BackgroundRun, BackgroundRuns
from penstock.router.api.responses.body import ResponsesRequest
from penstock.router.api.responses.event_log import EventLogResponse
from penstock.router.api.responses.formatter import ResponsesFormatter
from penstock.router.api.responses.input_items import list_page
from penstock.router.api.responses.kept import KeptContent
from penstock.router.api.responses.response_object import ResponseObject
from penstock.router.api.responses.store import ResponseStore
from penstock.router.api.responses.stored import (
    ResponseRecorder,
    StoredItems,
    StoredResponse,
    check_ids,
    check_stored_input,
    joined_chat,
    own_items,
)
from penstock.router.api.responses.truncation import first_that_fits, shorter_chats
from penstock.router.errors import CONTEXT_LENGTH_EXCEEDED, ServingError, invalid
from penstock.router.frontend import Frontend
from penstock.router.requests.chat import Chat
from penstock.router.requests.json_text import decoded_fragments

PATH = "/v1/responses"


class ResponsesApi:
    """The handlers of the Responses API."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._calls = GenerationCalls(frontend)
        self._store = ResponseStore()
        self._runs = BackgroundRuns(frontend.background)

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
        if body.store is not False:
            await check_ids(content, history)
            check_stored_input(items, content.shown, self._store.max_bytes)
        chat = joined_chat(chat, content, history, self._frontend.config.bounds)
        if body.background:
            self._runs.check_limit(tenant)
        name = f"resp_{secrets.token_hex(16)}"
        parsed = replace(parsed, chat=chat)
        try:
            call = await self._calls.start_chat(request, parsed, name)
        except ServingError as error:
            if body.truncation != "auto" or error.reason != CONTEXT_LENGTH_EXCEEDED:
                raise
            shorter = await self._truncated(request, parsed, content)
            if shorter is None:
                raise
            call = await self._calls.start_chat(request, replace(parsed, chat=shorter), name)
        response = self._response(call, body, content)
        recorder = ResponseRecorder(
            response, items, self._store.max_bytes, partial(self._store.put, tenant)
        )
        with_logprobs = body.num_logprobs() is not None
        formatter = ResponsesFormatter(
            response, call, self._frontend.tokenizer.token_bytes, with_logprobs, recorder
        )
        if not body.background:
            return GenerationResponse(
                call.answers,
                formatter,
                call.request_id,
                bool(body.stream),
                late_headers=load_headers(request, self._frontend),
            )
        events = self._runs.new_events(tenant) if body.stream else None
        run = BackgroundRun(response, items, call, formatter, events)
        self._runs.start(tenant, run)
        headers = {"x-request-id": call.request_id}
        if events is not None:
            return EventLogResponse(events, 0, headers)
        return FragmentResponse(run.body(), headers)

    def _history(self, tenant: str, previous: str | None) -> Sequence[StoredItems]:
        """Return the items of the conversation that ends with the response `previous`."""
        if previous is None:
            return ()
        name = "previous_response_id"
        if self._runs.get(tenant, previous) is not None:
            raise invalid(
                f"the response {previous[:80]!r} is still being generated: retrieve it until it "
                "has ended, then continue it",
                name,
            )
        found = self._store.get(tenant, previous, name)
        if not found.is_complete:
            raise invalid(
                f"the response {previous[:80]!r} has failed or was canceled: continue another one",
                name,
            )
        return found.conversation

    async def _truncated(
        self, request: Request, parsed: ParsedBody[Any], content: KeptContent
    ) -> Chat | None:
        """Return the longest shorter conversation that fits, or None if there is none.

        It lacks the oldest messages. The prompt and the answer must fit into the model's context.
        """
        body, frontend = parsed.body, self._frontend
        options = body.template_options(frontend.helpers.template_variables)

        async def length_of(chat: Chat) -> int:
            return len(await frontend.prompts.encode_chat(chat, request.state.tenant, options))

        most = frontend.model.max_model_len - (body.max_output_tokens or 1)
        chats = await shorter_chats(parsed.messages, content.num_instructions)
        return await while_connected(request, first_that_fits(chats, length_of, most))

    def _response(
        self, call: SubmittedCall, body: ResponsesRequest, content: KeptContent
    ) -> ResponseObject:
        return ResponseObject(
            id=call.name,
            created_at=int(time.time()),
            model=self._frontend.model.name,
            sampling=call.sampling,
            shown=content.shown.decode(),
            is_background=bool(body.background),
            is_stored=body.store is not False,
        )

    # ------------------------------------------------------------ stored responses

    def _stored(self, request: Request) -> StoredResponse:
        return self._store.get(request.state.tenant, request.path_params["id"])

    async def retrieve(self, request: Request) -> Response:
        """Return a stored or running response, or its events if the client requests a stream."""
        known = {"stream": ("true", "false"), "include_obfuscation": ("false",)}
        _check_query(request, {**known, "starting_after": None})
        first = _first_event(request)
        if first is not None:
            return self._stream(request, first)
        run = self._runs.get(request.state.tenant, request.path_params["id"])
        if run is not None:
            return FragmentResponse(run.body())
        return FragmentResponse(decoded_fragments(self._stored(request).body))

    def _stream(self, request: Request, first: int) -> Response:
        """Return the events of a background response, beginning with event number `first`."""
        name = request.path_params["id"]
        events = self._runs.events(request.state.tenant, name)
        if events is None:
            if self._runs.get(request.state.tenant, name) is None:
                # Raises the error NOT_FOUND if the tenant has no such response.
                self._stored(request)
            raise invalid(
                f"the events of the response {name[:80]!r} cannot be streamed, because it was "
                "created without 'background' and 'stream', or its events were removed: leave out "
                "'stream' to get the response itself",
                "stream",
            )
        return EventLogResponse(events, min(first, len(events.events)))

    async def delete(self, request: Request) -> Response:
        """Remove a stored response; cancel it first if it is generated in the background."""
        tenant, name = request.state.tenant, request.path_params["id"]
        await self._runs.delete(tenant, name)
        self._store.delete(tenant, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a response that is generated in the background; return it."""
        await self._runs.cancel(request.state.tenant, request.path_params["id"])
        stored = self._stored(request)
        if not stored.is_background:
            raise invalid(
                f"the response {request.path_params['id'][:80]!r} was created without "
                "'background'; only background responses can be canceled"
            )
        return FragmentResponse(decoded_fragments(stored.body))

    async def input_items(self, request: Request) -> Response:
        """Return a page of the input items of a stored or running response."""
        _check_query(request, {"after": None, "limit": None, "order": ("asc", "desc")})
        run = self._runs.get(request.state.tenant, request.path_params["id"])
        items = self._stored(request).input if run is None else run.input
        page = await list_page(items, request.query_params)
        return FragmentResponse(decoded_fragments(page))


def _first_event(request: Request) -> int | None:
    """Return the number of the first event of a stream, or None if the client wants no stream."""
    name = "starting_after"
    given = request.query_params.get(name)
    if request.query_params.get("stream") != "true":
        if given is not None:
            raise invalid(
                f"{name} needs 'stream' to be true: set 'stream' to true, or leave out {name}", name
            )
        return None
    if given is None:
        return 0
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise invalid(f"{name} is {given[:40]!r}: it must be the sequence_number of an event", name)
    return int(given) + 1


def _check_query(request: Request, known: dict[str, Sequence[str] | None]) -> None:
    """Refuse query parameters that are unknown, or whose value is not allowed."""
    for name, value in request.query_params.items():
        values = known.get(name, ())
        if values is not None and value not in values:
            if values:
                expected = " or ".join(values)
                raise invalid(f"{name} is {value[:40]!r}: expected {expected}", name)
            raise invalid(f"the parameter {name[:80]} is not supported: leave it out", name[:80])
