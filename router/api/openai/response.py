"""Answers in OpenAI's format, as complete responses and as chunks of server-sent events.

For speed, the constant parts of a chunk are serialized once per call.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from penstock.common.text.token_bytes import TokenBytes
from penstock.protos import worker_pb2
from penstock.router.requests.response_stream import Delta, merge

MIN_LOGPROB = -9999.0
"""Sent instead of minus infinity, which JSON cannot represent; vLLM sends the same value."""

DONE = "data: [DONE]\n\n"

Logprobs: TypeAlias = worker_pb2.TokenLogprobs

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Data shared by all answers of one call."""

    id: str
    created: int  # seconds since 1970
    model: str
    prompts: Sequence[Sequence[int]]
    token_bytes: TokenBytes
    num_choices: int = 1  # choices per prompt
    num_logprobs: int | None = None
    return_token_ids: bool = False
    wants_usage: bool = False
    echo: Sequence[str] | None = None  # texts of the prompts, prepended to the answers
    only_echo: bool = False  # hide the generated tokens
    # Prompt logprobs by prompt index, from token 1 on. Complete before the first delta.
    prompt_logprobs: Mapping[int, Sequence[Logprobs]] = field(default_factory=dict)
    num_prompt_logprobs: int | None = None

    def visible(self, delta: Delta) -> Delta:
        """Return a delta without the generated tokens if `only_echo` is set."""
        if not self.only_echo:
            return delta
        return replace(delta, tokens=(), text="", logprobs=(), finish="length", stop=None)

    def prompt_entries(self, index: int) -> list[Logprobs | None]:
        """Return the logprobs of each prompt token; the entry of the first token is None."""
        return [None, *self.prompt_logprobs.get(index, ())]

    def prompt_table(self, index: int) -> list[dict[str, Any] | None]:
        """Return prompt logprobs in vLLM's format: a dict by token id for each prompt token."""
        tokens = self.prompts[index]
        return [
            None if entry is None else self._ranked(token, entry, self.num_prompt_logprobs or 0)
            for token, entry in zip(tokens, self.prompt_entries(index), strict=True)
        ]

    def _ranked(self, token: int, entry: Logprobs, count: int) -> dict[str, Any]:
        best = zip(entry.tokens[:count], entry.values[:count], range(1, count + 1), strict=False)
        return {
            str(name): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": self.token_bytes.text_of(name),
            }
            for name, value, rank in ((token, entry.chosen, entry.rank), *best)
        }

    def choice_index(self, delta: Delta) -> int:
        """Return the index of a delta's choice among all choices of the call."""
        return delta.index * self.num_choices + delta.choice

    def header(self, kind: str) -> dict[str, Any]:
        """Return the fields at the start of each response object of type `kind`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self, num_completion: int) -> dict[str, int]:
        """Return the usage object for `num_completion` generated tokens."""
        num_prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }


class ResponseFormatter(Protocol):
    """A formatter of a call's answers for one OpenAI API: completions or chat completions."""

    def full_response(self, deltas: Sequence[Delta]) -> Mapping[str, Any]:
        """Return the complete response; `deltas` has one item per choice, in order of prompts."""
        ...

    def chunk(self, delta: Delta) -> str:
        """Return the server-sent events for some new tokens."""
        ...

    def end_of_stream(self) -> str:
        """Return the events that end a stream: usage, if requested, and the end marker."""
        ...


@dataclass(slots=True)
class StreamProgress:
    """Number of tokens sent in a stream, and number of characters sent for each choice."""

    num_tokens: int = 0
    lengths: dict[int, int] = field(default_factory=dict)  # characters sent, by choice index

    def is_first(self, index: int) -> bool:
        return index not in self.lengths

    def add(self, index: int, delta: Delta, num_chars: int) -> None:
        self.num_tokens += len(delta.tokens)
        self.lengths[index] = self.lengths.get(index, 0) + num_chars


class CompletionFormatter:
    """A formatter of `text_completion` objects."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._progress = StreamProgress()
        self._head = "data: " + dumps(context.header("text_completion"))[:-1]
        self._tail = ',"usage":null}\n\n' if context.wants_usage else "}\n\n"

    def full_response(self, deltas: Sequence[Delta]) -> Mapping[str, Any]:
        return {
            **self._context.header("text_completion"),
            "choices": [self._full_choice(delta) for delta in deltas],
            "usage": self._context.usage(self._progress.num_tokens),
        }

    def _full_choice(self, delta: Delta) -> dict[str, Any]:
        choice = self._choice(delta)
        if self._context.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._context.prompt_table(delta.index)
        return choice

    def chunk(self, delta: Delta) -> str:
        text = dumps(self._choice(delta))
        return f'{self._head},"choices":[{text}]{self._tail}'

    def end_of_stream(self) -> str:
        if not self._context.wants_usage:
            return DONE
        usage = dumps(self._context.usage(self._progress.num_tokens))
        return f'{self._head},"choices":[],"usage":{usage}}}\n\n{DONE}'

    def _choice(self, delta: Delta) -> dict[str, Any]:
        call, progress = self._context, self._progress
        index, delta = call.choice_index(delta), call.visible(delta)
        begins = progress.is_first(index)
        echoed = call.echo is not None and begins
        choice: dict[str, Any] = {
            "index": index,
            "text": (call.echo[delta.index] if call.echo and begins else "") + delta.text,
            "logprobs": None,
            "finish_reason": delta.finish or None,
            "stop_reason": delta.stop,
        }
        num_chars = 0
        if call.num_logprobs is not None:
            tokens, entries = list(delta.tokens), list(delta.logprobs)
            if echoed:
                tokens = [*call.prompts[delta.index], *tokens]
                entries = call.prompt_entries(delta.index) + entries
            logprobs = self._logprobs(tokens, entries, progress.lengths.get(index, 0))
            choice["logprobs"] = logprobs
            num_chars = sum(map(len, logprobs["tokens"]))
        if call.return_token_ids:
            if begins:
                choice["prompt_token_ids"] = list(call.prompts[delta.index])
            choice["token_ids"] = list(delta.tokens)
        progress.add(index, delta, num_chars)
        return choice

    def _logprobs(
        self, tokens: Sequence[int], entries: Sequence[Logprobs | None], offset: int
    ) -> dict[str, list[Any]]:
        """Return logprobs in the completions format: parallel lists, one entry per token.

        The alternatives of a token include the token itself.
        """
        name = self._context.token_bytes.text_of
        texts = [name(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.chosen) if entry else None for entry in entries],
            "tokens": texts,
            "top_logprobs": [
                {text: _finite(entry.chosen)} | self._top_logprobs(entry) if entry else None
                for text, entry in zip(texts, entries, strict=True)
            ],
        }

    def _top_logprobs(self, entry: Logprobs) -> dict[str, float]:
        pairs = _alternatives(entry)[: self._context.num_logprobs]
        return {self._context.token_bytes.text_of(token): _finite(value) for token, value in pairs}


class ChatFormatter:
    """A formatter of `chat.completion` objects."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._progress = StreamProgress()
        self._head = "data: " + dumps(context.header("chat.completion.chunk"))[:-1]
        self._tail = ',"usage":null}\n\n' if context.wants_usage else "}\n\n"

    def full_response(self, deltas: Sequence[Delta]) -> Mapping[str, Any]:
        choices = []
        for delta in deltas:
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            index = self._context.choice_index(delta)
            choices.append({"index": index, "message": message} | self._choice_fields(delta))
        answer = {
            **self._context.header("chat.completion"),
            "choices": choices,
            "usage": self._context.usage(sum(len(delta.tokens) for delta in deltas)),
        }
        if self._context.return_token_ids:
            answer["prompt_token_ids"] = list(self._context.prompts[0])
        if self._context.num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._context.prompt_table(0)
        return answer

    def chunk(self, delta: Delta) -> str:
        index = self._context.choice_index(delta)
        first = self._first_chunk(index) if self._progress.is_first(index) else ""
        self._progress.add(index, delta, 0)
        new = {"content": delta.text} if delta.text or not delta.finish else {}
        return first + self._event({"index": index, "delta": new} | self._choice_fields(delta))

    def end_of_stream(self) -> str:
        if not self._context.wants_usage:
            return DONE
        usage = dumps(self._context.usage(self._progress.num_tokens))
        return f'{self._head},"choices":[],"usage":{usage}}}\n\n{DONE}'

    def _first_chunk(self, index: int) -> str:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if not self._context.return_token_ids:
            return self._event(choice)
        prompt = dumps(list(self._context.prompts[0]))
        return self._event(choice, f',"prompt_token_ids":{prompt}')

    def _event(self, choice: Mapping[str, Any], more: str = "") -> str:
        return f'{self._head},"choices":[{dumps(choice)}]{more}{self._tail}'

    def _choice_fields(self, delta: Delta) -> dict[str, Any]:
        call = self._context
        rest: dict[str, Any] = {
            "logprobs": None if call.num_logprobs is None else self._logprobs(delta),
            "finish_reason": delta.finish or None,
            "stop_reason": delta.stop,
        }
        if call.return_token_ids:
            rest["token_ids"] = list(delta.tokens)
        return rest

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        """Return logprobs in the chat format: one object per token, with the token's bytes."""
        content = []
        for token, entry in zip(delta.tokens, delta.logprobs, strict=True):
            top = [self._token(other, value) for other, value in _alternatives(entry)]
            chosen = entry.chosen if entry else MIN_LOGPROB
            content.append(self._token(token, chosen) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        token_bytes = self._context.token_bytes
        return {
            "token": token_bytes.text_of(token),
            "logprob": _finite(value),
            "bytes": list(token_bytes.bytes_of(token)),
        }


def merge_choices(deltas: Sequence[Delta]) -> list[Delta]:
    """Return one merged delta per choice, in order of prompts and choices."""
    answers: dict[tuple[int, int], list[Delta]] = {}
    for delta in deltas:
        answers.setdefault((delta.index, delta.choice), []).append(delta)
    return [merge(answers[name]) for name in sorted(answers)]


def _finite(value: float) -> float:
    """Replace minus infinity by `MIN_LOGPROB`."""
    return value if value > MIN_LOGPROB else MIN_LOGPROB


def _alternatives(entry: worker_pb2.TokenLogprobs | None) -> list[tuple[int, float]]:
    return [] if entry is None else list(zip(entry.tokens, entry.values, strict=True))
