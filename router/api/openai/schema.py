"""Request bodies of the OpenAI API, with vLLM's extensions, as pydantic models.

Unknown fields are ignored, as in OpenAI and vLLM, except those that would change the meaning of the
answer: see `unsupported_fields`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import ConfigDict

from penstock.common.number_text import number_text
from penstock.common.sampling_params import SamplingParams
from penstock.common.value_text import value_text
from penstock.router.api.generation.strict_model import Ids, StrictModel, Texts
from penstock.router.api.openai.messages import Conversation, OpenAiBody
from penstock.router.api.openai.structured_fields import StructuredFields
from penstock.router.api.openai.unsupported_fields import check_chat_fields
from penstock.router.config import RequestBounds
from penstock.router.errors import invalid
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.parsers.tools.tool_parameters import ToolParameters
from penstock.router.requests.chat import Chat
from penstock.router.requests.cost_limits import check_num_tokens
from penstock.router.requests.forced_calls import forced_schema
from penstock.router.requests.generation_defaults import GenerationDefaults
from penstock.router.requests.request import ModelLimits
from penstock.router.requests.tools import ToolChoice, check_json, read_tool_choice

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Prompt: TypeAlias = str | list[int]

MAX_TOOL_CHOICE_BYTES = 16 << 10
"""Largest size of `tool_choice`, in bytes of JSON."""


class StreamOptions(StrictModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's extension of OpenAI's field


class BaseRequest(StructuredFields):
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
    stop: str | Texts | None = None
    # Fields that vLLM adds to OpenAI's API.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    # Field of transformers and TGI.
    typical_p: float | None = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options needs 'stream' to be true: set 'stream' to true, or leave "
                "out stream_options",
                "stream_options",
            )
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise invalid(
                f"{name} is not supported: leave it out, or set it to false", "stream_options"
            )
        if self.cache_salt == "":
            raise invalid("cache_salt is empty: leave it out", "cache_salt")

    def limit(self) -> int | None:
        """Return the maximum number of answer tokens, or None if the body sets no maximum."""
        return self.max_tokens

    def truncated(
        self, prompt: Sequence[int], max_model_len: int, max_tokens: int | None
    ) -> Sequence[int]:
        """Return a prompt's last tokens if the body limits its length, otherwise the whole prompt.

        As in vLLM, a limit of -1 keeps as many prompt tokens as fit beside the answer. `max_tokens`
        is the default length of the answer; None means one token.
        """
        name, most = "truncate_prompt_tokens", self.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == -1:
            most = max(max_model_len - (self.limit() or max_tokens or 1), 1)
        if not 0 < most < max_model_len:
            raise invalid(
                f"{name} must be -1 or from 1 to {max_model_len - 1}, not {number_text(most)}", name
            )
        return prompt[-most:]

    def client_names(self) -> Mapping[str, str]:
        """Return the client's name for each field that our checks know under another name."""
        form = self.form()
        return {} if form is None else {"structured_outputs": form[0]}

    def num_logprobs(self) -> int | None:
        """Return the number of alternatives per answer token, or None without logprobs."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return the number of alternatives per prompt token, or None without logprobs."""
        return self.prompt_logprobs

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return the sampling parameters of the body, without its bad words.

        Absent fields get the `defaults`.
        """
        form = self.form()
        named = {
            "structured_outputs": None if form is None else form[1],
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
            "allowed_token_ids": _tuple(self.allowed_token_ids),
            "use_beam_search": self.use_beam_search,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "stop": self.stop_strings(),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
        }
        return defaults.sampling_params(
            {name: value for name, value in named.items() if value is not None}
        )

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings, which may be given as one string or as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream should end with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream should have the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)


class CompletionRequest(BaseRequest):
    """Body of /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None

    def check_extra(self) -> None:
        super().check_extra()
        check_chat_fields(self.model_extra or {})

    @property
    def only_echo(self) -> bool:
        """Whether the answer consists of the prompt only."""
        return bool(self.echo) and self.max_tokens == 0

    def limit(self) -> int | None:
        return 1 if self.only_echo else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        # With `echo`, `logprobs` also applies to the prompt.
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
                    "prompt must be a string, a list of strings, a list of token ids, or a list of "
                    f"lists of token ids, but contains {value_text(item)}",
                    "prompt",
                )
        if not prompts or not all(prompts):
            raise invalid("the prompt is empty: send at least one token", "prompt")
        return prompts


class ChatCompletionRequest(Conversation, BaseRequest):
    """Body of /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: ReasoningEffort | None = None
    echo: bool | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Fields that vLLM adds to OpenAI's API.
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    def check(self) -> None:
        super().check()
        if not self.tools and self.tool_choice is None:
            return
        if self._chosen().mode in ("required", "named") and self.continue_final_message:
            name = "continue_final_message"
            raise invalid(
                f"{name} cannot be combined with a tool_choice that forces calls: leave out one of "
                "them",
                name,
            )

    def check_content(self, bounds: RequestBounds, model: ModelLimits) -> None:
        super().check_content(bounds, model)
        check_json("tool_choice", self.tool_choice, MAX_TOOL_CHOICE_BYTES)
        check_allowed_tokens(self.allowed_token_ids, model)

    def repeats_final_text(self) -> bool:
        return bool(self.echo)

    def _chosen(self) -> ToolChoice:
        """Return the tool choice of the body."""
        return read_tool_choice(self.tool_choice, self.tools or ())

    def forced_schema(self) -> str:
        if not self.tools:
            return ""
        is_parallel = self.parallel_tool_calls is not False
        return forced_schema(self._chosen(), self.tools or (), is_parallel)

    def parsing_options(self, chat: Chat) -> ParsingOptions:
        """Return the options for the parsing of the answers to the body's `chat`."""
        # If a helper process has parsed the body, the tools are in `chat` only.
        is_forced, named = bool(chat.forced_schema), isinstance(self.tool_choice, dict)
        return ParsingOptions(
            reads_calls=bool(chat.tools),
            is_forced=is_forced,
            forced_name=self.tool_choice["function"]["name"] if is_forced and named else "",
            is_parallel=self.parallel_tool_calls is not False,
            shows_reasoning=self.include_reasoning is not False,
            is_strict=bool(chat.strict_calls),
            continues_message=bool(self.continue_final_message),
            tools=ToolParameters(chat.functions),
        )

    def template_tools(self) -> Sequence[Mapping[str, Any]]:
        # Hide the tools for the choice "none", so that the model does not try to call them.
        return () if not self.tools or self._chosen().mode == "none" else super().template_tools()

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def client_names(self) -> Mapping[str, str]:
        names = {**super().client_names(), "prompt": "messages"}
        if self.tool_choice not in (None, "none", "auto"):
            names["structured_outputs"] = "tools"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        return names

    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise invalid(
                    "top_logprobs needs logprobs to be true: set logprobs to true, or leave out "
                    "top_logprobs",
                    "top_logprobs",
                )
            return None
        return self.top_logprobs or 0

    def template_variables(self, known: Collection[str]) -> Mapping[str, Any]:
        variables = super().template_variables(known)
        name = "reasoning_effort"
        if self.reasoning_effort is None:
            return variables
        if name in variables:
            raise invalid(f"{name} is also in chat_template_kwargs: set only one of them", name)
        if name not in known:
            raise invalid(f"this model's chat template does not read {name}: leave it out", name)
        return {**variables, name: self.reasoning_effort}


class TokenizeFields(OpenAiBody):
    """Fields of every body of /tokenize."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeTextRequest(TokenizeFields):
    prompt: str


class TokenizeChatRequest(Conversation, TokenizeFields):
    pass


class DetokenizeRequest(OpenAiBody):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Ids


def check_allowed_tokens(tokens: Sequence[int] | None, model: ModelLimits) -> None:
    """Refuse a list of allowed tokens that is longer than the vocabulary."""
    check_num_tokens("allowed_token_ids", len(tokens or ()), model.vocab_size)


def _is_tokens(item: object) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)


def _tuple(tokens: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if tokens is None else tuple(tokens)


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for token in bias:
        if not re.fullmatch(r"[0-9]{1,10}", token):
            raise invalid(
                f"the keys of logit_bias must be token ids, not {token[:40]!r}", "logit_bias"
            )
    return {int(token): value for token, value in bias.items()}
