"""The data and helpers that the answers of a call share in all of OpenAI's formats."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from penstock.common.text.token_bytes import TokenBytes
from penstock.protos import worker_pb2
from penstock.router.api.openai.json_fragments import TOKENS_PER_FRAGMENT, dumps, items_of
from penstock.router.requests.response_stream import Delta

MIN_LOGPROB = -9999.0
"""Log probability to send instead of minus infinity, which JSON lacks; vLLM sends it as well."""

Logprobs: TypeAlias = worker_pb2.TokenLogprobs


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Data shared by all answers of one call."""

    id: str
    created: int  # time of creation, in seconds since 1970
    model: str
    prompts: Sequence[Sequence[int]]
    token_bytes: TokenBytes
    system_fingerprint: str | None = None
    num_choices: int = 1  # choices per prompt
    num_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # whether logprobs name a token by its id instead of its text
    wants_usage: bool = False  # whether to send the usage at the end of a stream
    wants_continuous_usage: bool = False  # whether to send the usage in every chunk
    # For each prompt, the text that is prepended to its answers, in fragments.
    echo: Sequence[Sequence[str]] | None = None
    only_echo: bool = False  # whether to hide the generated tokens
    # For each prompt index, the logprobs of all tokens but the first. They are all known before
    # the prompt's first delta.
    prompt_logprobs: Mapping[int, Sequence[Logprobs]] = field(default_factory=dict)
    num_prompt_logprobs: int | None = None
    # For each prompt index, the number of cached tokens, known before the prompt's first delta.
    num_cached: Mapping[int, int] = field(default_factory=dict)

    @property
    def wants_only_text(self) -> bool:
        """Whether the chunk of a token differs from other chunks only in its text."""
        return self.num_logprobs is None and not (
            self.return_token_ids or self.only_echo or self.wants_continuous_usage
        )

    def token_name(self, token: int) -> str:
        """Return the name of a token in logprobs."""
        return name_of(self.token_bytes, token, self.tokens_as_ids)

    def visible(self, delta: Delta) -> Delta:
        """Return a delta without the generated tokens if `only_echo` is set."""
        if not self.only_echo:
            return delta
        return replace(delta, tokens=(), text="", logprobs=(), finish="length", stop=None)

    def echoed(self, delta: Delta) -> Sequence[str]:
        """Return the text that is prepended to the answer of a delta's choice, in fragments."""
        return self.echo[delta.index] if self.echo else ()

    def prompt_entries(self, index: int) -> list[Logprobs | None]:
        """Return the logprobs of each prompt token; the entry of the first token is None."""
        return [None, *self.prompt_logprobs.get(index, ())]

    def prompt_table(self, index: int) -> Iterator[str]:
        """Yield prompt logprobs in vLLM's format: per token, an object whose keys are token ids."""
        tokens, entries = self.prompts[index], self.prompt_entries(index)
        for start in range(0, len(tokens), TOKENS_PER_FRAGMENT):
            end = start + TOKENS_PER_FRAGMENT
            yield items_of(
                [
                    None if entry is None else self._ranked(token, entry)
                    for token, entry in zip(tokens[start:end], entries[start:end], strict=True)
                ]
            )

    def _ranked(self, token: int, entry: Logprobs) -> dict[str, Any]:
        count = self.num_prompt_logprobs or 0
        best = zip(entry.tokens[:count], entry.values[:count], range(1, count + 1), strict=False)
        return {
            str(name): {
                "logprob": finite(value),
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
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def usage(self, num_completion: int) -> dict[str, Any]:
        """Return the usage object for `num_completion` generated tokens."""
        num_prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached.values())},
        }

    def end_of_chunk(self, num_completion: int) -> str:
        """Return the end of a chunk of a stream that has sent `num_completion` tokens."""
        if self.wants_continuous_usage:
            return f',"usage":{dumps(self.usage(num_completion))}}}\n\n'
        return ',"usage":null}\n\n' if self.wants_usage else "}\n\n"


def name_of(token_bytes: TokenBytes, token: int, as_id: bool) -> str:
    """Return the name of a token in logprobs: its text, or its id."""
    return f"token_id:{token}" if as_id else token_bytes.text_of(token)


def finite(value: float) -> float:
    """Return the value, or `MIN_LOGPROB` if the value is lower, infinite or NaN."""
    return value if MIN_LOGPROB < value < math.inf else MIN_LOGPROB


def alternatives(entry: Logprobs | None) -> list[tuple[int, float]]:
    """Return the ids and log probabilities of the most probable tokens."""
    return [] if entry is None else list(zip(entry.tokens, entry.values, strict=True))
