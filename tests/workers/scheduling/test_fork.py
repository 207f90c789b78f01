"""Several choices of one request: one prompt, shared blocks, and copy-on-write."""

import numpy as np
import pytest

from penstock.loadtests.simulator.model.hash_model import HashModel, copy_blocks, reference_answer
from penstock.workers.scheduling.sequence import (
    Admitted,
    Finished,
    Ints,
    NeverFits,
    NewSequence,
    Sibling,
    Yielded,
)
from tests.support.batcher_bench import Bench, sequence


def test_choices_compute_their_prompt_once_and_start_together() -> None:
    for length in (1, 3, 4, 5, 16, 33):
        bench = Bench()
        new = sequence("a", list(range(length)), 9, num_choices=4)
        bench.batcher.submit(new)
        bench.run()
        bench.expect(new)
        load = bench.batcher.load()
        assert (load.prompt_tokens_computed, load.prompt_tokens_cached) == (length, 0)
        assert bench.num_tokens == length + 4 * 8
        # Four choices share a partly filled block. Three of them copy it before they write to it.
        assert bench.num_copies == (3 if length % 4 else 0)
        events = bench.batcher.events()
        assert {type(event) for event in events[:4]} == {Admitted}
        assert events[4:] == [Finished("a")]


def test_choices_share_the_full_blocks_of_a_long_prompt() -> None:
    separate, forked = (Bench(num_blocks=64, max_batched_tokens=256) for _ in range(2))
    prompt = list(range(50))
    for choice in range(4):
        new = sequence(choice, prompt, 8, salt=b"%d" % choice)
        separate.batcher.submit(new)
    forked.batcher.submit(sequence("a", prompt, 8, num_choices=4))
    separate.run()
    forked.run()
    assert separate.peak_used == 4 * 15
    assert forked.peak_used == 12 + 4 * 3


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
    new = sequence("a", list(range(6)), 9, num_choices=3)
    bench.batcher.submit(new)
    bench.run()
    with pytest.raises(AssertionError):
        bench.expect(new)


def with_logs(lengths: list[int], prompt: list[int], max_tokens: int) -> NewSequence:
    """Return a resubmitted request whose choices have token logs of these lengths."""
    plain = sequence("a", prompt, max_tokens)
    logs = [reference_answer(prompt, plain.params, 64, i)[0][:n] for i, n in enumerate(lengths)]
    first, *others = [Sibling(choice, prompt + log) for choice, log in enumerate(logs)]
    return NewSequence("a", first.tokens, len(prompt), plain.params, siblings=tuple(others))


@pytest.mark.parametrize("lengths", [[3, 3], [5, 1, 2], [0, 3, 0], [4, 0], [9, 8]])
@pytest.mark.parametrize("length", [4, 6, 17])
def test_choices_continue_from_token_logs_of_any_lengths(lengths: list[int], length: int) -> None:
    bench = Bench()
    new = with_logs(lengths, list(range(length)), 10)
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)
    assert bench.batcher.load().prompt_tokens_computed == length


def test_other_choices_continue_after_one_is_dropped() -> None:
    bench = Bench()
    new = sequence("a", list(range(6)), 9, num_choices=3)
    bench.batcher.submit(new)
    bench.step()
    bench.step()
    bench.batcher.drop_choice("a", 0)
    bench.batcher.drop_choice("a", 7)
    bench.run()
    assert len(bench.answers["a"]) == 2
    for choice in (1, 2):
        assert bench.answers["a", choice] == reference_answer(range(6), new.params, 64, choice)[0]
    assert bench.batcher.events()[-1] == Finished("a")
    assert bench.batcher.load().used_blocks == 0


def test_dropped_leader_computes_the_prompt_for_the_other_choices() -> None:
    bench = Bench(max_batched_tokens=4)
    new = sequence("a", list(range(10)), 5, num_choices=3)
    bench.batcher.submit(new)
    bench.step()
    bench.batcher.drop_choice("a", 0)
    bench.batcher.drop_choice("a", 2)
    bench.run()
    assert "a" not in bench.answers
    assert bench.answers["a", 1] == reference_answer(range(10), new.params, 64, 1)[0]
    assert bench.batcher.events()[-1] == Finished("a")
    assert bench.batcher.load().used_blocks == 0


def test_choice_dropped_while_it_waits_for_a_cached_prompt_is_never_run() -> None:
    bench = Bench()
    prompt = list(range(8))
    bench.batcher.submit(sequence("before", prompt, 2))
    bench.run()
    new = with_logs([1, 1], prompt, 5)
    bench.batcher.submit(new)
    bench.batcher.drop_choice("a", 0)
    bench.run()
    assert "a" not in bench.answers
    assert bench.answers["a", 1] == reference_answer(prompt, new.params, 64, 1)[0][1:]
    assert bench.batcher.events()[-1] == Finished("a")
    assert bench.batcher.load().used_blocks == 0


def test_choice_with_an_answer_dropped_while_it_waits_is_no_longer_counted() -> None:
    """The choices continue answers of an earlier attempt."""
    bench = Bench()
    bench.batcher.submit(with_logs([1, 6], list(range(8)), 20))
    counted = bench.batcher.load().queued_tokens
    bench.batcher.drop_choice("a", 1)
    assert 0 < bench.batcher.load().queued_tokens <= counted
    bench.run()
    load = bench.batcher.load()
    assert (load.queued, load.queued_tokens) == (0, 0)


def test_choice_preempted_in_the_step_that_admitted_it_is_not_reported_as_admitted() -> None:
    bench = Bench(num_blocks=10, watermark=0, max_sequences=3, max_batched_tokens=11)
    prompt = list(range(14))
    bench.batcher.submit(sequence("before", prompt, 8, num_choices=3))
    while len(bench.answers.get(("before", 2), ())) < 7:
        bench.step()
    bench.batcher.request_yield("before")
    bench.batcher.events()
    new = with_logs([7, 7, 7], prompt, 8)
    bench.batcher.submit(new)
    num_preempted = bench.batcher.load().preemptions
    bench.batcher.plan()
    assert bench.batcher.load().preemptions == num_preempted + 1
    admitted = [event for event in bench.batcher.events() if isinstance(event, Admitted)]
    table = bench.batcher.table
    assert [(each.key, each.choice) for each in admitted] == [
        (table.keys[each.row], table.choices[each.row]) for each in admitted
    ]


def test_choices_yield_together_and_their_prompt_is_transferred() -> None:
    prompt = list(range(14))
    prefill, decode = Bench(), Bench()
    prefill.batcher.submit(sequence("p", prompt, 8, yield_after=1, num_choices=3))
    prefill.run()
    assert prefill.batcher.events()[-1] == Yielded("p", 14)
    assert prefill.batcher.load().leased_blocks == 4
    logs = [prefill.answers["p"], prefill.answers["p", 1], prefill.answers["p", 2]]
    first, *others = [Sibling(choice, prompt + log) for choice, log in enumerate(logs)]
    new = NewSequence(
        "d",
        first.tokens,
        14,
        sequence("d", prompt, 8).params,
        source_len=14,
        siblings=tuple(others),
    )
    decode.batcher.submit(new)
    decode.run()
    into = decode.batcher.reserved_blocks("d")
    copy_blocks(prefill.model, prefill.batcher.pin("p", 0), decode.model, into)
    decode.batcher.transfer_done("d")
    decode.run()
    decode.expect(new)
    assert decode.batcher.load().prompt_tokens_computed == 0


def test_more_choices_than_rows_never_fit() -> None:
    with pytest.raises(NeverFits, match=r"5 choices, but this worker runs at most 4 "):
        Bench().batcher.submit(sequence("a", [1], num_choices=5))


def test_choices_that_do_not_all_fit_are_preempted_and_finish() -> None:
    bench = Bench(num_blocks=7, watermark=0)
    new = sequence("a", list(range(5)), 20, num_choices=4)
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)
    assert bench.batcher.load().preemptions > 0
