"""Requests of the chaos test: a mix of all kinds, derived from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from penstock.protos import inference_pb2 as pb

SUBJECTS = ("a lighthouse", "two rivers", "the number nine", "a lost key", "rain", "an old bridge")
SENTENCES = (1, 4, 12, 30)  # sentences per prompt: from one KV block to several prefill chunks

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"temperature": 0.8},
    "several choices": {"temperature": 1.0, "n": 3},
    "stop strings": {"temperature": 0.9},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "several choices with logprobs": {"temperature": 0.7, "n": 2, "logprobs": 2},
}
"""Sampling parameters of each kind of request, except for seed and length."""

STOPS = (("the end of the", "and then and then"), (" you are ", " is not "))


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """A request whose own seed makes its answer reproducible."""

    number: int
    kind: str
    prompt: str
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()

    def message(self, name: str, **more: Any) -> pb.GenerateRequest:
        """Return the protobuf request with id `name`; `more` overrides sampling parameters."""
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
    own = {"seed": rng.getrandbits(63), "max_tokens": rng.randint(*lengths), "ignore_eos": True}
    stop = rng.choice(STOPS) if kind == "stop strings" else ()
    return ChaosRequest(number, kind, prompt, {**KINDS[kind], **own}, stop)
