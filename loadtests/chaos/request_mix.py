"""Requests of the chaos test: a mix of all kinds, derived from a seed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from penstock.protos import inference_pb2 as pb

SUBJECTS = ("a lighthouse", "two rivers", "the number nine", "a lost key", "rain", "an old bridge")
# Sentences per prompt. Prompts have from one KV block up to several prefill chunks.
SENTENCES = (1, 4, 12, 30)

_WORDS = {"type": "string", "minLength": 8, "maxLength": 24}
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["letter", "parcel", "telegram"]},
        "stations": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"station": _WORDS, "minutes": {"type": "integer", "minimum": 3}},
                "required": ["station", "minutes"],
                "additionalProperties": False,
            },
            "minItems": 4,
            "maxItems": 6,
        },
    },
    "required": ["kind", "stations"],
    "additionalProperties": False,
}
"""JSON Schema of constrained answers and of tool arguments, which often have about 150 tokens."""

PATTERN = "([a-z]{2,9} ){20,40}[a-z]+[.]"
_TOOL = {"name": "send", "description": "Sends a letter.", "parameters": SCHEMA}
_NAMED = {"type": "function", "function": {"name": "send"}}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"temperature": 0.8},
    "several choices": {"temperature": 1.0, "n": 3},
    "stop strings": {"temperature": 0.9},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "several choices with logprobs": {"temperature": 0.7, "n": 2, "logprobs": 2},
    "schema": {"temperature": 0.9, "json_schema": json.dumps(SCHEMA)},
    "several choices of a pattern": {"temperature": 1.0, "n": 2, "regex": PATTERN},
    "named tool": {"temperature": 0.9},
    "required tools": {"temperature": 0.0, "frequency_penalty": 0.2},
}
"""Sampling parameters of each kind of request, except for seed and length."""

TOOL_CHOICES: Mapping[str, Any] = {"named tool": _NAMED, "required tools": "required"}
"""`tool_choice` of the kinds of requests that go over HTTP and call tools."""

STOPS = (("the end of the", "and then and then"), (" you are ", " is not "))


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """A request whose own seed makes its answer reproducible."""

    number: int
    kind: str
    prompt: str
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()

    @property
    def is_constrained(self) -> bool:
        """True if the answer must have a certain form: tool calls, a JSON schema or a regex."""
        return self.kind in TOOL_CHOICES or not {"json_schema", "regex"}.isdisjoint(self.sampling)

    def body(self) -> dict[str, Any]:
        """Return the body of a chat completion. `kind` must be a key of `TOOL_CHOICES`."""
        return {
            "messages": [{"role": "user", "content": self.prompt}],
            "tools": [{"type": "function", "function": _TOOL}],
            "tool_choice": TOOL_CHOICES[self.kind],
            "stream": True,
            "return_token_ids": True,
            **self.sampling,
        }

    def message(self, name: str, **more: Any) -> pb.GenerateRequest:
        """Return the protobuf request with id `name`. `more` overrides sampling parameters."""
        return pb.GenerateRequest(
            text=self.prompt,
            sampling=pb.Sampling(**{**self.sampling, **more}),
            stop=self.stop,
            request_id=name,
        )


def make_requests(count: int, seed: int, lengths: tuple[int, int]) -> Sequence[ChaosRequest]:
    """Make `count` requests, cycling through all kinds.

    `lengths` are the minimum and maximum number of answer tokens, both inclusive.
    """
    rng = Random(f"asks {seed}")
    kinds = list(KINDS)
    return [
        _make_request(rng, number, kinds[number % len(kinds)], lengths) for number in range(count)
    ]


def _make_request(rng: Random, number: int, kind: str, lengths: tuple[int, int]) -> ChaosRequest:
    subjects = rng.choices(SUBJECTS, k=rng.choice(SENTENCES))
    prompt = f"{number}. " + " ".join(f"Tell me about {subject}." for subject in subjects)
    own = {"seed": rng.getrandbits(63), "max_tokens": rng.randint(*lengths)}
    stop = rng.choice(STOPS) if kind == "stop strings" else ()
    request = ChaosRequest(number, kind, prompt, {**KINDS[kind], **own}, stop)
    # A constrained answer should reach its end token, so it may be twice as long.
    if request.is_constrained:
        own["max_tokens"] *= 2
        return replace(request, sampling={**request.sampling, **own})
    return replace(request, sampling={**request.sampling, "ignore_eos": True})
