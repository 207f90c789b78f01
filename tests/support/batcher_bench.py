"""Run a batcher with a hash model until it has no work, and build sequences for it."""

from dataclasses import fields
from typing import Any

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.model.hash_model import HashModel, reference_answer
from penstock.loadtests.simulator.model.hash_model_beams import (
    Answer,
    HashModelBeams,
    reference_beams,
)
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import (
    FinishReason,
    Key,
    NewSequence,
    Sibling,
    StepPlan,
    Yielded,
)


def limits(**changes: int | float) -> SchedulerConfig:
    settings: dict[str, int | float] = {
        "num_blocks": 32,
        "max_model_len": 64,
        "block_size": 4,
        "max_sequences": 4,
        "max_batched_tokens": 16,
    }
    return SchedulerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def sequence(
    key: Key,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    yield_after: int = 0,
    source_len: int = 0,
    log: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    salt: bytes = b"",
    num_choices: int = 1,
) -> NewSequence:
    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=stop_token_ids, min_tokens=min_tokens
    )
    return NewSequence(
        key=key,
        tokens=[*prompt, *log],
        num_prompt=len(prompt),
        params=params,
        yield_after=yield_after,
        source_len=source_len,
        salt=salt,
        siblings=tuple(Sibling(choice, prompt) for choice in range(1, num_choices)),
    )


_SAMPLING = {each.name for each in fields(SamplingParams)}


def beams(
    key: Key, prompt: list[int], width: int, max_tokens: int = 4, **other: Any
) -> NewSequence:
    """Return a sequence that runs a beam search with `width` beams.

    `other` holds fields of the sequence or of its sampling parameters.
    """
    given = {name: other.pop(name) for name in _SAMPLING & other.keys()}
    params = SamplingParams(
        **{"n": width, **given}, best_of=width, use_beam_search=True, max_tokens=max_tokens
    )
    siblings = tuple(Sibling(choice, prompt) for choice in range(1, width))
    return NewSequence(key, prompt, len(prompt), params, siblings=siblings, **other)


class Bench:
    """A batcher with a hash model; poisons free blocks before every step."""

    def __init__(self, **changes: int | float) -> None:
        self.limits = limits(**changes)
        self.batcher = Batcher(self.limits)
        self.model = HashModel(self.limits.num_blocks, self.limits.block_size)
        self.beams = HashModelBeams(self.limits.max_model_len)
        self.answers: dict[Key, list[int]] = {}
        self.searched: dict[Key, list[Answer]] = {}  # answers of finished beam searches
        self.finishes: dict[Key, FinishReason] = {}
        self.finished: list[Key] = []
        self.num_tokens = 0
        self.num_draws = 0  # number of tokens sampled, one per sampling row and step
        self.num_copies = 0  # number of copied blocks
        self.peak_used = 0

    def submit(self, new: NewSequence) -> None:
        self.batcher.submit(new)
        self.beams.open(new)

    def step(self) -> StepPlan | None:
        free = np.flatnonzero(self.batcher.pool.state == State.FREE).astype(np.int32)
        self.model.poison(free)
        plan = self.batcher.plan()
        self.peak_used = max(self.peak_used, self.batcher.load().used_blocks)
        if plan is not None:
            self.commit(plan)
        self.batcher.check()
        return plan

    def commit(self, plan: StepPlan) -> None:
        hashes = self.model.hash(plan)
        drawn, beams, over = self.beams.draw(plan, self.batcher.table, hashes)
        for key in over:
            self.batcher.finish(key)
            self.searched[key] = self.beams.close(key)
        output = self.batcher.commit(plan, drawn, beams)
        self.num_tokens += len(plan.tokens)
        self.num_draws += len(drawn)
        self.num_copies += len(plan.copies)
        for i, (key, choice) in enumerate(zip(output.keys, output.choices.tolist(), strict=True)):
            name = key if choice == 0 else (key, choice)
            answer = self.answers.setdefault(name, [])
            answer.append(int(output.tokens[i]))
            if output.finishes[i]:
                self.finishes[name] = FinishReason(int(output.finishes[i]))
                self.finished.append(name)

    def run(self, most: int = 500) -> None:
        for _ in range(most):
            if self.step() is None:
                return
        raise AssertionError(f"still busy after {most} steps")

    def expect(self, new: NewSequence) -> None:
        prompt, most = new.tokens[: new.num_prompt], self.limits.max_model_len
        if new.params.use_beam_search:
            assert self.searched[new.key] == reference_beams(prompt, new.params, most)
            assert new.key not in self.answers
            return
        for choice, tokens in [
            (new.choice, new.tokens),
            *((s.choice, s.tokens) for s in new.siblings),
        ]:
            answer, finish = reference_answer(prompt, new.params, most, choice)
            name = new.key if choice == 0 else (new.key, choice)
            assert self.answers[name] == answer[len(tokens) - new.num_prompt :]
            assert self.finishes[name] == finish


def transfer_blocks(
    prefill: Bench, decode: Bench, prompt: list[int], max_tokens: int
) -> NewSequence:
    """Prefill on one bench, then decode on the other with the leased KV blocks."""
    prefill.batcher.submit(sequence("p", prompt, max_tokens, yield_after=1))
    prefill.run()
    event = prefill.batcher.events()[-1]
    assert isinstance(event, Yielded)
    log = tuple(prefill.answers["p"])
    new = sequence("d", prompt, max_tokens, log=log, source_len=event.kv_len)
    decode.batcher.submit(new)
    decode.run()
    return new
