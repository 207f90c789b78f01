"""Request bodies of Anthropic's API. Unknown fields are refused, as in that API."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PrivateAttr

from penstock.common.number_text import number_text
from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs, json_schema
from penstock.common.text.chat_source import TemplateOptions
from penstock.common.thinking_budget import MAX_BUDGET
from penstock.router.api.anthropic.blocks import (
    CacheControl,
    ClosedModel,
    Message,
    TextBlocks,
    ToolUseBlock,
    count_blocks,
)
from penstock.router.api.anthropic.conversation import continues_last, conversation
from penstock.router.api.anthropic.thinking import OutputConfig, Thinking
from penstock.router.api.anthropic.tools import Tool, ToolChoiceParam, Tools, check_tools
from penstock.router.api.generation.chat_body import ChatBody
from penstock.router.api.generation.strict_model import Texts, length_of
from penstock.router.config import RequestBounds
from penstock.router.errors import invalid
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.parsers.tools.tool_parameters import ToolParameters
from penstock.router.requests.chat import Chat
from penstock.router.requests.cost_limits import CallSizes
from penstock.router.requests.forced_calls import forced_schema
from penstock.router.requests.generation_defaults import GenerationDefaults
from penstock.router.requests.request import ModelLimits
from penstock.router.requests.structured_check import check_form
from penstock.router.requests.tools import check_json

CONTINUES = b"continues"
"""Item in the result of `kept` if the answer continues the last message."""


class CountTokensBody(ChatBody):
    """Body of /v1/messages/count_tokens, whose fields are also fields of /v1/messages."""

    model_config = ConfigDict(extra="forbid")

    CONTENT: ClassVar[Mapping[str, Any]] = {"messages": [], "system": None, "tools": None}
    FIELD_NAMES: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences"}
    FORM_FIELD = "output_config.format"

    model: str
    messages: Annotated[list[Message], Field(fail_fast=True)]
    system: str | TextBlocks | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    _continues: bool = PrivateAttr(False)

    @classmethod
    def sizes(cls, body: Mapping[str, Any]) -> CallSizes:
        messages = body.get("messages")
        blocks, calls = count_blocks(messages, body.get("system"))
        return CallSizes(
            messages=length_of(messages),
            content_pieces=blocks,
            tool_calls=calls,
            tools=length_of(body.get("tools")),
            stop=length_of(body.get("stop_sequences")),
        )

    def check(self) -> None:
        check_tools(self.tools or (), self.tool_choice)
        if self.thinking is not None:
            self.thinking.check_fields(getattr(self, "max_tokens", None))
            if self.thinking.type == "enabled" and self._forces_calls:
                raise invalid(
                    "tool_choice.type 'any' or 'tool' cannot be combined with thinking.type "
                    "'enabled': leave out one of them",
                    "tool_choice",
                )
        if continues_last(self.messages) and self._forces_calls:
            raise invalid(
                "tool_choice.type 'any' or 'tool' cannot be used if the last message has the role "
                "'assistant': add a 'user' message at the end of messages",
                "tool_choice",
            )

    def check_content(self, bounds: RequestBounds, model: ModelLimits) -> None:
        depth = bounds.max_json_depth
        check_json("tools", self._functions(), bounds.max_tools_bytes, depth)
        for message in self.messages:
            blocks = message.content if isinstance(message.content, list) else ()
            inputs = [block.input for block in blocks if isinstance(block, ToolUseBlock)]
            check_json("messages", inputs, bounds.max_body_bytes, depth)

    def conversation(self) -> list[dict[str, Any]]:
        return conversation(self.system, self.messages)

    def template_tools(self) -> Sequence[Mapping[str, Any]]:
        # For the choice "none", hide the tools from the model, so that it cannot try to call them.
        choice = self.tool_choice
        return () if choice is not None and choice.type == "none" else self._functions()

    def called_functions(self) -> Sequence[Mapping[str, Any]]:
        tools = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        return [{**tool.plain()["function"], "strict": tool.strict} for tool in tools]

    def forced_schema(self) -> str:
        choice = self.tool_choice
        if choice is None or not choice.is_forced:
            return ""
        return forced_schema(choice.chosen(), self._functions(), self._is_parallel)

    def kept(self) -> Sequence[bytes]:
        return [CONTINUES] if continues_last(self.messages) else []

    def read_kept(self, kept: Sequence[bytes]) -> None:
        """Read the result of `kept`.

        Must be called before `template_options` and `parsing_options`.
        """
        self._continues = CONTINUES in kept

    def template_options(self, known: Collection[str]) -> TemplateOptions:
        variables: dict[str, Any] = {}
        for field in (self.thinking, self.output_config):
            variables |= {} if field is None else field.variables(known)
        return TemplateOptions(
            add_generation_prompt=not self._continues,
            continue_final_message=self._continues,
            variables=variables,
        )

    def check_model(self, known: Collection[str], reasons: bool) -> None:
        """Refuse fields that the model cannot follow (see `Thinking.check_model`)."""
        if self.thinking is not None:
            self.thinking.check_model(known, reasons)

    @property
    def _forces_calls(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.is_forced

    @property
    def _is_parallel(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    def _functions(self) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's form."""
        return [tool.plain() for tool in self.tools or () if isinstance(tool, Tool)]


class Metadata(ClosedModel):
    """The field `metadata`, which is accepted and not used."""

    user_id: str | None = None


class MessagesBody(CountTokensBody):
    """Body of /v1/messages."""

    max_tokens: int
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None

    @property
    def priority(self) -> None:
        return None

    @property
    def cache_salt(self) -> None:
        return None

    def check(self) -> None:
        super().check()
        if self.max_tokens < 0:
            raise invalid(
                f"max_tokens is {number_text(self.max_tokens)}: it must be at least 0", "max_tokens"
            )
        for name in ("container", "diagnostics", "inference_geo"):
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not supported: leave it out", name)

    def check_content(self, bounds: RequestBounds, model: ModelLimits) -> None:
        if (form := self._form()) is not None:
            check_form(form, "output_config")
        super().check_content(bounds, model)

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return the sampling parameters; absent fields get the `defaults`."""
        named = {
            # The engine generates at least one token. If `max_tokens` is 0, `only_prompt` hides it.
            "max_tokens": max(self.max_tokens, 1),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": tuple(self.stop_sequences or ()),
            "structured_outputs": self._form(),
        }
        return defaults.sampling_params(
            {name: value for name, value in named.items() if value is not None}
        )

    def parsing_options(self, chat: Chat) -> ParsingOptions:
        """Return the options for the parsing of the answers to the body's `chat`."""
        choice = self.tool_choice
        return ParsingOptions(
            reads_calls=bool(chat.tools),
            is_forced=bool(chat.forced_schema),
            forced_name=(choice.name or "") if choice is not None else "",
            is_parallel=self._is_parallel,
            is_strict=bool(chat.strict_calls),
            continues_message=self._continues,
            tools=ToolParameters(chat.functions),
        )

    def client_names(self) -> Mapping[str, str]:
        """Return the client's name for each field that our checks know under another name."""
        form = "tools" if self._forces_calls else "output_config"
        return {"prompt": "messages", "stop": "stop_sequences", "structured_outputs": form}

    @property
    def only_prompt(self) -> bool:
        """Whether the call only puts its prompt into the prefix cache, and has no answer."""
        return self.max_tokens == 0

    @property
    def omits_thinking(self) -> bool:
        """Whether thinking blocks are sent without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def thinking_budget(self) -> int | None:
        """The maximum number of reasoning tokens, or None if there is no limit."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        return None if budget is None else min(budget, MAX_BUDGET)

    def _form(self) -> StructuredOutputs | None:
        schema = None if self.output_config is None else self.output_config.answer_schema()
        return None if schema is None else json_schema(schema)
