"""Beam searches in the batcher: their rows are admitted, preempted and freed together."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from penstock.loadtests.simulator.model.hash_model import HashModel, copy_blocks
from penstock.workers.scheduling.sequence import (
    BeamRows,
    Finished,
    Ints,
    NeverFits,
    NewSequence,
    StepPlan,
    Yielded,
)
from tests.support.batcher_bench import Bench, beams, sequence


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_single_search_equals_the_reference(width: int, length: int) -> None:
    bench = Bench()
    new = beams("a", list(range(length)), width, 21, stop_token_ids=(3, 5))
    bench.submit(new)
    bench.run()
    bench.expect(new)
    assert bench.batcher.load().prompt_tokens_computed == length
    assert bench.batcher.load().used_blocks == 0
    assert bench.batcher.events()[-1] == Finished("a")


SEARCHES: list[dict[str, Any]] = [
    {"width": 4, "early_stopping": True, "stop_token_ids": (1, 2, 3, 4)},
    {"width": 2, "early_stopping": "never", "stop_token_ids": (7,), "length_penalty": 2.0},
    {"width": 3, "n": 1, "stop_token_ids": (9, 10), "min_tokens": 6},
    {"width": 2, "length_penalty": -1.0, "stop_token_ids": (11, 30)},
]


@pytest.mark.parametrize(("num_blocks", "preempts"), [(32, True), (200, False)])
def test_concurrent_searches_equal_the_reference(num_blocks: int, preempts: bool) -> None:
    bench = Bench(num_blocks=num_blocks, max_sequences=8, watermark=0)
    prompt = list(range(13))
    requests = [sequence(n, prompt[: 5 + n], 20, num_choices=1 + n % 3) for n in range(4)]
    requests += [
        beams(f"beams {n}", prompt[: 9 + n], max_tokens=18, **each)
        for n, each in enumerate(SEARCHES)
    ]
    for new in requests:
        bench.submit(new)
    bench.run()
    for new in requests:
        bench.expect(new)
    assert (bench.batcher.load().preemptions > 0) == preempts
    assert bench.batcher.load().used_blocks == 0


def test_searches_with_several_steps_in_flight_equal_the_reference() -> None:
    bench = Bench(num_stages=3, num_blocks=60, max_sequences=8)
    requests = [sequence(n, list(range(5 + n)), 20) for n in range(5)]
    requests += [
        beams(f"beams {n}", list(range(9 + n)), max_tokens=9, **SEARCHES[n]) for n in (0, 2)
    ]
    for new in requests:
        bench.submit(new)
    plans: deque[StepPlan] = deque()
    max_in_flight = 0
    while True:
        while (plan := bench.batcher.plan()) is not None:
            plans.append(plan)
        if not plans:
            break
        max_in_flight = max(max_in_flight, len(plans))
        bench.commit(plans.popleft())
        bench.batcher.check()
    for new in requests:
        bench.expect(new)
    assert max_in_flight > 1


class MissingCopies(HashModel):
    """Hash model that skips block copies."""

    def copy(self, pairs: Ints) -> None: ...


class WrongCopies(HashModel):
    """Hash model that copies from wrong source blocks."""

    def copy(self, pairs: Ints) -> None:
        super().copy(np.stack(((pairs[:, 0] + 1) % 32, pairs[:, 1]), axis=1))


@pytest.mark.parametrize("kind", [MissingCopies, WrongCopies])
def test_missing_or_wrong_block_copies_change_the_answers(kind: type[HashModel]) -> None:
    bench = Bench()
    bench.model = kind(bench.limits.num_blocks, bench.limits.block_size)
    new = beams("a", list(range(6)), 4, 12)
    bench.submit(new)
    bench.run()
    with pytest.raises(AssertionError):
        bench.expect(new)


def test_blocks_of_the_wrong_parent_change_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    new = beams("a", list(range(6)), 4, 12)
    original = bench.batcher.state.batch.beams.reorder

    def with_wrong_parents(beams: BeamRows, drawing: Ints) -> None:
        original(BeamRows(beams.rows, np.roll(beams.parents, 1)), drawing)

    monkeypatch.setattr(bench.batcher.state.batch.beams, "reorder", with_wrong_parents)
    bench.submit(new)
    bench.run()
    with pytest.raises(AssertionError):
        bench.expect(new)


@pytest.mark.parametrize("prompt_len", [1, 24])
def test_search_of_width_4_uses_at_most_half_the_blocks_of_four_sequences(
    prompt_len: int,
) -> None:
    together, apart = (
        Bench(num_blocks=200, max_model_len=90, max_batched_tokens=200, watermark=0)
        for _ in range(2)
    )
    prompt = list(range(prompt_len))
    together.submit(beams("a", prompt, 4, 60))
    for number in range(4):
        apart.submit(sequence(number, prompt, 60, salt=b"%d" % number))
    used: tuple[list[int], list[int]] = ([], [])
    while together.step() is not None and apart.step() is not None:
        for bench, counts in zip((together, apart), used, strict=True):
            counts.append(bench.batcher.load().used_blocks)
    assert len(used[0]) > 55
    assert together.peak_used <= apart.peak_used / 2
    assert sum(used[0]) <= sum(used[1]) / 2


@pytest.mark.parametrize("length", [5, 8, 21])
def test_search_preempted_in_any_step_draws_no_token_twice(length: int) -> None:
    new = beams("a", list(range(length)), 3, 15, length_penalty=3.0)
    undisturbed = Bench()
    undisturbed.submit(new)
    undisturbed.run()
    for step in range(1, 14, 2):
        bench = Bench(max_batched_tokens=7)
        bench.submit(new)
        for _ in range(step):
            bench.step()
        num_before = bench.num_tokens
        bench.batcher.state.waiting.push(bench.batcher._preemption.preempt())
        bench.batcher.check()
        bench.run()
        bench.expect(new)
        assert bench.num_tokens <= undisturbed.num_tokens + num_before
        # The preempted search samples no token twice.
        assert bench.num_draws == undisturbed.num_draws


def test_search_dropped_between_plan_and_commit_frees_its_blocks() -> None:
    for step in range(1, 8):
        bench = Bench()
        bench.submit(beams("a", list(range(6)), 4, 9))
        other = sequence("b", list(range(9)), 9)
        bench.submit(other)
        for _ in range(step):
            bench.step()
        plan = bench.batcher.plan()
        assert plan is not None
        bench.batcher.drop_choice("a", 1)  # ignored, because only a whole search can be dropped
        bench.batcher.drop("a")
        bench.beams.close("a")
        bench.commit(plan)
        bench.run()
        bench.expect(other)
        assert bench.batcher.load().used_blocks == 0
        assert "a" not in bench.searched


@pytest.mark.parametrize("step", range(1, 8))
def test_search_dropped_between_sampling_and_commit_does_not_change_another(step: int) -> None:
    bench = Bench(max_sequences=8, num_blocks=64)
    other = beams("b", list(range(9)), 4, 12)
    bench.submit(beams("a", list(range(6)), 4, 12))
    bench.submit(other)
    for _ in range(step):
        bench.step()
    plan = bench.batcher.plan()
    assert plan is not None
    drawn, rows, over = bench.beams.draw(plan, bench.batcher.table, bench.model.hash(plan))
    assert rows is not None
    assert not over
    bench.batcher.drop("a")
    bench.beams.close("a")
    bench.batcher.commit(plan, drawn, rows)
    bench.batcher.check()
    bench.run()
    bench.expect(other)
    assert bench.batcher.load().used_blocks == 0


@pytest.mark.parametrize("length", [2, 5, 14, 17])
@pytest.mark.parametrize("when", ["first fork", "asked"])
def test_only_the_prompt_of_a_search_is_transferred(length: int, when: str) -> None:
    prompt = list(range(length))
    prefill, decode = Bench(), Bench()
    yield_after = 1 if when == "first fork" else 0
    prefill.submit(beams("p", prompt, 3, 8, yield_after=yield_after))
    for _ in range(6):
        prefill.step()
    prefill.batcher.request_yield("p")
    assert prefill.batcher.events()[-1] == Yielded("p", length - 1)
    assert not prefill.answers
    assert not prefill.searched
    assert prefill.batcher.load().leased_blocks == -(-(length - 1) // 4)
    new = beams("d", prompt, 3, 8, source_len=length - 1)
    decode.submit(new)
    decode.run()
    into = decode.batcher.reserved_blocks("d")
    copy_blocks(prefill.model, prefill.batcher.pin("p", 0), decode.model, into)
    decode.batcher.transfer_done("d")
    decode.run()
    decode.expect(new)
    assert decode.batcher.load().prompt_tokens_computed == 1
    prefill.batcher.unpin("p")
    prefill.batcher.drop("p")
    assert prefill.batcher.load().leased_blocks == 0


def test_search_without_blocks_to_transfer_does_not_yield() -> None:
    bench = Bench()
    new = beams("a", [5], 3, 8, yield_after=1)
    bench.submit(new)
    bench.run()
    bench.expect(new)


def test_blocks_of_answers_of_a_search_are_not_cached() -> None:
    bench = Bench()
    bench.submit(beams("a", list(range(9)), 2, 20))
    bench.run()
    assert bench.batcher.load().cached_blocks == 2
    again = beams("b", list(range(9)), 2, 20)
    bench.submit(again)
    bench.run()
    bench.expect(again)
    assert bench.batcher.load().prompt_tokens_cached == 8


def search_of_9_tokens(**other: Any) -> NewSequence:
    return beams("a", list(range(9)), **other)


def test_search_that_can_never_fit_is_refused() -> None:
    bench = Bench(num_blocks=20)
    with pytest.raises(NeverFits, match=r"5 choices, but this worker runs at most 4 "):
        bench.batcher.submit(search_of_9_tokens(width=5))
    # The beams share the prompt's 2 full blocks. Each beam may need 5 more blocks.
    with pytest.raises(NeverFits, match=r"4 beams of 28 tokens may need 22 KV blocks .* has 20"):
        bench.batcher.submit(search_of_9_tokens(width=4, max_tokens=20))
    new = search_of_9_tokens(width=4, max_tokens=16)
    bench.submit(new)
    bench.run()
    bench.expect(new)
