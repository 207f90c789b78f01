"""Run the same requests under different schedules and compare the results bitwise."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.determinism_check import check_batch_invariance
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.results import StepResult
from penstock.workers.scheduling.sequence import NewSequence, Sibling
from tests.support.threads import threads

Bits = dict[tuple[int, int], list[Any]]
"""Results by key: (request, choice) has tokens with logprobs, and (request, -1) the prompt's
logprobs."""


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    num_choices: int = 1


@dataclass(frozen=True)
class Schedule:
    """Arrival times of requests, and limits on each step."""

    max_batched_tokens: int = 64
    num_blocks: int | None = None  # None means the engine's own number of blocks
    # Step at which each request arrives. If empty, all requests arrive at step 0.
    arrivals: tuple[int, ...] = ()
    # Requests that are dropped and resumed, with the number of steps before the drop.
    moved: dict[int, int] = field(default_factory=dict)
    shared: bool = True  # True if prompts share the prefix cache
    threads: int = 1


def play(engine: Engine, requests: Sequence[Request], schedule: Schedule) -> Bits:
    """Run the requests until the engine is empty; return results that can be compared bitwise."""
    player = _Player(engine, requests, schedule)
    with threads(schedule.threads):
        while player.left:
            player.step()
    engine.batcher.check()
    return player.bits


def few_requests(vocab_size: int) -> list[Request]:
    """Return three requests with logprobs: one long, one forked and sampled, and one short."""
    tokens = np.random.default_rng(3).integers(4, vocab_size, 90).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    drawn = replace(greedy, temperature=0.8, top_p=0.9, seed=5)
    return [
        Request(tokens[:70], greedy),
        Request(tokens[:33], replace(drawn, max_tokens=5), num_choices=2),
        Request(tokens[40:41], replace(greedy, max_tokens=9)),
    ]


SMALL_CHUNKS = Schedule(max_batched_tokens=11, arrivals=(0, 2, 25), moved={0: 9, 2: 4})
"""A schedule for `few_requests`: small chunks, and two requests dropped and resumed."""


def run_all_schedules(engine: Engine) -> list[Bits]:
    """Run `few_requests` under four schedules, whose results must be bitwise identical.

    1. Each request alone, with its prompt in at most two chunks.
    2. All requests together (`SMALL_CHUNKS`) in small chunks; two of them are dropped and resumed.
    3. One request after another, with the first prompt cached.
    4. All requests together, with too few blocks, so that some are preempted.
    """
    requests = few_requests(engine.spec.vocab_size)
    separate = {
        (number, choice): entries
        for number, request in enumerate(requests)
        for (_, choice), entries in play(engine, [request], Schedule(48, shared=False)).items()
    }
    assert len({token for entries in separate.values() for token, _ in entries}) > 10
    found = [separate, play(engine, requests, SMALL_CHUNKS)]
    late = Schedule(max_batched_tokens=30, arrivals=(0, 12, 30))
    found.append(play(engine, requests, late))
    assert engine.load().prompt_tokens_cached > 0
    assert engine.limits.block_size == 4
    found.append(play(engine, requests, Schedule(num_blocks=22)))
    assert engine.load().preemptions > 0
    return found


def run_all_schedules_after_warm_up(engine: Engine) -> list[Bits]:
    """Run the check that a worker makes when it starts, then `run_all_schedules`."""
    check_batch_invariance(engine)
    return run_all_schedules(engine)


class _Player:
    def __init__(self, engine: Engine, requests: Sequence[Request], schedule: Schedule) -> None:
        self.requests, self.schedule, self.engine = requests, schedule, engine
        limits = replace(
            engine.limits,
            max_batched_tokens=schedule.max_batched_tokens,
            num_blocks=schedule.num_blocks or engine.limits.num_blocks,
        )
        engine.reset_scheduler(limits)
        self.bits: Bits = {}
        self.left = set(range(len(requests)))
        self.attempts = dict.fromkeys(self.left, 0)
        self.steps = 0

    def step(self) -> None:
        for number, request in enumerate(self.requests):
            arrival = self.schedule.arrivals[number] if self.schedule.arrivals else 0
            if arrival == self.steps:
                self.submit(number, request)
            moves = arrival + self.schedule.moved[number] if number in self.schedule.moved else None
            if number in self.left and self.steps == moves:
                self.engine.drop((number, 0))
                self.attempts[number] = 1
                self.submit(number, request)
        self.record(self.engine.step())
        self.steps += 1

    def submit(self, number: int, request: Request) -> None:
        texts = [
            request.prompt + [token for token, _ in self.bits.get((number, choice), [])]
            for choice in range(request.num_choices)
        ]
        open_choices = [
            choice
            for choice, text in enumerate(texts)
            if len(text) - len(request.prompt) < (request.params.max_tokens or 0)
        ]
        if not open_choices:
            self.left.discard(number)
            return
        first, *others = open_choices
        salt = b"" if self.schedule.shared and not self.attempts[number] else b"%d" % number
        new = NewSequence(
            key=(number, self.attempts[number]),
            tokens=texts[first],
            num_prompt=len(request.prompt),
            params=request.params,
            choice=first,
            salt=salt,
            siblings=tuple(Sibling(choice, texts[choice]) for choice in others),
            prompt_known=1 + len(self.bits.get((number, -1), [])),
        )
        self.engine.submit(new)

    def record(self, result: StepResult) -> None:
        assert not result.failed
        for prompt in result.prompts:
            key: Any = prompt.key
            self.bits.setdefault((key[0], -1), []).extend(prompt.entries)
        output = result.output
        if output is not None:
            columns = (output.keys, output.choices.tolist(), output.tokens.tolist())
            for found, choice, token, logprobs in zip(*columns, result.logprobs, strict=True):
                number: Any = found
                self.bits.setdefault((number[0], choice), []).append((token, logprobs))
        self.left -= {key[0] for key in result.finished}  # type: ignore[index]
