"""Anthropic's HTTP API: /v1/messages and /v1/messages/count_tokens."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.router.api.anthropic.errors import (
    PATH,
    anthropic_error,
    id_headers,
    new_request_id,
)
from penstock.router.api.anthropic.response import MessageContext, MessageFormatter
from penstock.router.api.anthropic.schema import CountTokensBody, MessagesBody
from penstock.router.api.generation.bodies import read_request, while_connected
from penstock.router.api.generation.calls import CallOptions, GenerationCalls
from penstock.router.api.generation.parsed_body import ParsedBody
from penstock.router.api.generation.response import GenerationResponse
from penstock.router.api.http import json_response
from penstock.router.frontend import Frontend


class MessagesApi:
    """The handlers of Anthropic's API."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._calls = GenerationCalls(frontend)

    def routes(self) -> Sequence[Route]:
        return [
            Route(PATH, self.messages, methods=["POST"]),
            Route(f"{PATH}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        """Generate an answer to a conversation, as a message or as a stream of events."""
        parsed = await self._read("messages", request)
        body: MessagesBody = parsed.body
        prompt, sampling = await self._calls.encode_chat(request, parsed)
        free = self._frontend.model.max_model_len - len(prompt)
        options = CallOptions(
            name=f"msg_{secrets.token_hex(12)}",
            parsing=body.parsing_options(parsed.messages),
            client_names=body.client_names(),
            thinking_budget=body.thinking_budget if self._calls.can_limit_reasoning else None,
        )
        # As in Anthropic's API, an answer that fills the context ends before `max_tokens`.
        sampling = replace(sampling, max_tokens=min(body.max_tokens or 1, max(free, 1)))
        call = await self._calls.submit(request, [prompt], sampling, options)
        context = MessageContext(
            id=call.name,
            request_id=call.request_id,
            model=self._frontend.model.name,
            num_prompt=len(prompt),
            num_cached=call.answers.num_cached,
            fills_context=body.max_tokens > free,
            only_prompt=body.only_prompt,
            omits_thinking=body.omits_thinking,
        )
        formatter = MessageFormatter(context, call.parsing)
        return GenerationResponse(
            call.answers,
            formatter,
            call.request_id,
            bool(body.stream),
            partial(anthropic_error, request_id=call.request_id),
            id_headers(call.request_id),
            formatter.keep_alive,
        )

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of prompt tokens of a message with this body."""
        parsed = await self._read("count_tokens", request)
        body: CountTokensBody = parsed.body
        frontend = self._frontend
        options = body.template_options(frontend.helpers.template_variables)
        encoding = frontend.prompts.encode_chat(parsed.messages, request.state.tenant, options)
        prompt = await while_connected(request, encoding)
        headers = id_headers(new_request_id(request.headers))
        return json_response({"input_tokens": len(prompt)}, headers=headers)

    async def _read(self, name: str, request: Request) -> ParsedBody[Any]:
        parsed = await read_request(name, request, self._frontend)
        body: CountTokensBody = parsed.body
        self._frontend.check_model(body.model)
        body.read_kept(parsed.kept)
        body.check_model(self._frontend.helpers.template_variables, self._calls.reads_reasoning)
        return parsed
