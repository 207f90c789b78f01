"""Sequences that run, yield and move between two batchers, with random interruptions.

The Hypothesis machine finds small counterexamples; the seeded schedules are longer.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.batcher import SchedulerConfig
from tests.support.batcher_world import BatcherWorld, move_and_drop

_BASE = list(range(1, 30))  # prompts are prefixes of this list, so they share cached blocks
_STOPS = [(), (3,), (5, 11, 19, 23, 29, 31)]
_SEARCHES: list[dict[str, Any]] = [
    {"use_beam_search": True, "n": 2},
    {"use_beam_search": True, "best_of": 2, "length_penalty": 2.0, "early_stopping": True},
    {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.0}
    | {"early_stopping": "never"},
]


def params_of(search: dict[str, Any], **given: Any) -> SamplingParams:
    return SamplingParams(**search, **given)


def without_search(params: SamplingParams) -> SamplingParams:
    return replace(params, use_beam_search=False, n=1, best_of=None)


def small(
    num_blocks: int,
    max_sequences: int,
    spare_tokens: int,
    enough_prompt_tokens: int,
    watermark: int,
    lease_fraction: float,
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=40,
        block_size=4,
        max_sequences=max_sequences,
        max_batched_tokens=max_sequences + spare_tokens,
        enough_prompt_tokens=enough_prompt_tokens,
        lease_fraction=lease_fraction,
        watermark=watermark,
    )


def in_state(*states: str) -> Callable[["BatcherMachine"], bool]:
    return lambda machine: bool(machine.world.in_state(*states))


class BatcherMachine(RuleBasedStateMachine):
    """Actions of a router and two workers, in any order."""

    which = st.integers(0, 1)
    few = st.integers(0, 3)

    @initialize(
        limits=st.builds(
            small,
            num_blocks=st.integers(10, 14),
            max_sequences=st.integers(1, 4),
            spare_tokens=st.integers(0, 12),
            enough_prompt_tokens=st.integers(0, 9),
            watermark=st.integers(0, 2),
            lease_fraction=st.sampled_from([0.25, 0.5, 1.0]),
        )
    )
    def start(self, limits: SchedulerConfig) -> None:
        self.world = BatcherWorld(limits)

    @precondition(lambda self: len(self.world.requests) < 12)
    @rule(
        which=which,
        shared=st.integers(0, 20),
        own=st.lists(st.integers(30, 33), min_size=1, max_size=5),
        params=st.builds(
            params_of,
            max_tokens=st.integers(1, 24),
            min_tokens=st.integers(0, 4),
            stop_token_ids=st.sampled_from(_STOPS),
            prompt_logprobs=st.sampled_from([None, None, 0]),
            search=st.sampled_from([{}, {}, *_SEARCHES]),
        ),
        salt=st.sampled_from([b"", b"", b"other"]),
        yield_after=few,
        num_choices=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(
        self,
        which: int,
        shared: int,
        own: list[int],
        params: SamplingParams,
        salt: bytes,
        yield_after: int,
        num_choices: int,
    ) -> None:
        worker, prompt = self.world.workers[which], _BASE[:shared] + own
        if not self.world.fits(prompt, params):
            params = without_search(params)
        self.world.submit(
            worker,
            prompt,
            params,
            salt=salt,
            yield_after=yield_after,
            num_choices=min(num_choices, self.world.limits.max_sequences),
        )

    @precondition(lambda self: bool(self.world.stoppable()))
    @rule(data=st.data())
    def stop_choice(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.world.stoppable()))
        self.world.stop_choice(request, data.draw(st.sampled_from(request.open_choices)))

    @precondition(in_state("submitted", "receiving"))
    @rule(data=st.data())
    def request_yield(self, data: st.DataObject) -> None:
        among = self.world.in_state("submitted", "receiving")
        self.world.request_yield(data.draw(st.sampled_from(among)))

    @precondition(in_state("yielded"))
    @rule(data=st.data(), which=which, yield_after=few)
    def resubmit(self, data: st.DataObject, which: int, yield_after: int) -> None:
        request = data.draw(st.sampled_from(self.world.in_state("yielded")))
        self.world.resubmit(request, self.world.workers[which], yield_after)

    @precondition(lambda self: bool(self.world.movable()))
    @rule(data=st.data(), yield_after=few, steps=few)
    def move(self, data: st.DataObject, yield_after: int, steps: int) -> None:
        request = data.draw(st.sampled_from(self.world.movable()))
        self.world.step(self.world.move(request, yield_after), steps)

    @precondition(lambda self: bool(self.world.movable()))
    @rule(data=st.data())
    def move_and_drop(self, data: st.DataObject) -> None:
        move_and_drop(self.world, data.draw(st.sampled_from(self.world.movable())))

    @precondition(in_state("submitted", "receiving"))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.world.drop(data.draw(st.sampled_from(self.world.in_state("submitted", "receiving"))))

    @precondition(lambda self: bool(self.world.leased()))
    @rule(data=st.data())
    def drop_lease(self, data: st.DataObject) -> None:
        leased = self.world.leased()
        self.world.drop_lease(data.draw(st.sampled_from(leased)))

    @rule(which=which)
    def plan(self, which: int) -> None:
        self.world.plan(self.world.workers[which])

    @rule(which=which)
    def withdraw(self, which: int) -> None:
        self.world.workers[which].withdraw()

    @rule(which=which)
    def handle_events(self, which: int) -> None:
        self.world.handle_events(self.world.workers[which])

    @rule(which=which, steps=st.integers(1, 8))
    def step_ahead(self, which: int, steps: int) -> None:
        self.world.step_ahead(self.world.workers[which], steps)

    @rule(which=which)
    def commit(self, which: int) -> None:
        self.world.commit(self.world.workers[which])

    @rule(which=which, steps=st.integers(1, 8))
    def step(self, which: int, steps: int) -> None:
        self.world.step(self.world.workers[which], steps)

    @precondition(lambda self: any(worker.plan for worker in self.world.workers))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        busy = [worker for worker in self.world.workers if worker.plan is not None]
        worker = data.draw(st.sampled_from(busy))
        assert worker.plan is not None
        row = data.draw(st.sampled_from(worker.plan.rows.tolist()))
        self.world.fail(worker, worker.batcher.table.keys[row])

    @precondition(lambda self: bool(self.world.without_transfer()))
    @rule(data=st.data())
    def start_transfer(self, data: st.DataObject) -> None:
        self.world.start_transfer(data.draw(st.sampled_from(self.world.without_transfer())))

    @precondition(lambda self: bool(self.world.transfers))
    @rule(data=st.data(), complete=st.booleans())
    def end_transfer(self, data: st.DataObject, complete: bool) -> None:
        transfer = data.draw(st.sampled_from(self.world.transfers))
        self.world.end_transfer(transfer, complete)

    @precondition(lambda self: any(worker.abandoned for worker in self.world.workers))
    @rule(which=which)
    def end_abandoned_writes(self, which: int) -> None:
        self.world.workers[which].end_abandoned_writes()

    @invariant()
    def block_counts_match(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


class Schedule:
    """Random actions, weighted so that many sequences are active at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.world = BatcherWorld(
            small(
                rng.randint(10, 13),
                rng.randint(1, 6),
                rng.randint(0, 12),
                rng.randint(0, 9),
                rng.choice([0, 0, 1, 2]),
                rng.choice([0.25, 0.5, 1.0]),
            )
        )
        # If True, no sequence is dropped or fails, so that more sequences run at a time.
        self.calm = rng.random() < 0.5

    def run(self, num_actions: int) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.submit, 5),
            (self.step, 12),
            (self.move, 4),
            (self.start_transfer, 4),
            (self.end_transfer, 3),
            (self.plan, 3),
            (self.step_ahead, 8),
            (self.withdraw, 1),
            (self.handle_events, 2),
            (self.yield_or_resume, 2),
            (self.disturb, 0 if self.calm else 2),
            (self.move_and_drop, 0 if self.calm else 4),
        ]
        functions, weights = zip(*actions, strict=True)
        for action in self.rng.choices(functions, weights, k=num_actions):
            action()
            self.world.check()
        self.world.close()

    def submit(self) -> None:
        rng = self.rng
        if len(self.world.in_state("submitted", "receiving", "yielded")) < 8:
            own = [rng.randint(30, 33) for _ in range(rng.randint(1, 5))]
            params = params_of(
                max_tokens=rng.randint(4, 39),
                min_tokens=rng.randint(0, 4),
                stop_token_ids=rng.choice([(), (), *_STOPS]),
                prompt_logprobs=rng.choice([None, None, 0]),
                search=rng.choice([{}, {}, *_SEARCHES]),
            )
            prompt = _BASE[: rng.randint(0, 20)] + own
            if not self.world.fits(prompt, params):
                params = without_search(params)
            self.world.submit(
                rng.choice(self.world.workers),
                prompt,
                params,
                salt=rng.choice([b"", b"", b"other"]),
                yield_after=rng.choice([0, 0, 1, 3]),
                num_choices=min(rng.choice([1, 1, 2, 3]), self.world.limits.max_sequences),
            )

    def step(self) -> None:
        self.world.step(self.rng.choice(self.world.workers), self.rng.randint(1, 4))

    def plan(self) -> None:
        self.world.plan(self.rng.choice(self.world.workers))

    def step_ahead(self) -> None:
        self.world.step_ahead(self.rng.choice(self.world.workers), self.rng.randint(1, 6))

    def withdraw(self) -> None:
        self.rng.choice(self.world.workers).withdraw()

    def handle_events(self) -> None:
        self.world.handle_events(self.rng.choice(self.world.workers))

    def move(self) -> None:
        if movable := self.world.movable():
            self.world.move(self.rng.choice(movable), self.rng.choice([0, 0, 2]))

    def move_and_drop(self) -> None:
        if movable := self.world.movable():
            move_and_drop(self.world, self.rng.choice(movable))

    def start_transfer(self) -> None:
        if waiting := self.world.without_transfer():
            self.world.start_transfer(self.rng.choice(waiting))

    def end_transfer(self) -> None:
        if self.world.transfers:
            self.world.end_transfer(self.rng.choice(self.world.transfers), self.rng.random() < 0.8)

    def yield_or_resume(self) -> None:
        request = self.rng.choice(
            self.world.in_state("submitted", "receiving", "yielded") or [None]
        )
        if request is None:
            return
        if request.state == "yielded":
            self.world.resubmit(request, self.rng.choice(self.world.workers), 0)
        else:
            self.world.request_yield(request)

    def disturb(self) -> None:
        rng, world = self.rng, self.world
        worker = rng.choice(world.workers)
        world.plan(worker)
        active = world.in_state("submitted", "receiving")
        leased = world.leased()
        kind = rng.randrange(5)
        if kind == 0 and active:
            world.drop(rng.choice(active))
        elif kind == 4 and world.stoppable():
            request = rng.choice(world.stoppable())
            world.stop_choice(request, rng.choice(request.open_choices))
        elif kind == 1 and leased:
            world.drop_lease(rng.choice(leased))
        elif kind == 2 and worker.plan is not None:
            row = rng.choice(worker.plan.rows.tolist())
            world.fail(worker, worker.batcher.table.keys[row])
        else:
            worker.end_abandoned_writes()


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", [0, 30])
def test_random_schedules_end_with_the_expected_answers(first_seed: int) -> None:
    num_preempted, num_cached, num_transferred, num_ahead = 0, 0, 0, 0
    num_copies, num_forks, num_scored, num_moved = 0, 0, 0, 0
    for seed in range(first_seed, first_seed + 30):
        schedule = Schedule(seed)
        schedule.run(100)
        num_transferred += schedule.world.num_transferred
        num_scored += schedule.world.num_scored
        for worker in schedule.world.workers:
            num_copies += worker.num_copies
            num_forks += worker.num_forks
            num_moved += worker.num_moved
            num_ahead += worker.num_ahead
            load = worker.batcher.load()
            num_preempted += load.preemptions
            num_cached += load.prompt_tokens_cached
    # The random schedules must include all of these cases.
    assert num_preempted > 10
    assert num_cached > 500
    assert num_transferred > 5
    assert num_copies > 20
    assert num_forks > 20
    assert num_scored > 100
    assert num_moved > 100
    assert num_ahead > 100
