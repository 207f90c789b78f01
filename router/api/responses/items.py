"""The items of a conversation in the Responses API, and the messages for chat templates."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from penstock.router.api.generation.strict_model import StrictModel
from penstock.router.errors import ServingError, invalid

FIELD = "input"
MAX_ID = 128
ROLES = ("user", "system", "developer", "assistant")
TEXT_TYPES: Mapping[str, tuple[str, ...]] = {
    "message": ("input_text", "output_text", "text", "refusal"),
    "function_call_output": ("input_text", "output_text", "text"),
    "reasoning": ("reasoning_text", "summary_text", "text"),
}
"""For each type of item, the types of its content parts."""

PERMITTED: Mapping[str, Sequence[Any]] = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "namespace": (),
}
"""Unsupported members of items, each with the values that mean the same as no value."""


class TextContent(StrictModel):
    """A content part of an item."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def plain(self, kind: str) -> str:
        """Return the text of this part. Raise an error if items of type `kind` cannot have it."""
        if self.type not in TEXT_TYPES[kind]:
            raise invalid(
                f"content parts of type {self.type[:40]!r} are not supported in an item of type "
                f"{kind!r}: expected one of {', '.join(TEXT_TYPES[kind])}",
                FIELD,
            )
        field = "refusal" if self.type == "refusal" else "text"
        text: str | None = getattr(self, field)
        if text is None:
            raise invalid(
                f"a content part of type {self.type!r} has no text: set the field {field!r}", FIELD
            )
        return text


Content: TypeAlias = str | Annotated[list[TextContent], Field(fail_fast=True)]


class InputItem(StrictModel):
    """One item of `input`, of any type; which members it needs depends on the type."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Annotated[list[TextContent], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None

    @property
    def kind(self) -> str:
        """The type of the item. Messages may leave it out."""
        return self.type or ("message" if self.role is not None else "")

    @property
    def given_id(self) -> str:
        """The id of the item, if it has a valid one, else an empty text."""
        given = self.id
        if given is None:
            return ""
        return given if given.isascii() and given.isprintable() and len(given) <= MAX_ID else ""


def text_item(text: str) -> InputItem:
    """Return the message that represents an input that is a plain text."""
    return InputItem(type="message", role="user", content=text)


def needed(item: InputItem, name: str) -> str:
    """Return a member that an item must have; refuse an item without it."""
    value: str | None = getattr(item, name)
    if not value:
        raise invalid(f"an item of type {item.kind!r} has no {name}: set the field {name!r}", FIELD)
    return value


def texts_of(item: InputItem, content: Content | None) -> list[str]:
    """Return the texts of a content."""
    if isinstance(content, str):
        return [content]
    return [part.plain(item.kind) for part in content or ()]


def reasoning_of(item: InputItem) -> str:
    """Return the text of a reasoning item, or else the text of its summary."""
    if item.encrypted_content and not item.content:
        raise invalid(
            "encrypted_content of an item of type 'reasoning' is not supported: send the text of "
            "the reasoning in the field 'content'",
            FIELD,
        )
    return "\n".join(texts_of(item, item.content) or texts_of(item, item.summary))


class Conversation:
    """Makes messages for chat templates from items.

    Consecutive items of the assistant (reasoning, text and calls) become one message.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        # Messages that have reasoning, with the texts of the reasoning.
        self._thoughts: list[tuple[dict[str, Any], list[str]]] = []
        # Assistant's message to which later items are added.
        self._answer: dict[str, Any] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages, in the form of `common.text.template_messages`."""
        for message, texts in self._thoughts:
            message["reasoning_content"] = "\n".join(texts)
        return self._messages

    def add(self, item: InputItem) -> None:
        """Append an item.

        Raises:
            ServingError: INVALID if the item is not supported, or not valid.
        """
        if extra := item.model_extra:
            _check_extra(item.kind, extra)
        add = _ADD.get(item.kind)
        if add is None:
            what = f"of type {item.kind[:40]!r}" if item.kind else "without a type"
            known = ", ".join(_ADD)
            raise invalid(f"an item {what} is not supported: expected one of {known}", FIELD)
        add(self, item)

    def _add_message(self, item: InputItem) -> None:
        if item.role not in ROLES:
            given = "absent" if item.role is None else repr(item.role[:40])
            raise invalid(
                f"a message's role must be one of {', '.join(ROLES)}, but is {given}", FIELD
            )
        if item.content is None:
            raise invalid(
                f"a message with the role {item.role!r} has no content: set the field 'content'",
                FIELD,
            )
        texts = texts_of(item, item.content)
        if item.role == "assistant":
            self._add_text("".join(texts))
            return
        self._answer = None
        is_text = isinstance(item.content, str)
        contents = [{"type": "text", "text": text} for text in texts]
        self._messages.append({"role": item.role, "content": texts[0] if is_text else contents})

    def _add_text(self, text: str) -> None:
        answer = self._answer
        if answer is None or answer["content"] or "tool_calls" in answer:
            answer = self._begin()
        answer["content"] = text

    def _add_reasoning(self, item: InputItem) -> None:
        text, answer = reasoning_of(item), self._answer
        if not text:
            return
        if answer is None or answer["content"] or "tool_calls" in answer:
            answer = self._begin()
        if "reasoning_content" not in answer:
            answer["reasoning_content"] = ""
            self._thoughts.append((answer, []))
        # The texts are joined once at the end, since repeated joins take seconds.
        self._thoughts[-1][1].append(text)

    def _add_call(self, item: InputItem) -> None:
        answer = self._answer or self._begin()
        answer["content"] = answer["content"] or None
        function = {"name": needed(item, "name"), "arguments": item.arguments or ""}
        call = {"id": needed(item, "call_id"), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)

    def _add_result(self, item: InputItem) -> None:
        self._answer = None
        if item.output is None:
            raise invalid(
                "an item of type 'function_call_output' has no output: set the field 'output'",
                FIELD,
            )
        text = "\n".join(texts_of(item, item.output))
        call = needed(item, "call_id")
        self._messages.append({"role": "tool", "content": text, "tool_call_id": call})

    def _begin(self) -> dict[str, Any]:
        self._answer = {"role": "assistant", "content": ""}
        self._messages.append(self._answer)
        return self._answer


_ADD: Mapping[str, Callable[[Conversation, InputItem], None]] = {
    "message": Conversation._add_message,
    "function_call": Conversation._add_call,
    "function_call_output": Conversation._add_result,
    "reasoning": Conversation._add_reasoning,
}
"""For each type of item, the function that appends it."""


def _check_extra(kind: str, members: Mapping[str, Any]) -> None:
    for name, permitted in PERMITTED.items():
        value = members.get(name)
        if value is not None and not any(value == one for one in permitted):
            raise invalid(
                f"{name!r} of an item of type {kind[:40]!r} is not supported: leave it out", FIELD
            )


def messages_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the messages of items; a refusal names the index of the item."""
    conversation = Conversation()
    for index, item in enumerate(items):
        try:
            conversation.add(item)
        except ServingError as error:
            raise invalid(f"input.{index}: {error.message}", FIELD) from error
    return conversation.messages


PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def stored_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return valid items with ids, in the form in which the API returns them.

    Raises:
        ServingError: INVALID if two items have the same id; lists use ids as cursors.
    """
    suffix = secrets.token_hex(12)
    found: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(items):
        stored = _stored(item, f"{suffix}{index:04x}")
        if stored["id"] in found:
            raise repeated_id(stored["id"])
        found[stored["id"]] = stored
    return list(found.values())


def repeated_id(name: str) -> ServingError:
    """Return the error for two items of a conversation that have the same id."""
    return invalid(
        f"two items have the id {name!r}: send each item once, and send no item that the response "
        "in previous_response_id contains",
        FIELD,
    )


def _stored(item: InputItem, suffix: str) -> dict[str, Any]:
    kind = item.kind
    name = item.given_id or f"{PREFIXES[kind]}_{suffix}"
    found: dict[str, Any] = {"id": name, "type": kind, "status": "completed"}
    match kind:
        case "message":
            found["role"] = item.role
            is_answer = item.role == "assistant"
            extra: dict[str, Any] = {"annotations": []} if is_answer else {}
            part = "output_text" if is_answer else "input_text"
            texts = texts_of(item, item.content)
            found["content"] = [{"type": part, "text": text, **extra} for text in texts]
        case "function_call":
            found |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments or ""}
        case "function_call_output":
            given = item.output
            texts = texts_of(item, given)
            contents = [{"type": "input_text", "text": text} for text in texts]
            found |= {
                "call_id": item.call_id,
                "output": given if isinstance(given, str) else contents,
            }
        case "reasoning":
            for name, part, content in (
                ("summary", "summary_text", item.summary),
                ("content", "reasoning_text", item.content),
            ):
                found[name] = [{"type": part, "text": text} for text in texts_of(item, content)]
    return found
