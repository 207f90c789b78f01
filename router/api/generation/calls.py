"""Encodes and submits the calls of all HTTP APIs, from their parsed bodies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs
from penstock.router.api.generation.bodies import while_connected
from penstock.router.api.generation.chat_body import AnsweredChat
from penstock.router.api.generation.parsed_body import ParsedBody
from penstock.router.api.http import header_of
from penstock.router.errors import ServingError, invalid, renamed
from penstock.router.frontend import Frontend
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.requests.answer_parsing import AnswerParsing, ModelParsers
from penstock.router.requests.cost_limits import check_least_cost
from penstock.router.requests.request import GenerationRequest, safe_request_id
from penstock.router.requests.response_stream import ResponseStream
from penstock.router.requests.slices import Slices

PARTIAL_FORMS = ("structural_tag", "tool_calls")
"""Kinds of constraints that allow free text, in which the model may call tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a call, besides its prompts and sampling parameters.

    Attributes:
        name: id of the response; also the request id, if the client has sent none.
        default_max_tokens: see `GenerationRequest`.
        priority: see `GenerationRequest`.
        cache_salt: see `GenerationRequest`.
        prompt_copies: see `GenerationRequest`.
        parsing: options for the parsing of a chat's answers, or None without a chat.
        client_names: maps the router's name of a field to the client's name for it.
        thinking_budget: the maximum number of reasoning tokens, or None for no limit.
    """

    name: str
    default_max_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    prompt_copies: int = 0
    parsing: ParsingOptions | None = None
    client_names: Mapping[str, str] = field(default_factory=dict)
    thinking_budget: int | None = None


@dataclass(frozen=True, slots=True)
class SubmittedCall:
    """A call whose requests have been submitted.

    Attributes:
        name: id of the response.
        request_id: the client's id of the request, or `name`.
        prompts: token ids of each prompt.
        sampling: sampling parameters of all requests.
        answers: the stream of the answers, which the caller must close.
        parsing: makes the parser of each answer, or None if all text is content.
        shown_tokens: special tokens that the text of the answers contains.
    """

    name: str
    request_id: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    answers: ResponseStream
    parsing: AnswerParsing | None
    shown_tokens: frozenset[int] = frozenset()


class GenerationCalls:
    """Encodes and submits the calls of clients."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._parsers = ModelParsers(frontend.tokenizer, frontend.config)

    @property
    def reads_reasoning(self) -> bool:
        """True if reasoning is separated from the model's answers."""
        return self._parsers.reads_reasoning

    @property
    def can_limit_reasoning(self) -> bool:
        """True if calls may have a thinking budget."""
        return self._parsers.can_limit_reasoning

    async def start_chat(
        self, request: Request, parsed: ParsedBody[Any], name: str
    ) -> SubmittedCall:
        """Submit a chat and return the submitted call.

        Args:
            request: the HTTP request, watched for a disconnect of its client.
            parsed: a body that implements `AnsweredChat`.
            name: id of the response.

        Raises:
            ServingError: the chat is refused.
            ClientDisconnectedError: the client has disconnected.
        """
        body: AnsweredChat = parsed.body
        self._frontend.check_model(body.model)
        prompt, sampling = await self.encode_chat(request, parsed)
        options = CallOptions(
            name=name,
            default_max_tokens=self._frontend.defaults.default_max_tokens(None),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            parsing=body.parsing_options(parsed.messages),
            client_names=body.client_names(),
            thinking_budget=body.thinking_token_budget,
        )
        return await self.submit(request, [prompt], sampling, options)

    def sampling_params(self, body: AnsweredChat | Any, num_prompts: int) -> SamplingParams:
        """Return the sampling parameters of a body; raise an error if the call costs too much."""
        frontend = self._frontend
        sampling: SamplingParams = body.sampling_params(frontend.defaults)
        try:
            check_least_cost(sampling, num_prompts, frontend.model, frontend.config.bounds)
        except ServingError as error:
            raise renamed(error, body.client_names()) from error
        return sampling

    async def encode_chat(
        self, request: Request, parsed: ParsedBody[Any]
    ) -> tuple[list[int], SamplingParams]:
        """Return a chat's token ids, and its sampling parameters with constraints on tool calls."""
        body: AnsweredChat = parsed.body
        chat, frontend = parsed.messages, self._frontend
        sampling = self.sampling_params(body, 1)
        if schema := chat.forced_schema:
            sampling = _forced(sampling, schema, body.FORM_FIELD)
        options = body.template_options(frontend.helpers.template_variables)
        encoding = frontend.prompts.encode_chat(chat, request.state.tenant, options)
        try:
            prompt = await while_connected(request, encoding)
        except ServingError as error:
            raise renamed(error, body.client_names()) from error
        if chat.tools and not schema:
            self._parsers.check_tools()
        # If the whole answer must have a given form, it cannot contain calls, so `strict` has no
        # effect.
        if chat.strict_calls and sampling.structured_outputs is None:
            parsing = body.parsing_options(chat)
            form = self._parsers.strict_form(
                prompt, chat.strict_calls, parsing.is_parallel, parsing.continues_message
            )
            sampling = replace(sampling, structured_outputs=form)
        return prompt, sampling

    async def submit(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        options: CallOptions,
    ) -> SubmittedCall:
        """Submit one request for each prompt.

        Raises:
            ServingError: the call is refused; the error has the client's names of fields.
        """
        given = header_of(request.scope, b"x-request-id") or ""
        request_id = safe_request_id(given) or options.name
        form = sampling.structured_outputs
        parsing = None if options.parsing is None else _with_form(options.parsing, form)
        shown = self._parsers.shown_tokens(parsing) if parsing is not None else frozenset()
        tenant: str = request.state.tenant
        slices = Slices()
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            requests.append(
                GenerationRequest(
                    prompt,
                    self._for_prompt(sampling, options, prompt),
                    default_max_tokens=options.default_max_tokens,
                    tenant=tenant,
                    priority=options.priority,
                    request_id=request_id,
                    cache_salt=options.cache_salt,
                    shown_tokens=shown,
                    prompt_copies=options.prompt_copies,
                )
            )
            await slices.pause()
        names = options.client_names
        if form is not None and form.kind == "tool_calls":
            names = {**names, "structured_outputs": "tools"}
        try:
            answers = await self._frontend.submit(requests)
        except ServingError as error:
            raise renamed(error, names) from error
        found: AnswerParsing | None = None
        if parsing is not None:
            found = self._parsers.parsing(prompts[0], request_id, parsing)
        return SubmittedCall(options.name, request_id, prompts, sampling, answers, found, shown)

    def _for_prompt(
        self, sampling: SamplingParams, options: CallOptions, prompt: Sequence[int]
    ) -> SamplingParams:
        """Return sampling parameters whose budget and constraint depend on the prompt's end."""
        budget, parsing = options.thinking_budget, options.parsing
        form = sampling.structured_outputs
        continues = parsing is not None and parsing.continues_message
        if budget is not None:
            limit = self._parsers.thinking_budget(budget, prompt, continues)
            sampling = replace(sampling, thinking_budget=limit)
        if form is None or form.kind == "tool_calls" or parsing is None or parsing.is_forced:
            return sampling
        form = self._parsers.answer_form(prompt, form, continues)
        return replace(sampling, structured_outputs=form)


def _with_form(options: ParsingOptions, form: StructuredOutputs | None) -> ParsingOptions:
    """Return the options for the parsing of answers that satisfy the constraint `form`."""
    if form is None or options.is_forced or form.kind in PARTIAL_FORMS:
        return options
    return replace(options, has_form=True)


def _forced(sampling: SamplingParams, schema: str, form_field: str) -> SamplingParams:
    """Return sampling parameters that force answers to be tool calls that fit `schema`.

    `form_field` is an example of the client's fields that set the form of an answer.
    """
    if sampling.structured_outputs is not None:
        raise invalid(
            "a tool_choice that forces calls cannot be combined with a field that sets the form of "
            f"the answer, such as {form_field}: leave out one of them",
            "tool_choice",
        )
    forced = StructuredOutputs("json", schema)
    try:
        forced.validate()
    except InvalidParameterError as error:
        raise invalid(
            "the JSON Schema that the server builds from 'tools' is refused: "
            f"{str(error).removeprefix('structured_outputs: ')}",
            "tools",
        ) from error
    return replace(sampling, structured_outputs=forced)
