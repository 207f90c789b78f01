"""OpenAI's HTTP API: /v1/models, /v1/completions and /v1/chat/completions; /health, /version.

/v1/requests/ID/explain explains a request.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import penstock
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs
from penstock.router.api import explain
from penstock.router.api.auth import ApiKeys
from penstock.router.api.connection import BODY_WRITER, BodyWriter
from penstock.router.api.http import (
    ERROR_HANDLERS,
    AuthMiddleware,
    Json,
    cancel_on_disconnect,
    error_body,
    error_response,
    json_response,
)
from penstock.router.api.openai.bodies import on_disconnect, read_request, while_connected
from penstock.router.api.openai.json_fragments import dumps
from penstock.router.api.openai.parsed_body import ParsedBody
from penstock.router.api.openai.parsed_chat import ParsedChatFormatter
from penstock.router.api.openai.response import (
    DONE,
    Answers,
    ChatFormatter,
    CompletionFormatter,
    ResponseFormatter,
)
from penstock.router.api.openai.response_context import ResponseContext
from penstock.router.api.openai.schema import (
    BaseRequest,
    ChatCompletionRequest,
    CompletionRequest,
)
from penstock.router.api.openai.sending import send_event, send_json
from penstock.router.api.openai.tokens import TokenApi
from penstock.router.errors import ServingError, invalid, renamed
from penstock.router.frontend import Frontend
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.requests.answer_parsing import ModelParsers
from penstock.router.requests.cost import check_least_cost
from penstock.router.requests.request import GenerationRequest, safe_request_id
from penstock.router.requests.response_stream import ClientDisconnectedError, Delta, ResponseStream
from penstock.router.requests.slices import Slices
from penstock.router.requests.text_decoding import decode

HTTP_HANDLERS = {**ERROR_HANDLERS, ClientDisconnectedError: on_disconnect}
"""Handlers of the exceptions of routes that generate."""

PUBLIC_PATHS = frozenset({"/health", "/health/"})
DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions; chats default to the rest of the context."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def openai_app(frontend: Frontend) -> Starlette:
    """Return the HTTP application for a frontend."""
    api, tokens = OpenAiApi(frontend), TokenApi(frontend)
    routes = [
        # Starlette tries the routes in this order: the most frequent ones are first.
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/health", api.health),
        Route("/health/", api.health),
        Route("/version", api.version),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", api.models),
        Route(explain.PATH, explain.Explainer(frontend).http),
        Route("/v1/models/{name:path}", api.model),
    ]
    config = frontend.config
    guard = Middleware(
        AuthMiddleware, keys=ApiKeys(config.api_keys), host=config.host, public=PUBLIC_PATHS
    )
    return Starlette(routes=routes, middleware=[guard], exception_handlers=HTTP_HANDLERS)


class OpenAiApi:
    """The handlers of the OpenAI API, /health and /version."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._parsers = ModelParsers(frontend.tokenizer, frontend.config)
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """Return 200 if requests can be served, else 503 with the reason."""
        why = self._frontend.why_not_ready()
        return json_response({"status": why or "ok"}, 503 if why else 200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def models(self, request: Request) -> Response:
        return json_response(
            {"object": "list", "data": [*map(self._model_info, self._frontend.config.model_names)]}
        )

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._frontend.check_model(name)
        return json_response(self._model_info(name))

    async def completions(self, request: Request) -> Response:
        parsed = await read_request("completion", request, self._frontend)
        body: CompletionRequest = parsed.body
        self._frontend.check_model(body.model)
        sampling = self._sampling_params(body, len(parsed.prompts))
        encoding = self._frontend.prompts.encode_prompts(
            parsed.prompts,
            request.state.tenant,
            body.add_special_tokens is not False,
            is_truncated=body.truncate_prompt_tokens is not None,
        )
        prompts = await while_connected(request, encoding)
        return await self._respond(request, parsed, prompts, sampling)

    async def chat(self, request: Request) -> Response:
        parsed = await read_request("chat", request, self._frontend)
        body: ChatCompletionRequest = parsed.body
        self._frontend.check_model(body.model)
        sampling = self._sampling_params(body, 1)
        if schema := parsed.messages.forced_schema:
            sampling = _forced(sampling, schema)
        options = body.template_options(self._frontend.helpers.template_variables)
        encoding = self._frontend.prompts.encode_chat(
            parsed.messages, request.state.tenant, options
        )
        prompt = await while_connected(request, encoding)
        if parsed.messages.tools and not schema:
            self._parsers.check_tools()
        return await self._respond(request, parsed, [prompt], sampling)

    def _model_info(self, name: str) -> Json:
        model = self._frontend.model
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "penstock",
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    def _sampling_params(self, body: BaseRequest, num_prompts: int) -> SamplingParams:
        """Return the sampling parameters without bad words; refuse a call that costs too much."""
        frontend = self._frontend
        sampling = body.sampling_params(frontend.defaults)
        try:
            check_least_cost(sampling, num_prompts, frontend.model, frontend.config.bounds)
        except ServingError as error:
            raise renamed(error, body.client_names()) from error
        return sampling

    async def _respond(
        self,
        request: Request,
        parsed: ParsedBody[Any],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
    ) -> Response:
        frontend, tenant = self._frontend, request.state.tenant
        body: BaseRequest = parsed.body
        if body.bad_words:
            words = await frontend.prompts.encode_bad_words(body.bad_words, tenant)
            sampling = replace(sampling, bad_words_token_ids=tuple(map(tuple, words)))
        is_chat = isinstance(body, ChatCompletionRequest)
        own = None if is_chat else DEFAULT_COMPLETION_TOKENS
        max_tokens = frontend.defaults.default_max_tokens(own)
        max_model_len = frontend.model.max_model_len
        prompts = [body.truncated(prompt, max_model_len, max_tokens) for prompt in prompts]
        _check_stream(body, sampling)
        name = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)
        trace = safe_request_id(request.headers.get("x-request-id", "")) or name
        options: ParsingOptions | None = None
        if isinstance(body, ChatCompletionRequest):
            options = body.parsing_options(parsed.messages)
        shown = self._parsers.shown_tokens(options) if options is not None else frozenset()
        requests = [
            GenerationRequest(
                prompt,
                sampling,
                default_max_tokens=max_tokens,
                tenant=tenant,
                priority=body.priority or 0,
                request_id=trace,
                cache_salt=body.cache_salt or "",
                shown_tokens=shown,
                prompt_copies=_prompt_copies(body, sampling),
            )
            for prompt in prompts
        ]
        try:
            answers = await frontend.submit(requests)
        except ServingError as error:
            raise renamed(error, body.client_names()) from error
        try:
            echo = await self._echo(parsed, prompts)
        except BaseException:
            answers.close()
            raise
        call = ResponseContext(
            id=name,
            created=int(time.time()),
            model=self._frontend.model.name,
            prompts=prompts,
            token_bytes=self._frontend.tokenizer.token_bytes,
            system_fingerprint=frontend.system_fingerprint,
            num_choices=sampling.n,
            num_logprobs=body.num_logprobs(),
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            wants_usage=body.wants_usage,
            wants_continuous_usage=body.wants_continuous_usage,
            prompt_logprobs=answers.prompt_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            num_cached=answers.num_cached,
            echo=echo,
            only_echo=isinstance(body, CompletionRequest) and body.only_echo,
        )
        formatter = self._formatter(call, options, trace)
        return GenerationResponse(answers, formatter, trace, bool(body.stream))

    def _formatter(
        self, call: ResponseContext, options: ParsingOptions | None, request_id: str
    ) -> ResponseFormatter:
        """Return the formatter of a call; `options` are None for completions."""
        if options is None:
            return CompletionFormatter(call)
        parsing = self._parsers.parsing(call.prompts[0], request_id, options)
        return ChatFormatter(call) if parsing is None else ParsedChatFormatter(call, parsing)

    async def _echo(
        self, parsed: ParsedBody[Any], prompts: Sequence[Sequence[int]]
    ) -> Sequence[str] | None:
        """Return the prompts' texts if the answers must repeat the prompts, else None."""
        body = parsed.body
        if isinstance(body, ChatCompletionRequest):
            return [parsed.messages.final_text] if body.echo else None
        if not isinstance(body, CompletionRequest) or not body.echo:
            return None
        skip_special = body.skip_special_tokens is not False
        token_bytes = self._frontend.tokenizer.token_bytes
        slices = Slices()
        texts: list[str] = []
        for given, tokens in zip(parsed.prompts, prompts, strict=True):
            if isinstance(given, str) and body.truncate_prompt_tokens is None:
                texts.append(given)
            else:
                texts.append(await decode(token_bytes, tokens, skip_special))
            await slices.pause()
        return texts


def _forced(sampling: SamplingParams, schema: str) -> SamplingParams:
    """Return sampling parameters whose answers are tool calls that fit `schema`."""
    if sampling.structured_outputs is not None:
        raise invalid(
            "a tool_choice that forces calls cannot be combined with a form of the answer: leave "
            "out one of them",
            "tool_choice",
        )
    forced = StructuredOutputs("json", schema)
    try:
        forced.validate()
    except InvalidParameterError as error:
        raise invalid(f"the schema of the tool calls is not valid: {error}", "tools") from error
    return replace(sampling, structured_outputs=forced)


def _check_stream(body: BaseRequest, sampling: SamplingParams) -> None:
    """Refuse to stream results that are known only at the end."""
    if body.stream and sampling.is_ranked:
        name = "use_beam_search" if sampling.use_beam_search else "best_of"
        what = name if sampling.use_beam_search else "best_of above n"
        raise invalid(f"{what} cannot be streamed: the best choices are known at the end", name)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs are not streamed: leave out stream, or use echo with logprobs",
            "prompt_logprobs",
        )


def _prompt_copies(body: BaseRequest, sampling: SamplingParams) -> int:
    """Return how often the answer to a prompt contains the prompt: once in each choice, or once."""
    if body.prompt_logprobs is None and not body.return_token_ids:
        return sampling.num_sequences if isinstance(body, CompletionRequest) and body.echo else 0
    return sampling.num_sequences if isinstance(body, CompletionRequest) else 1


class GenerationResponse(Response):
    """A streamed or complete response; its requests are canceled if the client disconnects."""

    def __init__(
        self, deltas: ResponseStream, formatter: ResponseFormatter, request_id: str, stream: bool
    ) -> None:
        self._deltas = deltas
        self._formatter = formatter
        self._own_headers = {"x-request-id": request_id}
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive, self._deltas):
            try:
                # Wait for the first tokens before sending a status: an earlier error gets its own.
                first = await anext(self._deltas)
                if self._stream:
                    await self._send_stream(
                        first, send, scope.get("extensions", {}).get(BODY_WRITER)
                    )
                    return
                answers = await self._read_answers(first)
            except ServingError as error:
                response = error_response(error)
                response.headers.update(self._own_headers)
            except ClientDisconnectedError:
                return
            else:
                whole = self._formatter.full_response(answers)
                await send_json(send, whole, self._own_headers, lambda: not self._deltas.has_failed)
                return
        await response(scope, receive, send)

    async def _read_answers(self, first: Delta) -> Sequence[Delta]:
        answers = Answers()
        answers.add(first)
        slices = Slices()
        async for delta in self._deltas:
            answers.add(delta)
            await slices.pause()
        return answers.merged()

    async def _send_stream(self, first: Delta, send: Send, body: BodyWriter | None) -> None:
        own = [(name.encode(), value.encode()) for name, value in self._own_headers.items()]
        headers = [*STREAM_HEADERS, *own]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        slices = Slices()
        await send_event(send, self._formatter.chunk(first), slices)
        if body is not None:
            self._deltas.writer = partial(self._write_token, body)
        try:
            async for delta in self._deltas:
                await send_event(send, self._formatter.chunk(delta), slices)
            last = self._formatter.end_of_stream()
        except ServingError as error:
            last = f"data: {dumps(error_body(error))}\n\n{DONE}"
        await send_event(send, [last], slices, is_last=True)

    def _write_token(
        self, body: BodyWriter, index: int, choice: int, position: int, token: int, text: str
    ) -> bool:
        """Send a token at once (a `TokenWriter`)."""
        try:
            chunk = None if body.is_paused else self._formatter.token_chunk(index, choice, text)
            if chunk is None:
                return False
            if chunk:  # an empty chunk would end the body
                body.write(chunk)
        except Exception as error:  # an error here must end this call, not the worker's stream
            self._deltas.fail(error)
        return True
