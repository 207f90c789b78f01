"""Messages of a chat, in OpenAI's format."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from penstock.common.text.chat_source import TemplateOptions
from penstock.router.api.generation.chat_body import ChatBody
from penstock.router.api.generation.strict_model import FreeObjects, StrictModel, length_of
from penstock.router.api.openai.unsupported_fields import check_unsupported_fields
from penstock.router.config import RequestBounds
from penstock.router.errors import invalid
from penstock.router.requests.chat import check_role, check_variables
from penstock.router.requests.cost_limits import CallSizes
from penstock.router.requests.request import ModelLimits
from penstock.router.requests.tools import check_json, check_tools


class OpenAiBody(StrictModel):
    """Base of the request bodies of OpenAI's and vLLM's routes."""

    CONTENT: ClassVar[Mapping[str, Any]] = {
        "messages": [],
        "tools": None,
        "documents": None,
        "prompt": "",
        "tokens": [],
    }

    def check_extra(self) -> None:
        check_unsupported_fields(self.model_extra or {})

    @classmethod
    def sizes(cls, body: Mapping[str, Any]) -> CallSizes:
        messages = body.get("messages")
        content_pieces, tool_calls = _message_sizes(messages)
        return CallSizes(
            prompts=_num_prompts(body.get("prompt")),
            messages=length_of(messages),
            content_pieces=content_pieces,
            tool_calls=tool_calls,
            tools=length_of(body.get("tools")),
            documents=length_of(body.get("documents")),
            logit_bias=length_of(body.get("logit_bias")),
            stop=length_of(body.get("stop")),
            stop_token_ids=length_of(body.get("stop_token_ids")),
            bad_words=length_of(body.get("bad_words")),
        )


class ContentPart(StrictModel):
    type: str
    text: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the part in the form for chat templates; refuse a part that is not text."""
        if self.type != "text" or self.text is None:
            raise invalid(
                "a content part of type 'text' has no text: set the field 'text'"
                if self.type == "text"
                else f"content parts of type {self.type[:40]!r} are not supported: expected the "
                "type 'text'",
                "messages",
            )
        return {"type": "text", "text": self.text}


class CalledFunction(StrictModel):
    name: str
    arguments: str


class ToolCall(StrictModel):
    id: str
    type: str = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call in the form for chat templates; refuse a type other than `function`."""
        if self.type != "function":
            raise invalid(
                f"tool calls of type {self.type[:40]!r} are not supported: expected the type "
                "'function'",
                "messages",
            )
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


PLAIN = frozenset({"role", "content"})
"""Fields of the simplest messages, for which `Message.plain` skips the other fields."""


class Message(StrictModel):
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name that vLLM uses for `reasoning_content`

    def plain(self) -> dict[str, Any]:
        """Return the message in the form for chat templates."""
        extra = self.model_extra
        if extra and extra.get("function_call"):
            raise invalid("function_call is not supported: send tool_calls", "messages")
        check_role(self.role)
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(
                "a message with the role 'tool' has no tool_call_id: set it to the id of the call",
                "messages",
            )
        content: Any = self.content
        if isinstance(content, list):
            content = [part.plain() for part in content]
        elif content is None:
            if self.role != "assistant":
                raise invalid(
                    f"a message with the role {self.role!r} has no content: set the field "
                    "'content'",
                    "messages",
                )
            content = None if self.tool_calls else ""
        message = {"role": self.role, "content": content}
        return message if self.model_fields_set <= PLAIN else message | self._structure()

    def _structure(self) -> dict[str, Any]:
        """Return the members besides role and content."""
        calls, reasoning = self.tool_calls, self.reasoning_content or self.reasoning
        if self.role != "assistant" and (calls or reasoning):
            other = "reasoning_content" if self.reasoning_content else "reasoning"
            name = "tool_calls" if calls else other
            raise invalid(
                f"a message with the role {self.role!r} has {name}, which only the role "
                "'assistant' may have: leave it out",
                "messages",
            )
        members = {
            "name": self.name,
            "tool_calls": [call.plain() for call in calls] if calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning or None,
        }
        return {name: value for name, value in members.items() if value is not None}


class Conversation(ChatBody, OpenAiBody):
    """Fields of every body with messages."""

    messages: Annotated[list[Message], Field(fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: FreeObjects | None = None
    documents: FreeObjects | None = None

    def check(self) -> None:
        super().check()
        if self.tools:
            check_tools(self.tools)

    def check_content(self, bounds: RequestBounds, model: ModelLimits) -> None:
        depth = bounds.max_json_depth
        check_json("chat_template_kwargs", self.chat_template_kwargs, bounds.max_template_kwargs)
        check_json("tools", self.tools, bounds.max_tools_bytes, depth)
        check_json("documents", self.documents, bounds.max_body_bytes, depth)

    def template_tools(self) -> Sequence[Mapping[str, Any]]:
        return self.tools or ()

    def template_documents(self) -> Sequence[Mapping[str, Any]]:
        return self.documents or ()

    def conversation(self) -> list[dict[str, Any]]:
        if not self.messages:
            raise invalid("'messages' is empty: send at least one message", "messages")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise invalid(
                "the last message has tool_calls and cannot be continued, because chat templates "
                "write calls after the text: add a message with the role 'tool' at the "
                "end, and leave out continue_final_message",
                "messages",
            )
        return [message.plain() for message in self.messages]

    def template_options(self, known: Collection[str]) -> TemplateOptions:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt are both true: set one of them "
                "to false",
                "continue_final_message",
            )
        variables = self.template_variables(known)
        check_variables(variables, "chat_template_kwargs")
        return TemplateOptions(
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables=variables,
        )

    def template_variables(self, known: Collection[str]) -> Mapping[str, Any]:
        """Return the body's own variables for a template that reads the `known` variables."""
        return self.chat_template_kwargs or {}


def _message_sizes(messages: object) -> tuple[int, int]:
    """Return the numbers of content parts and tool calls of messages that may still be unparsed."""
    content_pieces = tool_calls = 0
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Message):
            content, calls = message.content, message.tool_calls
        elif isinstance(message, dict):
            content, calls = message.get("content"), message.get("tool_calls")
        else:
            continue
        if isinstance(content, list):
            content_pieces += len(content)
        if isinstance(calls, list):
            tool_calls += len(calls)
    return content_pieces, tool_calls


def _num_prompts(prompt: object) -> int:
    """Return the number of prompts; 1 for a list of token ids and for an invalid prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1
