"""Parses request bodies; separates prompts, messages and tokens from the other fields.

A large body is parsed and checked in a helper process, since the parser holds Python's interpreter
lock. The helper process checks the sizes of all fields. The router gets the fields, and the content
in fragments that are each fast to parse.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic

from pydantic_core import from_json

from penstock.router.api.anthropic.schema import CountTokensBody, MessagesBody
from penstock.router.api.generation.chat_body import ChatBody
from penstock.router.api.generation.parsing import Body, keys, parse
from penstock.router.api.generation.strict_model import StrictModel
from penstock.router.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Prompt,
    TokenizeChatRequest,
    TokenizeTextRequest,
    check_allowed_tokens,
)
from penstock.router.api.openai.structured_fields import StructuredFields
from penstock.router.api.responses.body import ResponsesRequest
from penstock.router.config import RequestBounds
from penstock.router.errors import ServingError, invalid, renamed
from penstock.router.parsers.tools.tool_parameters import function_lines
from penstock.router.requests.chat import Chat, array_of, final_text, num_chars, num_chars_of
from penstock.router.requests.cost_limits import check_num_detokenized, check_sizes
from penstock.router.requests.json_text import dumps
from penstock.router.requests.request import ModelLimits, check_prompt_length, check_vocabulary
from penstock.router.requests.slices import Slices
from penstock.router.requests.strict_calls import strict_calls
from penstock.router.requests.tools import check_parameters

BODY_KIND = "body"
"""Name of the job that parses a body."""

ALLOWED_TOKENS = "allowed_token_ids"

IDS_PER_FRAGMENT = 32 << 10

MAX_FIELDS_CHARS = 256 << 10
"""Maximum length of the JSON of the fields that are not in `StrictModel.CONTENT`, in large bodies.

`allowed_token_ids` does not count: its length is limited by the vocabulary.
"""

INLINE_BYTES = 32 << 10
"""Bodies up to this size are parsed on the event loop, larger ones in a helper process."""


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[Body]):
    """A valid request body.

    Attributes:
        body: the fields of the body. After parsing in a helper process, the fields named in
            `StrictModel.CONTENT` are empty.
        prompts: the prompts of the body, as texts or lists of token ids.
        chat: the messages of the body, or None if it has no messages.
        kept: see `ChatBody.kept`.
    """

    body: Body
    prompts: Sequence[Prompt] = ()
    chat: Chat | None = None
    kept: Sequence[bytes] = ()

    @property
    def messages(self) -> Chat:
        """The attribute `chat`, which must not be None."""
        assert self.chat is not None
        return self.chat


BODIES: Mapping[str, Callable[[bytes], type[StrictModel]]] = {
    "chat": lambda data: ChatCompletionRequest,
    "completion": lambda data: CompletionRequest,
    "tokenize": lambda data: (
        TokenizeChatRequest if "messages" in keys(data) else TokenizeTextRequest
    ),
    "detokenize": lambda data: DetokenizeRequest,
    "messages": lambda data: MessagesBody,
    "count_tokens": lambda data: CountTokensBody,
    "response": lambda data: ResponsesRequest,
}
"""For each kind of body, by name: a function that returns the pydantic model for a body's bytes."""

MODELS: Mapping[str, type[StrictModel]] = {
    model.__name__: model
    for model in (
        *(ChatCompletionRequest, CompletionRequest, DetokenizeRequest),
        *(ResponsesRequest, TokenizeChatRequest, TokenizeTextRequest),
        *(CountTokensBody, MessagesBody),
    )
}


def parse_body(
    name: str, data: bytes, bounds: RequestBounds, model: ModelLimits
) -> ParsedBody[Any]:
    """Parse and check a body; `name` is a key of `BODIES`.

    Raises:
        ServingError: INVALID if the body is not valid, or one of its lists is too long.
    """
    kind = BODIES[name](data)
    try:
        return _parse(kind, data, bounds, model)
    except ServingError as error:
        raise renamed(error, kind.FIELD_NAMES) from error


def _parse(
    kind: type[StrictModel], data: bytes, bounds: RequestBounds, model: ModelLimits
) -> ParsedBody[Any]:
    if len(data) > INLINE_BYTES:
        _check_raw(kind, data, bounds)
    body = parse(kind, data)
    check_sizes(kind.sizes(vars(body)), bounds)
    if isinstance(body, StructuredFields):
        body.check_form()
    match body:
        case ChatBody():
            body.check_content(bounds, model)
            return ParsedBody(body, chat=_chat(body), kept=body.kept())
        case CompletionRequest():
            check_allowed_tokens(body.allowed_token_ids, model)
            if body.truncate_prompt_tokens is None:
                _check_prompt_lengths(body.prompt, model)
            return ParsedBody(body, body.prompts())
        case TokenizeTextRequest():
            return ParsedBody(body, [body.prompt])
        case DetokenizeRequest():
            check_num_detokenized(len(body.tokens), model, bounds)
            check_vocabulary(body.tokens, model, "tokens")
            return ParsedBody(body, [body.tokens])
    raise AssertionError(f"no code parses a body of type {kind.__name__!r}")


# ------------------------------------------------------------ between processes


def job_items(name: str, data: bytes, model: ModelLimits) -> list[bytes]:
    """Return the items of the job that parses a body."""
    return [json.dumps([name, model.name, model.max_model_len, model.vocab_size]).encode(), data]


def parse_job(bounds: RequestBounds, items: Sequence[bytes]) -> list[bytes]:
    """Parse a job's body; return items from which `read_parsed` restores the parsed body."""
    name, *model = json.loads(items[0])
    parsed = parse_body(name, items[1], bounds, ModelLimits(*model))
    body = parsed.body
    wanted = body.model_fields_set & type(body).model_fields.keys()
    content_fields = wanted & body.CONTENT.keys()
    _check_fields(body, wanted - content_fields)
    empty = {name: body.CONTENT[name] for name in content_fields}
    allowed: list[bytes] = []
    if tokens := getattr(body, ALLOWED_TOKENS, None):
        empty[ALLOWED_TOKENS] = []
        allowed = list(_fragments(tokens))
    fields = body.model_copy(update=empty).model_dump_json(include=wanted)
    form = body.encode_form() if isinstance(body, StructuredFields) else b""
    if parsed.chat is not None:
        chat = parsed.chat
        head: list[object] = [type(body).__name__, len(allowed), None, chat.num_chars]
        content = [chat.messages, chat.final_text.encode(), chat.tools, chat.documents]
        content += [chat.forced_schema.encode(), chat.strict_calls, chat.functions, *parsed.kept]
    else:
        fragments = [list(_fragments(prompt)) for prompt in parsed.prompts]
        head = [type(body).__name__, len(allowed), list(map(len, fragments))]
        content = [each for prompt in fragments for each in prompt]
    return [dumps(head).encode(), fields.encode(), form, *allowed, *content]


async def read_parsed(items: Sequence[bytes]) -> ParsedBody[Any]:
    """Return the body that a helper process has parsed."""
    head, fields, form, *content = items
    name, num_allowed, counts, *sizes = from_json(head)
    body = MODELS[name].model_validate_json(fields)
    if isinstance(body, StructuredFields):
        body.restore_form(form)
    slices = Slices()
    if num_allowed:
        tokens = await _joined(content[:num_allowed], slices)
        setattr(body, ALLOWED_TOKENS, tokens)
        del content[:num_allowed]
    if counts is None:
        messages, text, tools, documents, forced, *others = content
        strict, functions, *kept = others
        (num_chars,) = sizes
        schema = forced.decode()
        chat = Chat(messages, num_chars, text.decode(), tools, documents, schema, strict, functions)
        return ParsedBody(body, chat=chat, kept=kept)
    prompts: list[Prompt] = []
    fragments = iter(content)
    for count in counts:
        prompts.append(await _joined(islice(fragments, count), slices))
    return ParsedBody(body, prompts)


async def _joined(fragments: Iterable[bytes], slices: Slices) -> Any:
    """Parse the JSON fragments of a text or list, which `_fragments` has made; return the whole."""
    first, *others = fragments
    value = from_json(first)
    await slices.pause()
    for fragment in others:
        value += from_json(fragment)
        await slices.pause()
    return value


def _fragments(prompt: Prompt) -> Iterator[bytes]:
    """Yield a prompt as JSON; a long list of token ids is split into several lists."""
    if isinstance(prompt, str):
        yield dumps(prompt).encode()
        return
    for start in range(0, max(len(prompt), 1), IDS_PER_FRAGMENT):
        yield dumps(prompt[start : start + IDS_PER_FRAGMENT]).encode()


# ------------------------------------------------------------ checks


def _chat(body: ChatBody) -> Chat:
    messages, tools, documents = (
        body.conversation(),
        body.template_tools(),
        body.template_documents(),
    )
    count = sum(map(num_chars_of, messages))
    if tools or documents:
        count += num_chars([tools, documents])
    text = final_text(messages) if body.repeats_final_text() else ""
    found = dumps(messages).encode()
    forced = body.forced_schema()
    strict = b"" if forced or not tools else strict_calls(body.called_functions())
    functions = function_lines(tools or ())
    check_parameters(tools or ())
    return Chat(found, count, text, array_of(tools), array_of(documents), forced, strict, functions)


def _check_raw(kind: type[StrictModel], data: bytes, bounds: RequestBounds) -> None:
    """Check the sizes of lists before the fields are validated, which takes many times as long."""
    try:
        # Many different strings are parsed faster without the cache of strings.
        raw = from_json(data, cache_strings=False)
    except ValueError:
        return  # the validation of the fields reports invalid JSON to the client
    if isinstance(raw, dict):
        check_sizes(kind.sizes(raw), bounds)


def _check_fields(body: StrictModel, names: Collection[str]) -> None:
    """Refuse fields that are too large for the event loop, which parses them without a pause."""
    sizes = {name: len(dumps(getattr(body, name))) for name in names if name != ALLOWED_TOKENS}
    if sum(sizes.values()) > MAX_FIELDS_CHARS:
        name = max(sizes, key=lambda each: sizes[each])
        raise invalid(
            f"{name} has {sizes[name]} characters as JSON; all fields but messages, prompts, tools "
            f"and documents may have at most {MAX_FIELDS_CHARS} in all",
            name,
        )


def _check_prompt_lengths(prompt: object, model: ModelLimits) -> None:
    """Refuse lists of token ids that exceed the model's context, before the ids are checked."""
    if not isinstance(prompt, list):
        return
    of_many = bool(prompt) and isinstance(prompt[0], str | list)
    for tokens in prompt if of_many else [prompt]:
        if isinstance(tokens, list):
            check_prompt_length(len(tokens), model)
