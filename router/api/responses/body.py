"""The request body of /v1/responses as a pydantic model."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from penstock.common.number_text import number_text
from penstock.common.sampling_params import SamplingParams
from penstock.common.text.chat_source import TemplateOptions
from penstock.router.api.generation.chat_body import ChatBody
from penstock.router.api.generation.strict_model import FreeObjects, StrictModel, Texts, length_of
from penstock.router.api.openai.schema import ReasoningEffort
from penstock.router.api.responses.items import InputItem, messages_of, stored_items, text_item
from penstock.router.api.responses.kept import KeptContent
from penstock.router.api.responses.permitted import (
    LOGPROBS,
    PERMITTED_VALUES,
    REASONING_VALUES,
    STREAM_VALUES,
    check_extra,
    check_include,
    check_metadata,
    check_service_tier,
)
from penstock.router.api.responses.text_format import PLAIN, TextConfig
from penstock.router.api.responses.tools import ChosenTools, chat_tools, shown_tools
from penstock.router.config import RequestBounds
from penstock.router.errors import invalid
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.parsers.tools.tool_parameters import ToolParameters
from penstock.router.requests.chat import Chat, check_variables
from penstock.router.requests.cost_limits import CallSizes
from penstock.router.requests.forced_calls import forced_schema
from penstock.router.requests.generation_defaults import GenerationDefaults
from penstock.router.requests.request import ModelLimits
from penstock.router.requests.structured_check import check_form
from penstock.router.requests.tools import check_json

Input: TypeAlias = str | Annotated[list[InputItem], Field(fail_fast=True)]

SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that are sampling parameters of the same name."""

EFFORT = "reasoning_effort"
"""The variable of chat templates for `reasoning.effort`."""


class Reasoning(StrictModel):
    """The field `reasoning`."""

    effort: ReasoningEffort | None = None


class StreamOptions(StrictModel):
    """The field `stream_options`; its members may only have the values in `STREAM_VALUES`."""


class ResponsesRequest(ChatBody):
    """Body of /v1/responses. Unknown fields are refused."""

    CONTENT: ClassVar[Mapping[str, Any]] = {"input": [], "instructions": None, "tools": None}
    FIELD_NAMES: ClassVar[Mapping[str, str]] = {"messages": "input"}
    FORM_FIELD = "text.format"

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    include: Texts | None = None
    max_output_tokens: int | None = None
    # Limits OpenAI's built-in tools, which Penstock does not have.
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: FreeObjects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    # Penstock's extensions, named as in chat completions.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    # ------------------------------------------------------------ checks

    @classmethod
    def sizes(cls, body: Mapping[str, Any]) -> CallSizes:
        items = body.get("input")
        pieces = calls = 0
        for item in items if isinstance(items, list) else ():
            members = vars(item) if isinstance(item, InputItem) else item
            if not isinstance(members, dict):
                continue
            for name in ("content", "output", "summary"):
                content = members.get(name)
                if isinstance(content, list):
                    pieces += len(content)
            calls += members.get("type") == "function_call"
        return CallSizes(
            messages=length_of(items),
            content_pieces=pieces,
            tool_calls=calls,
            tools=length_of(body.get("tools")),
        )

    def check_extra(self) -> None:
        check_extra(self.model_extra or {}, PERMITTED_VALUES)

    def check(self) -> None:
        options = (self.stream_options, STREAM_VALUES, "stream_options")
        for given, permitted, name in (options, (self.reasoning, REASONING_VALUES, "reasoning")):
            if given is not None:
                check_extra(given.model_extra or {}, permitted, name)
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options needs 'stream' to be true: set 'stream' to true, or leave "
                "out stream_options",
                "stream_options",
            )
        if self.text is not None:
            self.text.check()
        check_include(self.include or ())
        check_metadata(self.metadata or {})
        check_service_tier(self.service_tier)
        if self.cache_salt == "":
            raise invalid("cache_salt is empty: leave it out", "cache_salt")
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise invalid(
                f"max_tool_calls is {number_text(self.max_tool_calls)}: it must be at least 1",
                "max_tool_calls",
            )
        self._check_background()
        if not self.input and self.previous_response_id is None:
            raise invalid("'input' is empty: expected a text or a list of items", "input")
        self.num_logprobs()

    def _check_background(self) -> None:
        if self.background and self.store is False:
            text = "'background' cannot be true if 'store' is false: leave out 'store'"
            raise invalid(text, "background")

    def check_content(self, bounds: RequestBounds, model: ModelLimits) -> None:
        depth = bounds.max_json_depth
        check_json("chat_template_kwargs", self.chat_template_kwargs, bounds.max_template_kwargs)
        check_json("tools", self.tools, bounds.max_tools_bytes, depth)
        check_json("tool_choice", self.tool_choice, bounds.max_tools_bytes, depth)
        check_json("text", self.text and self.text.format, bounds.max_tools_bytes, depth)
        if self.text is not None and (form := self.text.form()) is not None:
            check_form(form, "text")

    # ------------------------------------------------------------ the chat

    @cached_property
    def _tools(self) -> Sequence[Mapping[str, Any]]:
        return chat_tools(self.tools or ())

    @cached_property
    def _chosen(self) -> ChosenTools:
        return ChosenTools(self.tool_choice, self._tools)

    @cached_property
    def _items(self) -> Sequence[InputItem]:
        if isinstance(self.input, str):
            return [text_item(self.input)] if self.input else []
        return self.input or []

    def _instructions(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def conversation(self) -> list[dict[str, Any]]:
        return self._instructions() + messages_of(self._items)

    def template_tools(self) -> Sequence[Mapping[str, Any]]:
        # Hide the tools for the choice "none", so that the model does not try to call them.
        return () if self._chosen.choice.mode == "none" else self._chosen.tools

    def forced_schema(self) -> str:
        chosen = self._chosen
        if not chosen.tools:
            return ""
        return forced_schema(chosen.choice, chosen.tools, self.is_parallel)

    def kept(self) -> Sequence[bytes]:
        items = stored_items(self._items) if self.store is not False else []
        tools = self.template_tools()
        return KeptContent.make(self._shown(), self._instructions(), items, tools).frames()

    def template_options(self, known: Collection[str]) -> TemplateOptions:
        variables = dict(self.chat_template_kwargs or {})
        check_variables(variables, "chat_template_kwargs")
        effort = None if self.reasoning is None else self.reasoning.effort
        if effort is not None:
            if EFFORT in variables:
                raise invalid(
                    f"reasoning.effort and {EFFORT} in chat_template_kwargs are both set: leave "
                    "out one of them",
                    "reasoning",
                )
            if EFFORT not in known:
                raise invalid(
                    "reasoning.effort is not supported by this model: leave it out", "reasoning"
                )
            variables[EFFORT] = effort
        return TemplateOptions(variables=variables)

    # ------------------------------------------------------------ the answer

    @property
    def is_parallel(self) -> bool:
        """Whether the answer may have several calls."""
        return self.parallel_tool_calls is not False

    def num_logprobs(self) -> int | None:
        """Return the number of alternatives per token, or None without logprobs."""
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid(
                f"top_logprobs needs {LOGPROBS!r} in 'include': add it, or leave out top_logprobs",
                "top_logprobs",
            )
        return None

    def parsing_options(self, chat: Chat) -> ParsingOptions:
        # If a helper process has parsed the body, the tools are in `chat` only.
        is_forced, chosen = bool(chat.forced_schema), self.tool_choice
        is_named = isinstance(chosen, dict) and chosen.get("type") == "function"
        return ParsingOptions(
            reads_calls=bool(chat.tools),
            is_forced=is_forced,
            forced_name=chosen["name"] if is_forced and is_named else "",
            is_parallel=self.is_parallel,
            is_strict=bool(chat.strict_calls),
            tools=ToolParameters(chat.functions),
        )

    def client_names(self) -> Mapping[str, str]:
        chosen = self.tool_choice
        if isinstance(chosen, dict) and chosen.get("type") == "allowed_tools":
            chosen = chosen.get("mode")
        is_forced = chosen not in (None, "none", "auto")
        return {
            "messages": "input",
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "structured_outputs": "tools" if is_forced else "text",
        }

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return the sampling parameters of the body; absent fields get the `defaults`."""
        named = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        named |= {
            "structured_outputs": None if self.text is None else self.text.form(),
            "max_tokens": self.max_output_tokens,
            "logprobs": self.num_logprobs(),
        }
        return defaults.sampling_params(
            {name: value for name, value in named.items() if value is not None}
        )

    def _shown(self) -> Mapping[str, Any]:
        """Return the fields of the request that the response repeats."""
        reasoning = self.reasoning
        text = self.text.shown() if self.text else {"format": PLAIN, "verbosity": "medium"}
        effort = None if reasoning is None else reasoning.effort
        chosen = "auto" if self.tool_choice is None else self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.is_parallel,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "text": text,
            "tool_choice": chosen,
            "tools": shown_tools(self._tools),
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
