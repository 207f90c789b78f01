"""Request bodies of the OpenAI API, with vLLM's extensions, as pydantic models.

Unknown fields are ignored, as in OpenAI and vLLM. The fields in `UNSUPPORTED_FIELDS` are refused,
because ignoring these fields would change the meaning of the answer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.common.sampling_params import SamplingParams
from penstock.router.errors import ServingError, invalid

UNSUPPORTED_FIELDS: Mapping[str, Sequence[Any]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprob_token_ids": (None,),
    "prompt_embeds": (None,),
    "truncate_prompt_tokens": (None,),
    "return_tokens_as_token_ids": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "priority": (None, 0),
    "kv_transfer_params": (None,),
}
"""Unsupported fields, each with its permitted values, which mean the same as no value."""

ROLES = ("system", "developer", "user", "assistant")

Prompt: TypeAlias = str | list[int]

RequestType = TypeVar("RequestType", bound="BaseRequest")


class StrictModel(BaseModel):
    """A pydantic model that refuses numbers in strings, NaN and infinities."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class BaseRequest(StrictModel):
    """Fields of both completions and chat completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # extensions of vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    # extension of transformers and TGI
    typical_p: float | None = None

    def limit(self) -> int | None:
        """Return the maximum number of answer tokens; None if the request body sets no maximum."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None: no logprobs."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return the number of alternatives per prompt token; None: no prompt logprobs."""
        return self.prompt_logprobs

    def sampling_params(self, bad_words: Sequence[Sequence[int]]) -> SamplingParams:
        """Return the sampling parameters of the body; absent fields get their defaults.

        `bad_words` are the body's bad words as token ids.
        """
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "max_tokens": self.limit(),
            "min_tokens": self.min_tokens,
            "stop_token_ids": _tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.num_logprobs(),
            "n": self.n,
            "best_of": self.best_of,
            "prompt_logprobs": self.num_prompt_logprobs(),
            "logit_bias": _bias(self.logit_bias),
            "typical_p": self.typical_p,
            "bad_words_token_ids": tuple(map(tuple, bad_words)),
            "allowed_token_ids": _tuple(self.allowed_token_ids),
            "use_beam_search": self.use_beam_search,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "stop": self.stop_strings(),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
        }
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        return SamplingParams(**given)

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings, which may be given as one string or as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream should end with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(BaseRequest):
    """Body of /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None

    @property
    def only_echo(self) -> bool:
        """Whether the answer consists of the prompt only."""
        return bool(self.echo) and self.max_tokens == 0

    def limit(self) -> int | None:
        return 1 if self.only_echo else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        # `logprobs` also applies to an echoed prompt.
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in wanted if count is not None), default=None)

    def prompts(self) -> list[Prompt]:
        """Return the prompts, each as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
            return [prompt]
        prompts = prompt if isinstance(prompt, list) else [prompt]
        for item in prompts:
            if not isinstance(item, str) and not _is_tokens(item):
                raise invalid(
                    "prompt must be a string, a list of strings, a list of token ids, "
                    "or a list of lists of token ids",
                    "prompt",
                )
        if not prompts or not all(prompts):
            raise invalid("the prompt is empty: send at least one token", "prompt")
        return prompts


class ContentPart(StrictModel):
    type: str
    text: str | None = None


class Message(StrictModel):
    role: str
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, str]:
        """Return the role and the text, in the form for chat templates."""
        extra = self.model_extra or {}
        if extra.get("tool_calls") or extra.get("function_call"):
            raise invalid("tool calls are not served yet: leave them out", "messages")
        if self.role not in ROLES:
            raise invalid(f"a message's role must be one of {', '.join(ROLES)}", "messages")
        return {"role": self.role, "content": self._text()}

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(map(_part_text, self.content))
        if self.content is None and self.role != "assistant":
            raise invalid("a message has no content: set content", "messages")
        return self.content or ""


class ChatCompletionRequest(BaseRequest):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
            return None
        return self.top_logprobs or 0

    def conversation(self) -> list[dict[str, str]]:
        """Return all messages, in the form for chat templates."""
        if not self.messages:
            raise invalid("messages is empty: send at least one", "messages")
        return [message.plain() for message in self.messages]


def parse(kind: type[RequestType], body: bytes) -> RequestType:
    """Parse a JSON body.

    Raises:
        ServingError: INVALID; the message is the first problem, as one line.
    """
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _to_serving_error(error) from error
    for name, value in (parsed.model_extra or {}).items():
        if name in UNSUPPORTED_FIELDS and not any(
            value == harmless for harmless in UNSUPPORTED_FIELDS[name]
        ):
            raise invalid(f"{name} is not served: leave it out", name)
    if parsed.stream_options is not None and not parsed.stream:
        raise invalid("stream_options needs stream to be true", "stream_options")
    return parsed


def _to_serving_error(error: ValidationError) -> ServingError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return invalid(first["msg"].replace("Invalid JSON", "the body is not valid JSON"))
    names = [str(key) for key in first["loc"]]
    where = ".".join(names) if names else "the body"
    return invalid(f"{where}: {first['msg']}", names[0] if names else None)


def _is_tokens(item: object) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)


def _part_text(part: ContentPart) -> str:
    if part.type != "text" or part.text is None:
        raise invalid(f"content of type {part.type[:40]!r} is not served: send text", "messages")
    return part.text


def _tuple(tokens: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if tokens is None else tuple(tokens)


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not all(re.fullmatch(r"[0-9]{1,10}", token) for token in bias):
        raise invalid("the keys of logit_bias must be token ids", "logit_bias")
    return {int(token): value for token, value in bias.items()}
