"""Messages of a chat, in OpenAI's format."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from penstock.common.text.chat_source import SPECIAL_TOKEN_NAMES, TemplateOptions
from penstock.router.errors import invalid
from penstock.router.requests.chat import check_role

RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        *SPECIAL_TOKEN_NAMES,
    }
)
"""Variables and arguments of chat templates that the body sets otherwise, or not at all."""


Ids: TypeAlias = Annotated[list[int], Field(fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]
"""Lists whose validation stops at the first error, since a large body could have a million."""


class StrictModel(BaseModel):
    """A pydantic model that refuses numbers in strings, NaN and infinities."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    def check(self) -> None:
        """Refuse combinations of fields that are invalid."""


class ContentPart(StrictModel):
    type: str
    text: str | None = None

    def plain(self) -> dict[str, str]:
        """Return a text part, in the form for chat templates."""
        if self.type != "text" or self.text is None:
            raise invalid(
                f"content of type {self.type[:40]!r} is not served: send text", "messages"
            )
        return {"type": "text", "text": self.text}


class Message(StrictModel):
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the role and the text or text parts, in the form for chat templates."""
        extra = self.model_extra or {}
        if extra.get("tool_calls") or extra.get("function_call"):
            raise invalid("tool calls are not served yet: leave them out", "messages")
        check_role(self.role)
        if self.content is None and self.role != "assistant":
            raise invalid("a message has no content: set content", "messages")
        if isinstance(self.content, list):
            return {"role": self.role, "content": [part.plain() for part in self.content]}
        return {"role": self.role, "content": self.content or ""}


class Conversation(StrictModel):
    """Fields of every body with messages."""

    messages: Annotated[list[Message], Field(fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Return all messages, in the form for chat templates."""
        if not self.messages:
            raise invalid("messages is empty: send at least one", "messages")
        return [message.plain() for message in self.messages]

    def template_options(self, known: Collection[str]) -> TemplateOptions:
        """Return the options for the model's chat template, which reads the `known` variables."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other: set one",
                "continue_final_message",
            )
        variables = self.template_variables(known)
        for name in variables:
            if name in RESERVED_VARIABLES:
                raise invalid(
                    f"{name} cannot be set in chat_template_kwargs", "chat_template_kwargs"
                )
        return TemplateOptions(
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables=variables,
        )

    def template_variables(self, known: Collection[str]) -> Mapping[str, Any]:
        """Return the further variables for a template that reads the `known` variables."""
        return self.chat_template_kwargs or {}
