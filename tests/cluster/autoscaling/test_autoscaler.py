"""The autoscaler: desired sizes of pools, their rate of change, and their limits."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.autoscaling.autoscaler import (
    INITIAL_SIZE_FADE_SECONDS,
    Autoscaler,
    Decision,
    PoolInputs,
    PoolLimits,
    ScalingPolicy,
    ServingWorker,
)
from penstock.common.worker_load import WorkerLoad

RATE = 1000.0  # prompt tokens per second of one worker
LIMITS = PoolLimits(least=0, most=64)
# Number of blocks of a worker. All fractions of this number in the tests are whole numbers.
NUM_BLOCKS = 600_000


def worker(
    name: str = "w",
    at: float = 0.0,
    *,
    running: int = 0,
    queued_tokens: int = 0,
    kv_share: float = 0.0,
    prompt_tokens: int = 10 * int(RATE),
    prompt_seconds: float = 10.0,
) -> ServingWorker:
    used = round(kv_share * NUM_BLOCKS)
    load = WorkerLoad(
        queued_tokens=queued_tokens,
        running=running,
        used_blocks=used,
        free_blocks=NUM_BLOCKS - used,
        prompt_tokens_computed=prompt_tokens,
        prompt_seconds=prompt_seconds,
    )
    return ServingWorker(name, at, load, sequences=running, max_sequences=16)


def workers(count: int, at: float = 0.0, **loads: Any) -> list[ServingWorker]:
    return [worker(f"w{index}", at, **loads) for index in range(count)]


def first(pool: str, state: PoolInputs, limits: PoolLimits = LIMITS, now: float = 0.0) -> Decision:
    (decision,) = Autoscaler({pool: limits}).decide({pool: state}, now)
    return decision


def test_prefill_pool_is_sized_to_compute_its_queue_within_the_allowed_wait() -> None:
    limits = replace(LIMITS, wait_seconds=2.0)
    state = PoolInputs(workers(4), waiting=3, waiting_tokens=9000)
    decision = first("prefill", state, limits)
    assert decision.desired == 5
    assert decision.queue_term == 4.5
    assert "9000 prompt tokens wait" in decision.reason


def test_tokens_queued_at_workers_count_as_waiting() -> None:
    assert first("prefill", PoolInputs(workers(2, queued_tokens=1500))).desired == 3


def test_queue_length_counts_until_the_prefill_rate_is_known() -> None:
    fresh = workers(3, prompt_tokens=0, prompt_seconds=0.0)
    decision = first("prefill", PoolInputs(fresh, waiting=5, waiting_tokens=10**6))
    assert decision.desired == 5
    assert "rate not known" in decision.reason


def test_prefill_pool_grows_with_arrivals_before_a_queue_builds_up() -> None:
    scaler = Autoscaler({"prefill": replace(LIMITS, busy=0.5)})
    for now, arrived in ((0.0, 0), (10.0, 20_000)):
        state = PoolInputs(workers(2, now), arrived_tokens=arrived)
        (decision,) = scaler.decide({"prefill": state}, now)
    assert decision.occupancy_term == pytest.approx(4)
    assert decision.desired == 4


def feed(scaler: Autoscaler, arrived: list[int], count: int = 1, every: float = 5.0) -> Decision:
    """Let `arrived[i]` tokens arrive in interval i; return the last decision."""
    total = 0
    for step, tokens in enumerate(arrived):
        now = step * every
        state = PoolInputs(workers(count, now, running=1), arrived_tokens=(total := total + tokens))
        (decision,) = scaler.decide({"prefill": state}, now)
    return decision


def test_pool_is_sized_for_the_largest_recent_burst() -> None:
    plain = ScalingPolicy(headroom=0, up=0)
    burst = [0, 20_000, *[0] * 30]
    decision = feed(Autoscaler({"prefill": LIMITS}, policy=plain), burst, count=3)
    assert decision.desired == 4
    burst_text = (
        "0 prompt tokens wait and 0 arrive per second, 4000 in the largest burst of the last 300 s"
    )
    assert burst_text in decision.reason
    longer = feed(Autoscaler({"prefill": LIMITS}, policy=plain), [0, 20_000, *[0] * 59])
    gone = feed(Autoscaler({"prefill": LIMITS}, policy=plain), [0, 20_000, *[0] * 70])
    assert (longer.occupancy_term, gone.occupancy_term) == (4.0, 0.0)


def test_headroom_applies_to_the_excess_of_bursts_over_the_average() -> None:
    scaler = Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(headroom=0.5))
    # 4000 tokens per second arrive in the burst, and 800 on average.
    decision = feed(scaler, [0, 20_000, 0, 0, 0, 0])
    assert decision.occupancy_term == pytest.approx(4.0 + 0.5 * 3.2)
    even = feed(Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(headroom=0.5)), [20_000] * 30)
    assert even.occupancy_term == pytest.approx(4.0 / LIMITS.busy)


def test_a_burst_is_remembered_for_twenty_cold_starts() -> None:
    policy = ScalingPolicy(down=100, headroom=0)
    assert [policy.memory(seconds) for seconds in (0, 1, 30, 60, 300)] == [
        250,
        250,
        600,
        1200,
        1500,
    ]
    scaler = Autoscaler({"prefill": LIMITS}, policy=policy)
    for now, total in ((0, 0), (5, 20_000), (600, 20_000), (606, 20_000)):
        state = PoolInputs(workers(1, now), arrived_tokens=total, cold_start=30.0)
        (decision,) = scaler.decide({"prefill": state}, now)
        expected = {0: 0.0, 5: pytest.approx(4.0 / LIMITS.busy), 600: 4.0, 606: 0.0}
        assert decision.occupancy_term == expected[now]


def test_pool_does_not_shrink_before_the_burst_memory_is_full() -> None:
    scaler, sizes = Autoscaler({"mixed": LIMITS}, policy=ScalingPolicy(down=10, down_step=0)), []
    for now in range(0, 30, 5):  # a burst is remembered for 25 s
        (decision,) = scaler.decide({"mixed": PoolInputs(workers(3, now, running=1))}, now)
        sizes.append(decision.desired)
    assert sizes == [3, 3, 3, 3, 3, 2]


def test_share_of_the_initial_size_is_kept_and_fades() -> None:
    policy = ScalingPolicy(down=10, down_step=0, hedge=0.65)
    scaler, count, sizes = Autoscaler({"prefill": LIMITS}, policy=policy), 9, []
    for now in range(0, 8000, 5):
        (decision,) = scaler.decide({"prefill": PoolInputs(workers(count, now, running=1))}, now)
        if decision.desired != count:
            sizes.append((now, decision.desired))
        count = decision.desired
    # The pool at first keeps 65% of its nine initial workers, that is, five workers. The share
    # falls to 0 in two hours. After about a seventh of these two hours, the pool keeps four
    # workers.
    assert sizes[:4] == [(10, 8), (15, 7), (20, 6), (25, 5)]
    assert sizes[4][1] == 4
    assert 1046 < sizes[4][0] < 1066
    assert sizes[-1][1] == 1


def test_reason_names_the_workers_kept_of_the_initial_size() -> None:
    scaler = Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(hedge=0.5))
    decision = feed(scaler, [0, 10], count=7)
    assert decision.desired == 7
    assert "3 of the initial 7 workers are kept for now" in decision.reason
    assert decision.occupancy_term == 3


def test_recent_burst_does_not_keep_the_last_worker() -> None:
    scaler = Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(down=20))
    scaler.decide({"prefill": PoolInputs(workers(1, 0))}, 0)
    scaler.decide({"prefill": PoolInputs(workers(1, 5), arrived_tokens=4000)}, 5)
    for now in (10, 40, 45, 62):
        state = PoolInputs(workers(1, now), arrived_tokens=4000)
        (decision,) = scaler.decide({"prefill": state}, now)
    assert decision.desired == 0


def test_work_done_before_a_new_worker_could_serve_adds_no_worker() -> None:
    state = PoolInputs(workers(4), waiting=9, waiting_tokens=30_000, cold_start=30.0)
    assert first("prefill", state).desired == 4
    # One worker needs 220 s for this work, which is due in 31 s.
    more = replace(state, waiting_tokens=340_000)
    assert first("prefill", more).queue_term == pytest.approx(220 / 31)
    starting = replace(more, pending=3)
    assert first("prefill", starting).desired == 7


def test_decode_pool_is_sized_to_keep_kv_usage_below_its_limit() -> None:
    decision = first("decode", PoolInputs(workers(4, kv_share=0.95, running=3)))
    assert decision.occupancy_term == pytest.approx(4 * 0.95 / 0.8)
    assert decision.desired == 5


def test_decode_pool_is_sized_to_have_rows_for_waiting_requests() -> None:
    assert first("decode", PoolInputs(workers(2, running=16), waiting=20)).desired == 4


def test_mixed_pool_takes_the_larger_of_both_needs() -> None:
    full = workers(2, kv_share=0.9, running=16)
    assert first("mixed", PoolInputs(full)).desired == 3
    assert first("mixed", PoolInputs(full, waiting=9, waiting_tokens=3900)).desired == 4


def test_short_prompts_that_wait_for_a_row_count_in_a_mixed_pool() -> None:
    full = PoolInputs(workers(2, running=16), waiting=20, waiting_tokens=60)
    assert first("mixed", full).desired == 4


def test_with_a_ttft_slo_queued_prompts_need_rows_only_if_workers_are_full() -> None:
    def desired(running: int) -> int:
        state = PoolInputs(workers(2, running=running), waiting=40, waiting_tokens=60)
        scaler = Autoscaler({"mixed": LIMITS}, policy=ScalingPolicy(hedge=0.5))
        return scaler.decide({"mixed": state}, 0.0)[0].desired

    assert desired(running=3) == 2
    assert desired(running=16) == 4, "all rows are in use"


def test_worker_without_a_recent_report_counts_as_loaded_like_the_others() -> None:
    loads = [*workers(3, at=100.0, kv_share=0.9, running=5), worker("gone", at=0.0)]
    decision = first("decode", PoolInputs(loads), now=101.0)
    assert decision.desired == 5
    assert decision.occupancy_term == pytest.approx(4 * 0.9 / 0.8)


def test_size_is_unchanged_without_any_recent_report() -> None:
    decision = first("decode", PoolInputs(workers(3, at=0.0), waiting=99), now=60.0)
    assert decision.desired == 3
    assert "recent loads" in decision.blocked_by


def test_starting_workers_are_not_requested_again() -> None:
    growing = PoolInputs(workers(2), pending=2, waiting=50, waiting_tokens=6000)
    assert first("prefill", growing).desired == 4
    more = replace(growing, waiting_tokens=7500)
    assert first("prefill", more).desired == 6


def test_pool_at_most_doubles_per_interval() -> None:
    scaler = Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(up=15))
    queue = {"waiting": 500, "waiting_tokens": 60_000}
    counts, pending = [2], 0
    for now in range(0, 40, 5):
        state = PoolInputs(workers(2, now), pending=pending, **queue)
        (decision,) = scaler.decide({"prefill": state}, now)
        pending = decision.desired - 2
        counts.append(decision.desired)
    assert counts == [2, 4, 4, 4, 4, 8, 8, 8, 8]
    assert "doubling" in decision.blocked_by


def test_empty_pool_grows_with_its_queue_and_shrinks_to_zero_when_idle() -> None:
    scaler = Autoscaler({"mixed": LIMITS}, policy=ScalingPolicy(down=60))

    def decide(state: PoolInputs, now: float) -> Decision:
        return scaler.decide({"mixed": state}, now)[0]

    assert decide(PoolInputs(), 0).desired == 0
    assert decide(PoolInputs(waiting=1, waiting_tokens=5), 1).desired == 1
    busy = PoolInputs(workers(1, at=20, running=1))
    assert decide(busy, 20).desired == 1
    idle = [decide(PoolInputs(workers(1, at=now)), now).desired for now in range(21, 100)]
    assert idle[: 20 + 60 - 21] == [1] * 59
    assert idle[60] == 0


def test_pool_shrinks_by_one_worker_at_a_time_after_a_delay() -> None:
    scaler = Autoscaler({"decode": LIMITS}, policy=ScalingPolicy(down=60, down_step=15))
    changes, count = [], 6
    for now in range(0, 200, 5):
        state = PoolInputs(workers(count, now, kv_share=0.8 * 2 / count, running=1))
        (decision,) = scaler.decide({"decode": state}, now)
        if decision.desired != count:
            changes.append((now, decision.desired))
            count = decision.desired
    assert changes == [(60, 5), (75, 4), (90, 3), (105, 2)]


def test_pool_does_not_shrink_while_a_worker_drains() -> None:
    scaler = Autoscaler({"decode": LIMITS}, policy=ScalingPolicy(down=10))
    for now in (0, 20):
        state = PoolInputs(workers(4, now), draining=1)
        (decision,) = scaler.decide({"decode": state}, now)
    assert decision.desired == 4
    assert "at a time" in decision.blocked_by


def test_time_at_the_minimum_does_not_delay_a_later_shrink() -> None:
    scaler = Autoscaler(
        {"decode": PoolLimits(least=2, most=9)}, policy=ScalingPolicy(down=10, down_step=100)
    )
    for now in range(0, 60, 5):
        (decision,) = scaler.decide({"decode": PoolInputs(workers(2, now))}, now)
        assert decision.desired == 2
    assert "its minimum" in decision.blocked_by
    (decision,) = scaler.decide({"decode": PoolInputs(workers(3, now + 5))}, now + 5)
    assert decision.desired == 2, decision.blocked_by


def test_gpu_budget_goes_to_the_pool_with_the_largest_shortage() -> None:
    limits = {"prefill": PoolLimits(most=9, gpus=1), "decode": PoolLimits(most=9, gpus=2)}
    states = {
        "prefill": PoolInputs(workers(1), waiting=9, waiting_tokens=2000),
        "decode": PoolInputs(workers(4, kv_share=0.95, running=16), waiting=30),
    }
    by_pool = {each.pool: each for each in Autoscaler(limits, 11).decide(states, 0.0)}
    assert (by_pool["prefill"].desired, by_pool["decode"].desired) == (2, 4)
    assert "budget of 11 GPUs" in by_pool["decode"].blocked_by


def test_draining_workers_count_in_the_gpu_budget() -> None:
    limits = {"decode": PoolLimits(most=9, gpus=1)}
    state = PoolInputs(workers(2, kv_share=0.95, running=16), draining=1, waiting=30)
    (decision,) = Autoscaler(limits, 4).decide({"decode": state}, 0.0)
    assert decision.desired == 3
    assert "budget of 4 GPUs" in decision.blocked_by


loads = st.builds(
    worker,
    name=st.sampled_from("abcdef"),
    at=st.floats(0, 100),
    queued_tokens=st.integers(0, 10**6),
    running=st.integers(0, 64),
    kv_share=st.floats(0, 1),
    prompt_tokens=st.integers(0, 10**7),
    prompt_seconds=st.floats(0, 10**4),
)
states = st.builds(
    PoolInputs,
    workers=st.lists(loads, max_size=5, unique_by=lambda load: load.name),
    pending=st.integers(0, 5),
    draining=st.integers(0, 2),
    waiting=st.integers(0, 10**6),
    waiting_tokens=st.integers(0, 10**9),
    arrived_tokens=st.integers(0, 10**12),
    cold_start=st.floats(0, 600),
)
steps = st.lists(
    st.tuples(st.floats(0, 50), st.fixed_dictionaries({"prefill": states, "decode": states})),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@given(steps, st.integers(0, 3), st.integers(3, 9), st.integers(0, 20))
def test_decisions_respect_bounds_budget_and_pace_and_are_deterministic(
    steps: list[tuple[float, dict[str, PoolInputs]]], least: int, most: int, budget: int
) -> None:
    """Sizes stay within bounds and budget, shrink by one worker at a time, and are reproducible."""
    limits = {"prefill": PoolLimits(least, most, 1), "decode": PoolLimits(least, most, 2)}
    scaler, again = Autoscaler(limits, budget), Autoscaler(limits, budget)
    now = 0.0
    for seconds, states in steps:
        now += seconds
        decisions = scaler.decide(states, now)
        assert decisions == again.decide(states, now)
        present = sum(limits[each.pool].gpus * each.count for each in decisions)
        desired = sum(limits[each.pool].gpus * each.desired for each in decisions)
        assert desired <= max(budget, present)
        for each in decisions:
            assert each.desired <= max(most, 0)
            assert each.reason
            assert str(each)
            assert each.desired >= min(each.count - 1, most)
            if each.desired < each.count <= most:
                assert not states[each.pool].draining
            if each.desired > each.count:
                assert each.desired <= max(least, 1, 2 * each.count)


@given(states, st.integers(0, 10**6))
def test_longer_queue_never_lowers_the_desired_size(state: PoolInputs, more: int) -> None:
    fuller = replace(
        state, waiting=state.waiting + more, waiting_tokens=state.waiting_tokens + more
    )
    assert first("prefill", fuller).desired >= first("prefill", state).desired


COLD_STARTS = st.sampled_from([0.0, 30.0])
arrivals = st.lists(st.tuples(st.floats(0.5, 60), st.integers(0, 10**5)), min_size=1, max_size=40)


def sizes_of(
    scaler: Autoscaler, arrived: list[tuple[float, int]], cold_start: float
) -> list[tuple[float, int]]:
    """Return (occupancy term, desired size) after each arrival; the pool always has three workers.

    The occupancy term is the number of workers that the arriving tokens need. The policy must have
    `down_step=0`. With another value, a decision to shrink the pool would delay the next decision
    to shrink it, although the pool here keeps its size.
    """
    now, total, found = 0.0, 0, []
    for seconds, tokens in arrived:
        now, total = now + seconds, total + tokens
        load = workers(3, now, running=1)
        state = PoolInputs(load, arrived_tokens=total, cold_start=cold_start)
        (decision,) = scaler.decide({"prefill": state}, now)
        found.append((decision.occupancy_term, decision.desired))
    return found


@given(arrivals, st.data(), st.integers(0, 10**6), COLD_STARTS)
def test_additional_arrivals_never_lower_the_desired_size(
    arrived: list[tuple[float, int]], data: st.DataObject, more: int, cold_start: float
) -> None:
    """Without headroom, additional arrivals never lower a later occupancy term or desired size."""
    at = data.draw(st.integers(0, len(arrived) - 1))
    additional = list(arrived)
    additional[at] = arrived[at][0], arrived[at][1] + more
    less, most = (
        sizes_of(
            Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(down_step=0, headroom=0)),
            each,
            cold_start,
        )
        for each in (arrived, additional)
    )
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in zip(less, most, strict=True))


@given(arrivals, st.integers(2, 5), COLD_STARTS)
def test_multiplied_arrivals_never_lower_the_desired_size(
    arrived: list[tuple[float, int]], users: int, cold_start: float
) -> None:
    many = [(seconds, users * tokens) for seconds, tokens in arrived]
    less, most = (
        sizes_of(
            Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(down_step=0)), each, cold_start
        )
        for each in (arrived, many)
    )
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in zip(less, most, strict=True))


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.floats(0.5, 900), st.integers(1, 20)), min_size=1, max_size=30),
    st.floats(0.1, 1.0),
)
def test_kept_share_of_the_initial_size_fades_linearly(
    first: int, sizes: list[tuple[float, int]], hedge: float
) -> None:
    """The occupancy term of an idle pool depends on its initial size, not on its current size."""
    scaler, now = Autoscaler({"prefill": LIMITS}, policy=ScalingPolicy(hedge=hedge)), 0.0
    for seconds, size in [(0.0, first), *sizes]:
        now += seconds
        state = PoolInputs(workers(size, now, running=1))
        (decision,) = scaler.decide({"prefill": state}, now)
        kept = int(hedge * max(1 - now / INITIAL_SIZE_FADE_SECONDS, 0.0) * first)
        assert decision.occupancy_term == (kept if kept > 1 else 0)
        assert decision.desired >= min(kept, size)


def test_with_a_ttft_slo_repeated_bursts_set_the_size_by_the_allowed_late_share() -> None:
    def last(late: float) -> Decision:
        scaler = Autoscaler(
            {"prefill": LIMITS}, policy=ScalingPolicy(down=30, hedge=0.5, late=late)
        )
        total = 0
        for now in range(0, 1800, 5):
            total += 40_000 if now % 300 == 0 else 0  # one worker needs 40 s for these tokens
            load = workers(6, now, running=1)
            state = PoolInputs(load, arrived_tokens=total, cold_start=30.0)
            (decision,) = scaler.decide({"prefill": state}, now)
        return decision

    # 40 s of work must be done in 6 s: an interval of 5 s and the allowed wait of 1 s.
    assert last(late=0.0).occupancy_term == 7
    assert last(late=0.1).occupancy_term == 5
    assert "with 5 workers at most 10% of the work would be late" in last(late=0.1).reason


@given(st.lists(st.integers(0, 10**5), min_size=3, max_size=12), st.integers(1, 3))
def test_periodic_bursts_within_the_memory_do_not_change_the_size(
    period: list[int], every: int
) -> None:
    period = [*period, 10_000]  # one burst that needs at least two workers
    scaler = Autoscaler(
        {"prefill": LIMITS}, policy=ScalingPolicy(down=20 * every, down_step=0, up=0, headroom=0)
    )
    count, total, sizes = 1, 0, []
    # The first rates cover less than a whole window. Run until the autoscaler has forgotten these
    # rates.
    for step in range(120 + 16 * len(period)):
        now = float(step * every)
        total += period[step % len(period)]
        state = PoolInputs(workers(count, now, running=1), arrived_tokens=total)
        (decision,) = scaler.decide({"prefill": state}, now)
        count = decision.desired
        sizes.append(count)
    assert len(set(sizes[-2 * len(period) :])) == 1
