"""Base class of the request bodies with a chat, in the formats of all HTTP APIs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from penstock.common.sampling_params import SamplingParams
from penstock.common.text.chat_source import TemplateOptions
from penstock.router.api.generation.strict_model import StrictModel
from penstock.router.config import RequestBounds
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.requests.chat import Chat
from penstock.router.requests.generation_defaults import GenerationDefaults
from penstock.router.requests.request import ModelLimits


class ChatBody(StrictModel):
    """A request body with the messages of a chat, in the format of one of the HTTP APIs.

    If a helper process parses the body, the helper process calls all of these methods except
    `template_options`, which the router calls.
    """

    # A field that sets the form of the answer.
    FORM_FIELD: ClassVar[str] = "response_format"

    def check_content(self, bounds: RequestBounds, model: ModelLimits) -> None:
        """Refuse fields that are too large or too deeply nested."""

    def conversation(self) -> list[dict[str, Any]]:
        """Return all messages, in the form for chat templates."""
        raise NotImplementedError

    def template_tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the chat template gets, in OpenAI's form."""
        return ()

    def called_functions(self) -> Sequence[Mapping[str, Any]]:
        """Return the functions of `template_tools`, including their member `strict`."""
        return [tool["function"] for tool in self.template_tools()]

    def template_documents(self) -> Sequence[Mapping[str, Any]]:
        """Return the documents that the chat template gets."""
        return ()

    def forced_schema(self) -> str:
        """Return the JSON schema that forces the answer to be tool calls, or an empty text."""
        return ""

    def repeats_final_text(self) -> bool:
        """Return whether the answer repeats the text of the assistant's last message."""
        return False

    def kept(self) -> Sequence[bytes]:
        """Return encoded data of the body, which the router keeps until the answer is sent."""
        return ()

    def template_options(self, known: Collection[str]) -> TemplateOptions:
        """Return the options for the model's chat template, which reads the `known` variables."""
        raise NotImplementedError


class AnsweredChat(Protocol):
    """Fields and methods that a `ChatBody` has in addition if the model is to answer the chat.

    The fields named in `StrictModel.CONTENT` may be empty when these methods are called.
    """

    FORM_FIELD: ClassVar[str]

    @property
    def model(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def thinking_token_budget(self) -> int | None: ...

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return the sampling parameters; absent fields get the `defaults`."""
        ...

    def parsing_options(self, chat: Chat) -> ParsingOptions:
        """Return the options for the parsing of the answers to the body's `chat`."""
        ...

    def template_options(self, known: Collection[str]) -> TemplateOptions:
        """Return the options for the model's chat template, which reads the `known` variables."""
        ...

    def client_names(self) -> Mapping[str, str]:
        """Return the client's name for each field that the checks know under another name."""
        ...
