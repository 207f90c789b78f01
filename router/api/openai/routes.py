"""OpenAI's HTTP API: /v1/models, /v1/completions, /v1/chat/completions; /health and /version."""

import secrets
import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import penstock
from penstock.common.sampling_params import SamplingParams
from penstock.router.api.admin import AdminApi
from penstock.router.api.auth import ApiKeys
from penstock.router.api.http import (
    AuthMiddleware,
    Json,
    cancel_on_disconnect,
    error_body,
    error_response,
    json_response,
    on_error,
    read_body,
)
from penstock.router.api.openai.response import (
    DONE,
    ChatFormatter,
    CompletionFormatter,
    ResponseContext,
    ResponseFormatter,
    dumps,
    merge_choices,
)
from penstock.router.api.openai.schema import (
    BaseRequest,
    ChatCompletionRequest,
    CompletionRequest,
    Prompt,
    parse,
)
from penstock.router.errors import ServingError, invalid
from penstock.router.frontend import Frontend
from penstock.router.requests.request import GenerationRequest, safe_request_id
from penstock.router.requests.response_stream import ClientDisconnectedError, Delta, ResponseStream

PUBLIC_PATHS = frozenset({"/health"})
DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions; chats default to the rest of the context."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def openai_app(frontend: Frontend) -> Starlette:
    """Return the HTTP application for a frontend."""
    api, operations = OpenAiApi(frontend), AdminApi(frontend)
    routes = [
        Route("/health", api.health),
        Route("/version", api.version),
        Route("/metrics", operations.metrics),
        Route("/status", operations.status),
        Route("/role", operations.role, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
    ]
    config = frontend.config
    guard = Middleware(
        AuthMiddleware, keys=ApiKeys(config.api_keys), host=config.host, public=PUBLIC_PATHS
    )
    handlers = {ServingError: on_error, HTTPException: on_error, Exception: on_error}
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


class OpenAiApi:
    """The handlers of the OpenAI API, /health and /version."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """Return 200 if requests can be served, else 503 with the reason."""
        why = self._frontend.why_not_ready()
        return json_response({"status": why or "ok"}, 503 if why else 200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_info()]})

    async def model(self, request: Request) -> Response:
        self._frontend.check_model(request.path_params["name"])
        return json_response(self._model_info())

    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, await read_body(request, self._frontend.config.bounds))
        self._frontend.check_model(body.model)
        prompts = [await self._tokens(body, prompt) for prompt in body.prompts()]
        return await self._respond(request, body, prompts)

    async def chat(self, request: Request) -> Response:
        body = parse(ChatCompletionRequest, await read_body(request, self._frontend.config.bounds))
        self._frontend.check_model(body.model)
        prompt = await self._frontend.encode_chat(body.conversation())
        return await self._respond(request, body, [prompt])

    def _model_info(self) -> Json:
        model = self._frontend.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "penstock",
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    async def _tokens(self, body: CompletionRequest, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._frontend.tokenizer.encode(prompt, body.add_special_tokens is not False)

    async def _respond(
        self, request: Request, body: BaseRequest, prompts: Sequence[Sequence[int]]
    ) -> Response:
        sampling = body.sampling_params(await self._frontend.encode_bad_words(body.bad_words or ()))
        if body.stream and sampling.is_ranked:
            name = "use_beam_search" if sampling.use_beam_search else "best_of"
            what = name if sampling.use_beam_search else "best_of above n"
            raise invalid(f"{what} cannot be streamed: the best choices are known at the end", name)
        is_chat = isinstance(body, ChatCompletionRequest)
        if body.stream and body.prompt_logprobs is not None:
            raise invalid(
                "prompt_logprobs are not streamed: leave out stream, or use echo with logprobs",
                "prompt_logprobs",
            )
        name = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)
        trace = safe_request_id(request.headers.get("x-request-id", "")) or name
        tenant = request.state.tenant
        requests = [
            _generation_request(body, prompt, sampling, tenant, trace) for prompt in prompts
        ]
        answers = self._frontend.submit(requests)
        call = ResponseContext(
            id=name,
            created=int(time.time()),
            model=self._frontend.model.name,
            prompts=prompts,
            token_bytes=self._frontend.tokenizer.token_bytes,
            num_choices=sampling.n,
            num_logprobs=body.num_logprobs(),
            return_token_ids=bool(body.return_token_ids),
            wants_usage=body.wants_usage,
            prompt_logprobs=answers.prompt_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            echo=self._echo(body, prompts),
            only_echo=isinstance(body, CompletionRequest) and body.only_echo,
        )
        formatter: ResponseFormatter = ChatFormatter(call) if is_chat else CompletionFormatter(call)
        return GenerationResponse(answers, formatter, trace, bool(body.stream))

    def _echo(self, body: BaseRequest, prompts: Sequence[Sequence[int]]) -> Sequence[str] | None:
        """Return the prompts' texts if the answers must repeat the prompts, else None."""
        if not isinstance(body, CompletionRequest) or not body.echo:
            return None
        skip_special = body.skip_special_tokens is not False
        decode = self._frontend.tokenizer.token_bytes.decode
        return [
            given if isinstance(given, str) else decode(tokens, skip_special)
            for given, tokens in zip(body.prompts(), prompts, strict=True)
        ]


def _generation_request(
    body: BaseRequest, prompt: Sequence[int], sampling: SamplingParams, tenant: str, request_id: str
) -> GenerationRequest:
    return GenerationRequest(
        prompt,
        sampling,
        default_max_tokens=None
        if isinstance(body, ChatCompletionRequest)
        else DEFAULT_COMPLETION_TOKENS,
        tenant=tenant,
        request_id=request_id,
    )


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
                    await self._send_stream(first, send)
                    return
                deltas = [first, *[delta async for delta in self._deltas]]
                whole = self._formatter.full_response(merge_choices(deltas))
                response = json_response(whole, headers=self._own_headers)
            except ServingError as error:
                response = error_response(error)
                response.headers.update(self._own_headers)
            except ClientDisconnectedError:
                return
        await response(scope, receive, send)

    async def _send_stream(self, first: Delta, send: Send) -> None:
        own = [(name.encode(), value.encode()) for name, value in self._own_headers.items()]
        headers = [*STREAM_HEADERS, *own]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_event(send, self._formatter.chunk(first))
        try:
            async for delta in self._deltas:
                await _send_event(send, self._formatter.chunk(delta))
            last = self._formatter.end_of_stream()
        except ServingError as error:
            last = f"data: {dumps(error_body(error))}\n\n{DONE}"
        await _send_event(send, last, is_last=True)


async def _send_event(send: Send, text: str, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})
