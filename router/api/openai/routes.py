"""OpenAI's HTTP API: /v1/models, /v1/completions and /v1/chat/completions; /health, /version.

/v1/requests/ID/explain explains a request.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.common.sampling_params import SamplingParams
from penstock.router.api import explain
from penstock.router.api.anthropic.errors import error_of_path
from penstock.router.api.anthropic.routes import MessagesApi
from penstock.router.api.auth import ApiKeys
from penstock.router.api.generation.bodies import on_disconnect, read_request, while_connected
from penstock.router.api.generation.calls import CallOptions, GenerationCalls
from penstock.router.api.generation.load_report import load_headers
from penstock.router.api.generation.parsed_body import ParsedBody
from penstock.router.api.generation.response import GenerationResponse, ResponseFormatter
from penstock.router.api.http import (
    AuthMiddleware,
    DirectRoutes,
    Json,
    error_handlers,
    json_response,
)
from penstock.router.api.openai.parsed_chat import ParsedChatFormatter
from penstock.router.api.openai.response import ChatFormatter, CompletionFormatter
from penstock.router.api.openai.response_context import ResponseContext
from penstock.router.api.openai.schema import (
    BaseRequest,
    ChatCompletionRequest,
    CompletionRequest,
)
from penstock.router.api.openai.tokens import TokenApi
from penstock.router.api.responses.routes import ResponsesApi
from penstock.router.errors import invalid
from penstock.router.frontend import Frontend
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.requests.answer_parsing import AnswerParsing
from penstock.router.requests.response_stream import ClientDisconnectedError
from penstock.router.requests.slices import Slices
from penstock.router.requests.text_decoding import decoded_texts

HTTP_HANDLERS = {**error_handlers(), ClientDisconnectedError: on_disconnect}
"""Exception handlers for the routes that generate answers."""

PUBLIC_PATHS = frozenset({"/health", "/health/"})
DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions; chats default to the rest of the context."""


def openai_app(frontend: Frontend) -> Starlette:
    """Return the HTTP application for a frontend."""
    api, tokens = OpenAiApi(frontend), TokenApi(frontend)
    routes = [
        # The most frequent routes are first, because Starlette tries routes in order.
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        *MessagesApi(frontend).routes(),
        *ResponsesApi(frontend).routes(),
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
        AuthMiddleware,
        keys=ApiKeys(config.api_keys),
        host=config.host,
        public=PUBLIC_PATHS,
        respond=error_of_path,
    )
    handlers = {**HTTP_HANDLERS, **error_handlers(error_of_path)}
    direct = Middleware(DirectRoutes, routes=routes, handlers=handlers)
    return Starlette(routes=routes, middleware=[guard, direct], exception_handlers=handlers)


class OpenAiApi:
    """The handlers of the OpenAI API, /health and /version."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._calls = GenerationCalls(frontend)
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """Return 200 if requests can be served, else 503 with the reason."""
        why = self._frontend.why_not_ready()
        return json_response({"status": why or "ok"}, 503 if why else 200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def models(self, request: Request) -> Response:
        """Return the models as one object that is both OpenAI's list and a page of Anthropic's."""
        names = self._frontend.config.model_names
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [*map(self._model_info, names)], **page})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._frontend.check_model(name)
        return json_response(self._model_info(name))

    async def completions(self, request: Request) -> Response:
        parsed = await read_request("completion", request, self._frontend)
        body: CompletionRequest = parsed.body
        self._frontend.check_model(body.model)
        sampling = self._calls.sampling_params(body, len(parsed.prompts))
        encoding = self._frontend.prompts.encode_prompts(
            parsed.prompts, request.state.tenant, body.add_special_tokens is not False
        )
        prompts = await while_connected(request, encoding)
        return await self._respond(request, parsed, prompts, sampling)

    async def chat(self, request: Request) -> Response:
        parsed = await read_request("chat", request, self._frontend)
        self._frontend.check_model(parsed.body.model)
        prompt, sampling = await self._calls.encode_chat(request, parsed)
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
            # Anthropic's clients read these fields.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": model.max_model_len,
        }

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
        options = CallOptions(
            name=("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
            default_max_tokens=max_tokens,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            prompt_copies=_prompt_copies(body, sampling),
            parsing=_parsing_options(parsed),
            client_names=body.client_names(),
            thinking_budget=(
                body.thinking_token_budget if isinstance(body, ChatCompletionRequest) else None
            ),
        )
        call = await self._calls.submit(request, prompts, sampling, options)
        try:
            echo = await self._echo(parsed, prompts)
        except BaseException:
            call.answers.close()
            raise
        context = ResponseContext(
            id=call.name,
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
            prompt_logprobs=call.answers.prompt_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            num_cached=call.answers.num_cached,
            echo=echo,
            only_echo=isinstance(body, CompletionRequest) and body.only_echo,
        )
        formatter = _formatter(context, call.parsing, is_chat)
        return GenerationResponse(
            call.answers,
            formatter,
            call.request_id,
            bool(body.stream),
            late_headers=load_headers(request, frontend),
            prompts=prompts,
        )

    async def _echo(
        self, parsed: ParsedBody[Any], prompts: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[str]] | None:
        """Return the prompts' texts, in fragments, if the answers must repeat them, else None."""
        body = parsed.body
        if isinstance(body, ChatCompletionRequest):
            return [[parsed.messages.final_text]] if body.echo else None
        if not isinstance(body, CompletionRequest) or not body.echo:
            return None
        skip_special = body.skip_special_tokens is not False
        token_bytes = self._frontend.tokenizer.token_bytes
        slices = Slices()
        texts: list[list[str]] = []
        for given, tokens in zip(parsed.prompts, prompts, strict=True):
            if isinstance(given, str) and body.truncate_prompt_tokens is None:
                texts.append([given])
            else:
                texts.append(await decoded_texts(token_bytes, tokens, skip_special))
            await slices.pause()
        return texts


def _parsing_options(parsed: ParsedBody[Any]) -> ParsingOptions | None:
    body = parsed.body
    is_chat = isinstance(body, ChatCompletionRequest)
    return body.parsing_options(parsed.messages) if is_chat else None


def _formatter(
    context: ResponseContext, parsing: AnswerParsing | None, is_chat: bool
) -> ResponseFormatter:
    if not is_chat:
        return CompletionFormatter(context)
    return ChatFormatter(context) if parsing is None else ParsedChatFormatter(context, parsing)


def _check_stream(body: BaseRequest, sampling: SamplingParams) -> None:
    """Refuse to stream if the results are known only at the end."""
    if body.stream and sampling.is_ranked:
        name = "use_beam_search" if sampling.use_beam_search else "best_of"
        what = name if sampling.use_beam_search else "best_of above n"
        raise invalid(
            f"{what} cannot be streamed, because the best choices are known only at the end: leave "
            "out 'stream'",
            name,
        )
    if body.stream and body.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs are not streamed: leave out 'stream', or use 'echo' with logprobs",
            "prompt_logprobs",
        )


def _prompt_copies(body: BaseRequest, sampling: SamplingParams) -> int:
    """Return the number of copies of a prompt in the response: 0, 1, or one per choice."""
    if body.prompt_logprobs is None and not body.return_token_ids:
        return sampling.num_sequences if isinstance(body, CompletionRequest) and body.echo else 0
    return sampling.num_sequences if isinstance(body, CompletionRequest) else 1
