"""The gRPC API: `penstock.v1.Inference`, with the standard health and reflection services."""

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2

from penstock.common.sampling_params import SamplingParams
from penstock.protos import inference_pb2 as pb
from penstock.protos.serving.authorization import (
    AuthInterceptor,
    Authorize,
    CallMetadata,
    authorization_of,
)
from penstock.protos.serving.call_error import CallError
from penstock.protos.serving.call_handlers import CallHandlers, Context
from penstock.protos.serving.health import HealthService, health_handlers
from penstock.protos.serving.port_limits import PortLimits, server_options
from penstock.router.api.auth import ApiKeys, Caller
from penstock.router.api.explain import FORWARDED, Explainer
from penstock.router.api.grpc_calls import INLINE_BYTES, STATUSES, status_of
from penstock.router.api.grpc_chat import chat_sizes, check_chat, template_options, to_chat
from penstock.router.api.grpc_check import (
    GRPC_KIND,
    KINDS,
    check_generate,
    check_tokens,
    job_items,
)
from penstock.router.api.grpc_codec import (
    TOKENS_PER_SLICE,
    resume_states,
    sampling_params,
    text_reply,
    to_generation_request,
    token_ids,
)
from penstock.router.api.grpc_reflection import reflection_handlers
from penstock.router.api.grpc_replies import ReplyStream
from penstock.router.config import RouterConfig
from penstock.router.errors import ServingError, invalid
from penstock.router.frontend import Frontend
from penstock.router.requests.answer_parsing import ModelParsers
from penstock.router.requests.cost_limits import CallSizes, check_least_cost, check_sizes
from penstock.router.requests.slices import Slices
from penstock.router.requests.text_decoding import encoded_texts

SERVICE = "penstock.v1.Inference"
IS_CHECKED: ContextVar[bool] = ContextVar("is_checked", default=False)
"""Whether a helper process has checked the message of the current call, which has its own task."""


def start_grpc(frontend: Frontend) -> tuple[grpc.aio.Server, HealthService]:
    """Return a server with all services, not yet bound to a port, and its health service."""
    config = frontend.config
    keys = ApiKeys(config.api_keys)
    server = grpc.aio.server(
        interceptors=[AuthInterceptor(_authorizer(keys))],
        options=server_options(port_limits(config)),
    )
    api = InferenceApi(frontend, keys)
    calls = CallHandlers(config.bounds.receive_seconds, status_of, api.inspect)
    health_service = HealthService(config.connections.max_health_watches)
    server.add_generic_rpc_handlers(
        (
            inference_handlers(api, calls),
            health_handlers(health_service, calls),
            reflection_handlers((SERVICE, health.SERVICE_NAME), calls),
        )
    )
    return server, health_service


def port_limits(config: RouterConfig) -> PortLimits:
    """Return the limits on the clients of the gRPC port."""
    bounds = config.connections
    return PortLimits(
        max_message_bytes=config.bounds.max_body_bytes,
        max_metadata_bytes=config.bounds.max_header_bytes,
        max_connections=bounds.max_connections,
        max_connections_per_address=bounds.max_connections_per_address,
        max_calls=bounds.max_grpc_calls,
        handshake_seconds=config.bounds.receive_seconds,
        idle_seconds=bounds.grpc_idle_seconds,
        age_seconds=bounds.grpc_age_seconds,
        # The running calls of a connection that is too old get this time to finish.
        age_grace_seconds=config.timeout + 60,
    )


async def set_health(service: health.aio.HealthServicer, why_not: str) -> None:
    """Set the gRPC health status: SERVING if `why_not` is empty, otherwise NOT_SERVING."""
    status = health_pb2.HealthCheckResponse
    value = status.NOT_SERVING if why_not else status.SERVING
    for name in ("", SERVICE):
        await service.set(name, value)


def inference_handlers(api: "InferenceApi", calls: CallHandlers) -> grpc.GenericRpcHandler:
    """Return the handlers of all methods of `penstock.v1.Inference`."""
    handlers = {
        "Tokenize": calls.unary(pb.TokenizeRequest, api.tokenize),
        "Detokenize": calls.unary(pb.DetokenizeRequest, api.detokenize),
        "ListModels": calls.unary(pb.ListModelsRequest, api.list_models),
        "GetModel": calls.unary(pb.GetModelRequest, api.get_model),
        "Explain": calls.unary(pb.ExplainRequest, api.explain),
        "Generate": calls.streaming(pb.GenerateRequest, api.generate),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _authorizer(keys: ApiKeys) -> Authorize:
    """Return a function that checks the API key of a call. It allows all calls if no key is set."""

    def authorize(method: str, metadata: CallMetadata) -> None:
        try:
            keys.authenticate(authorization_of(metadata))
        except ServingError as error:
            raise CallError(STATUSES[error.code], error.message) from None

    return authorize


class InferenceApi:
    """The methods of `penstock.v1.Inference`."""

    def __init__(self, frontend: Frontend, keys: ApiKeys) -> None:
        self._frontend = frontend
        self._keys = keys
        self._explainer = Explainer(frontend)
        self._parsers = ModelParsers(frontend.tokenizer, frontend.config)
        self._created = int(time.time())

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream replies to the client as tokens are generated."""
        self._frontend.check_model(request.model)
        tenant = self._tenant(context)
        if not IS_CHECKED.get():
            check_generate(request, self._frontend.config.bounds, self._frontend.model)
        sampling = await self._sampling(request)
        if words := request.sampling.bad_words:
            encoded = await self._frontend.prompts.encode_bad_words(words, tenant)
            sampling = replace(sampling, bad_words_token_ids=tuple(map(tuple, encoded)))
        prompt = await self._prompt(request, tenant)
        if request.sampling.HasField("thinking_token_budget"):
            budget = request.sampling.thinking_token_budget
            limited = self._parsers.thinking_budget(budget, prompt)
            sampling = replace(sampling, thinking_budget=limited)
        default = self._frontend.defaults.default_max_tokens()
        resumed = await resume_states(request.resume_from)
        generation_request = to_generation_request(
            request, prompt, sampling, default, context.time_remaining(), tenant, resumed
        )
        answers = await self._frontend.submit([generation_request])
        try:
            echo = request.echo_prompt_tokens
            seconds = self._frontend.config.connections.write_seconds
            await ReplyStream(answers, generation_request, echo, context, seconds).send()
        finally:
            answers.close()
            trailer = self._explainer.trailer(answers.numbers[0], generation_request.request_id)
            context.set_trailing_metadata(trailer)
            await answers.release_prompt_logprobs()

    async def explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainReply:
        """Explain a request of the caller; an operator sees the requests of all tenants."""
        caller = self._caller(context)
        metadata = context.invocation_metadata()
        return await self._explainer.explain(
            request.request_id,
            None if caller.role == "operator" else caller.tenant,
            authorization_of(metadata),
            any(name == FORWARDED for name, _ in metadata or ()),
        )

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> bytes:
        """Return a serialized `TokenizeReply`."""
        self._frontend.check_model(request.model)
        tenant = self._tenant(context)
        match request.WhichOneof("input"):
            case "text":
                special = request.add_special_tokens
                add = special if request.HasField("add_special_tokens") else True
                tokens = await self._frontend.prompts.encode(request.text, tenant, add, "text")
            case "chat":
                tokens = await self._encode_chat(request.chat, tenant)
            case _:
                raise invalid("the input is empty: set 'text' or 'chat'", "input")
        return await _tokenize_reply(tokens, self._frontend.model.max_model_len)

    async def detokenize(self, request: pb.DetokenizeRequest, context: Context) -> bytes:
        """Return a serialized `DetokenizeReply`."""
        self._frontend.check_model(request.model)
        bounds = self._frontend.config.bounds
        if not IS_CHECKED.get():
            check_tokens(request, bounds, self._frontend.model)
        skip = not request.keep_special_tokens
        texts = self._frontend.tokenizer.token_bytes.texts(request.tokens, skip)
        return text_reply(await encoded_texts(texts, bounds.max_body_bytes))

    async def list_models(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsReply:
        return pb.ListModelsReply(models=map(self._model_info, self._frontend.config.model_names))

    async def get_model(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        self._frontend.check_model(request.name)
        return self._model_info(request.name or self._frontend.model.name)

    def _model_info(self, name: str) -> pb.Model:
        model = self._frontend.model
        return pb.Model(
            name=name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            has_chat_template=self._frontend.tokenizer.chat_template is not None,
            created_seconds=self._created,
        )

    async def _prompt(self, request: pb.GenerateRequest, tenant: str) -> Sequence[int]:
        match request.WhichOneof("prompt"):
            case "text" if request.text:
                return await self._frontend.prompts.encode(request.text, tenant)
            case "tokens":
                return await token_ids(request.tokens.ids)
            case "chat":
                return await self._encode_chat(request.chat, tenant)
        raise invalid("the prompt is empty: set 'text', 'tokens' or 'chat'", "prompt")

    async def _encode_chat(self, chat: pb.Chat, tenant: str) -> list[int]:
        if not IS_CHECKED.get():
            bounds = self._frontend.config.bounds
            check_sizes(CallSizes(**chat_sizes(chat)), bounds)
            check_chat(chat, bounds)
        options = template_options(chat)
        return await self._frontend.prompts.encode_chat(await to_chat(chat), tenant, options)

    async def inspect(self, kind: type[Message], data: bytes, context: Context) -> bytes:
        """Check a message of more than `INLINE_BYTES` in a helper process, before it is parsed.

        Returns:
            The serialized message; a checked message has no unknown fields.

        Raises:
            ServingError: INVALID if the message is malformed, has a list that is too long, or has
                more than `INLINE_BYTES` although its type does not allow that.
        """
        if len(data) <= INLINE_BYTES:
            return data
        name = kind.DESCRIPTOR.full_name
        if name not in KINDS:
            raise invalid(
                f"the message {name} has {len(data)} bytes; at most {INLINE_BYTES} are allowed"
            )
        job = job_items(kind, data, self._frontend.model)
        tenant = self._tenant(context)
        (checked,) = await self._frontend.helpers.run(GRPC_KIND, job, tenant, "the message")
        IS_CHECKED.set(True)
        return checked

    def _tenant(self, context: Context) -> str:
        return self._caller(context).tenant

    def _caller(self, context: Context) -> Caller:
        return self._keys.authenticate(authorization_of(context.invocation_metadata()))

    async def _sampling(self, request: pb.GenerateRequest) -> SamplingParams:
        """Return the sampling parameters of a checked request, without its bad words.

        Raises:
            ServingError: the request is too expensive, or a parameter is invalid.
        """
        slices = Slices()
        sampling = await sampling_params(request, self._frontend.defaults)
        await slices.pause()  # checking 128,000 allowed tokens takes 2 ms
        check_least_cost(sampling, 1, self._frontend.model, self._frontend.config.bounds)
        await slices.pause()
        return sampling


async def _tokenize_reply(tokens: list[int], max_model_len: int) -> bytes:
    """Return a serialized `TokenizeReply` of `tokens`; `tokens` is emptied.

    The tokens are serialized and freed slice by slice, as several messages. The concatenation of
    serialized messages is a serialized message with all of their tokens.
    """
    serialized = [pb.TokenizeReply(max_model_len=max_model_len).SerializeToString()]
    slices = Slices()
    for start in reversed(range(0, len(tokens), TOKENS_PER_SLICE)):
        serialized.append(pb.TokenizeReply(tokens=tokens[start:]).SerializeToString())
        del tokens[start:]
        await slices.pause()
    return b"".join(reversed(serialized))
