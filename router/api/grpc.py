"""The gRPC API: `penstock.v1.Inference`, with the standard health and reflection services."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.protos import inference_pb2 as pb
from penstock.router.api.auth import ApiKeys
from penstock.router.api.grpc_codec import (
    chat_messages,
    prompt_replies,
    to_generation_request,
    to_reply,
)
from penstock.router.errors import Code, ServingError, invalid
from penstock.router.frontend import Frontend
from penstock.router.requests.request import (
    GenerationRequest,
    check_vocabulary,
)
from penstock.router.requests.response_stream import ClientDisconnectedError, ResponseStream

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext

SERVICE = "penstock.v1.Inference"
HEALTH_PATH = f"/{health.SERVICE_NAME}/"

STATUSES: Mapping[Code, grpc.StatusCode] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Code.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def start_grpc(frontend: Frontend) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """Return a server with all services, not yet bound to a port, and its health service."""
    config = frontend.config
    keys = ApiKeys(config.api_keys)
    server = grpc.aio.server(
        interceptors=[AuthInterceptor(keys)],
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", config.bounds.max_body_bytes),
            ("grpc.max_metadata_size", config.bounds.max_header_bytes),
        ],
    )
    server.add_generic_rpc_handlers((inference_handlers(InferenceApi(frontend, keys)),))
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return server, health_service


async def set_health(service: health.aio.HealthServicer, why_not: str) -> None:
    """Set the health status: NOT_SERVING if there is a reason `why_not`, else SERVING."""
    status = health_pb2.HealthCheckResponse
    value = status.NOT_SERVING if why_not else status.SERVING
    for name in ("", SERVICE):
        await service.set(name, value)


def inference_handlers(api: "InferenceApi") -> grpc.GenericRpcHandler:
    """Return the handlers of all methods; a malformed message gets INVALID_ARGUMENT."""
    kinds: Mapping[str, tuple[type[Message], Callable[[Any, Context], Awaitable[Message]]]] = {
        "Tokenize": (pb.TokenizeRequest, api.tokenize),
        "Detokenize": (pb.DetokenizeRequest, api.detokenize),
        "ListModels": (pb.ListModelsRequest, api.list_models),
        "GetModel": (pb.GetModelRequest, api.get_model),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(_unary(method), _reader(kind), _write)
        for name, (kind, method) in kinds.items()
    }
    handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
        _streaming(api.generate), _reader(pb.GenerateRequest), _write
    )
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _write(message: Message) -> bytes:
    return message.SerializeToString()


def _reader(kind: type[Message]) -> Callable[[bytes], Message | ServingError]:
    def read(data: bytes) -> Message | ServingError:
        try:
            return kind.FromString(data)
        except DecodeError:
            return invalid(f"the message is not a valid {kind.DESCRIPTOR.full_name}")

    return read


async def _abort(context: Context, error: ServingError) -> NoReturn:
    metadata = []
    if error.retry_after is not None:
        metadata.append(("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))))
        metadata.append(("retry-after", str(max(1, round(error.retry_after)))))
    await context.abort(STATUSES[error.code], error.message, tuple(metadata))
    raise AssertionError("abort always raises")


async def _abort_with(context: Context, error: Exception) -> NoReturn:
    """End the call with the status that corresponds to an exception."""
    if not isinstance(error, ServingError):
        log.error("gRPC call failed", exc_info=error)
        error = ServingError(Code.INTERNAL, "internal error: see the server's log")
    await _abort(context, error)


def _unary(
    method: Callable[[Any, Context], Awaitable[Message]],
) -> Callable[[Message | ServingError, Context], Awaitable[Message]]:
    async def answer(request: Message | ServingError, context: Context) -> Message:
        try:
            if isinstance(request, ServingError):
                raise request
            return await method(request, context)
        except Exception as error:
            await _abort_with(context, error)

    return answer


def _streaming(
    method: Callable[[pb.GenerateRequest, Context], Awaitable[None]],
) -> Callable[[pb.GenerateRequest | ServingError, Context], Awaitable[None]]:
    async def stream(request: pb.GenerateRequest | ServingError, context: Context) -> None:
        try:
            if isinstance(request, ServingError):
                raise request
            await method(request, context)
        except ClientDisconnectedError:
            return
        except Exception as error:
            await _abort_with(context, error)

    return stream


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Authentication by API key, if keys are configured; health checks need no key."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if not handler_call_details.method.startswith(HEALTH_PATH):
            try:
                self._keys.tenant(_authorization(handler_call_details.invocation_metadata))
            except ServingError as error:
                return _denial(error)
        return await continuation(handler_call_details)


def _authorization(metadata: Sequence[tuple[str, str | bytes]] | None) -> str | None:
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def _denial(error: ServingError) -> grpc.RpcMethodHandler:
    async def deny(requests: AsyncIterator[bytes], context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(deny)


class InferenceApi:
    """The methods of `penstock.v1.Inference`."""

    def __init__(self, frontend: Frontend, keys: ApiKeys) -> None:
        self._frontend = frontend
        self._keys = keys
        self._created = int(time.time())

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream replies to the client as tokens are generated."""
        self._frontend.check_model(request.model)
        tenant = self._keys.tenant(_authorization(context.invocation_metadata()))
        bad_words = await self._frontend.encode_bad_words(request.sampling.bad_words)
        prompt = await self._prompt(request)
        generation_request = to_generation_request(
            request, prompt, bad_words, context.time_remaining(), tenant
        )
        answers = self._frontend.submit([generation_request])
        try:
            await self._send(request, generation_request, answers, context)
        finally:
            answers.close()

    async def _send(
        self,
        request: pb.GenerateRequest,
        generation: GenerationRequest,
        stream: ResponseStream,
        context: Context,
    ) -> None:
        num_tokens = sum(len(known.tokens) for known in generation.resume_from.values())
        num_open, begun = generation.sampling.n, False
        (seed,) = stream.seeds
        echo: Sequence[int] = generation.prompt if request.echo_prompt_tokens else ()
        async for delta in stream:
            if delta.tokens and not begun:
                begun = True
                for scored in prompt_replies(stream.prompt_logprobs.get(0, ())):
                    scored.request_id = generation.request_id
                    await context.write(scored)
            num_tokens += len(delta.tokens)
            reply = to_reply(delta)
            reply.request_id = generation.request_id
            reply.seed = seed
            if echo:
                reply.prompt_tokens.extend(echo)
                echo = ()
            num_open -= bool(delta.finish)
            if not num_open:
                reply.usage.prompt_tokens = len(generation.prompt)
                reply.usage.completion_tokens = num_tokens
            await context.write(reply)

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        self._frontend.check_model(request.model)
        text = self._frontend.tokenizer
        match request.WhichOneof("input"):
            case "text":
                special = request.add_special_tokens
                add = special if request.HasField("add_special_tokens") else True
                tokens = await text.encode(request.text, add)
            case "chat":
                tokens = await self._frontend.encode_chat(chat_messages(request.chat))
            case _:
                raise invalid("the input is empty: set text or chat", "input")
        return pb.TokenizeReply(tokens=tokens, max_model_len=self._frontend.model.max_model_len)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeReply:
        self._frontend.check_model(request.model)
        check_vocabulary(request.tokens, self._frontend.model, "tokens")
        skip = not request.keep_special_tokens
        text = self._frontend.tokenizer.token_bytes.decode(request.tokens, skip)
        return pb.DetokenizeReply(text=text)

    async def list_models(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsReply:
        return pb.ListModelsReply(models=[self._model_info()])

    async def get_model(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        self._frontend.check_model(request.name)
        return self._model_info()

    def _model_info(self) -> pb.Model:
        model = self._frontend.model
        return pb.Model(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            has_chat_template=self._frontend.tokenizer.chat_template is not None,
            created_seconds=self._created,
        )

    async def _prompt(self, request: pb.GenerateRequest) -> Sequence[int]:
        text = self._frontend.tokenizer
        match request.WhichOneof("prompt"):
            case "text" if request.text:
                return await text.encode(request.text)
            case "tokens":
                return list(request.tokens.ids)
            case "chat":
                return await self._frontend.encode_chat(chat_messages(request.chat))
        raise invalid("the prompt is empty: set text, tokens or chat", "prompt")
