"""The content blocks of messages, as pydantic models.

Unknown fields are refused, as in Anthropic's API. Blocks of other types are parsed too, so that
their refusal can name the type.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from penstock.common.value_text import value_text
from penstock.router.api.generation.strict_model import StrictModel
from penstock.router.errors import ServingError, invalid


class ClosedModel(StrictModel):
    """A model that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class CacheControl(ClosedModel):
    """The field `cache_control`, which has no effect, because all prompts are cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(ClosedModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None

    def checked(self, where: str) -> str:
        """Return the text; `where` is the path of the block in the body."""
        if self.citations:
            raise invalid(f"{where}.citations are not supported: leave them out", _field(where))
        return self.text


class ThinkingBlock(ClosedModel):
    type: Literal["thinking"]
    thinking: str
    signature: str  # signature of the reasoning; signatures are not verified


class RedactedThinkingBlock(ClosedModel):
    """Encrypted reasoning of another server, which our models cannot read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(ClosedModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    toolset_name: Any = None

    def check(self, where: str = "") -> None:
        """Refuse calls made by a server's tool, and calls of a tool that belongs to a toolset."""
        if self.caller not in (None, {"type": "direct"}):
            raise invalid(
                f'{where}.caller must be {{"type": "direct"}}, not {value_text(self.caller)}',
                _field(where),
            )
        _check_toolset(self.toolset_name, where)


class OtherBlock(StrictModel):
    """A block whose type is unknown, or is not supported in the place where the block occurs."""

    type: str


def _tags(*types: str) -> Discriminator:
    """Return a pydantic discriminator that selects the model of a block by the block's `type`.

    Its tags are in angle brackets, so that they differ from all names of fields.
    """
    tags = {kind: f"<{kind}>" for kind in types}

    def tag(block: Any) -> str:
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return tags.get(kind, "<other>") if isinstance(kind, str) else "<other>"

    return Discriminator(tag)


ResultBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[OtherBlock, Tag("<other>")], _tags("text")
]
"""A block of a system prompt or of a tool's result."""

TextBlocks: TypeAlias = Annotated[list[ResultBlock], Field(fail_fast=True)]


class ToolResultBlock(ClosedModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Any = None

    def check(self, where: str = "") -> None:
        _check_toolset(self.toolset_name, where)


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[OtherBlock, Tag("<other>")],
    _tags("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
"""A block of a message."""


class Message(ClosedModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


def texts_of(content: str | Sequence[Any] | None, where: str) -> list[str]:
    """Return the texts of the content at the path `where`; refuse blocks that are not text."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    found = []
    for index, block in enumerate(content):
        path = f"{where}.{index}"
        if not isinstance(block, TextBlock):
            raise unsupported(block, path, "text")
        found.append(block.checked(path))
    return found


def unsupported(block: Any, where: str, *supported: str) -> ServingError:
    """Return the error for a block whose type is not supported at the path `where`."""
    kind, expected = block.type[:40], " or ".join(map(repr, supported))
    return invalid(
        f"{where}: a block of type {kind!r} is not supported here: expected the type {expected}",
        _field(where),
    )


def count_blocks(messages: object, system: object) -> tuple[int, int]:
    """Return the numbers of content blocks and of tool calls in a body that may be invalid."""
    blocks = len(system) if isinstance(system, list) else 0
    calls = 0
    for message in messages if isinstance(messages, list) else ():
        content = _get(message, "content")
        if not isinstance(content, list):
            continue
        blocks += len(content)
        for block in content:
            calls += _get(block, "type") == "tool_use"
            nested = _get(block, "content")
            blocks += len(nested) if isinstance(nested, list) else 0
    return blocks, calls


def _get(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _check_toolset(name: object, where: str) -> None:
    if name is not None:
        raise invalid(f"{where}.toolset_name is not supported: leave it out", _field(where))


def _field(where: str) -> str:
    return where.partition(".")[0]
