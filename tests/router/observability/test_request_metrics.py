"""What is counted and timed: sums agree, times are those of the clock, memory does not grow."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.router.observability.request_metrics import (
    FIRST_BOUNDS,
    OTHER_TENANT,
    FinishedRequest,
    Histogram,
    RequestMetrics,
)
from penstock.router.routing import events as ev

NONE = ev.Finish.NONE
NAMES = {"t1": "key-1", "t2": "key-2"}


def asked(number: int, tenant: str, num_prompt: int = 3) -> ev.Request:
    return ev.Request(number, [7] * num_prompt, SamplingParams(), tenant=tenant)


def deliver(
    request: int, choice: int, position: int, num_tokens: int = 1, finish: ev.Finish = NONE
) -> ev.Deliver:
    return ev.Deliver(request, choice, position, [7] * num_tokens, [None] * num_tokens, finish)


def plain(request: int, position: int = 0, num_tokens: int = 1) -> ev.Deliver:
    return deliver(request, 0, position, num_tokens)


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_each_value_under_the_first_bound_that_holds_it(
    values: list[float],
) -> None:
    histogram = Histogram(FIRST_BOUNDS)
    for value in values:
        histogram.add(value)
    below = [sum(value <= bound for value in values) for bound in FIRST_BOUNDS]
    assert [sum(histogram.counts[: n + 1]) for n in range(len(FIRST_BOUNDS))] == below
    assert sum(histogram.counts) == len(values)
    assert histogram.total == sum(values)


def test_the_times_of_one_request() -> None:
    tally = RequestMetrics(NAMES)
    tally.opened(asked(1, "t1"), 10.0)
    for position, moment in enumerate((10.5, 11.0, 13.0)):
        tally.delivered([plain(1, position)], moment)
    tally.delivered([deliver(1, 0, 3, finish=ev.Finish.LENGTH)], 14.0)
    tally.ended(1, ev.Status.OK, 14.5)
    assert tally.first_token.total == 0.5
    assert tally.between_tokens.total == 3.5
    assert sum(tally.between_tokens.counts) == 3
    assert tally.per_token.total == 3.5 / 3
    assert tally.request.total == 4.5
    assert {reason: n for reason, n in tally.finished.items() if n} == {"length": 1}


def test_where_the_time_of_a_request_went() -> None:
    tally = RequestMetrics(NAMES)
    request = asked(1, "t1", num_prompt=9)
    tally.opened(request, 10.0)
    for moment in (12.0, 13.0):  # to one that prefills, then to one that decodes
        tally.submitted(ev.Submit("w", request, 1, [], [], None, 1), moment)
    for position, moment in enumerate((15.0, 19.0)):
        tally.delivered([plain(1, position)], moment)
    ended = tally.ended(1, ev.Status.OK, 20.0)
    assert (tally.queue.total, tally.prefill.total, tally.decode.total) == (2.0, 3.0, 4.0)
    assert (tally.prompt_lengths.total, tally.answer_lengths.total) == (9, 2)
    assert tally.prompt_tokens == 9
    assert ended == FinishedRequest(request, "key-1", "stop", 2, 2.0, 5.0, 10.0)
    assert tally.ended(1, ev.Status.OK, 21.0) is None


def test_one_that_nobody_ran_has_no_times_but_its_own() -> None:
    tally = RequestMetrics(NAMES)
    tally.opened(asked(1, "who"), 0.0)
    ended = tally.ended(1, ev.Status.OVERLOADED, 1.0)
    assert ended is not None
    assert (ended.tenant, ended.reason, ended.seconds) == (OTHER_TENANT, "overloaded", 1.0)
    assert (ended.queued, ended.first_token) == (None, None)
    assert sum(tally.queue.counts) == sum(tally.answer_lengths.counts) == 0


def test_choices_are_timed_apart_and_the_first_token_is_the_requests() -> None:
    tally = RequestMetrics(NAMES)
    tally.opened(asked(1, "t1"), 0.0)
    for position, moment in enumerate((1.0, 2.0)):
        tally.delivered([deliver(1, choice, position) for choice in (0, 1)], moment)
    tally.ended(1, ev.Status.OK, 2.0)
    assert (sum(tally.first_token.counts), tally.first_token.total) == (1, 1.0)
    assert (sum(tally.between_tokens.counts), tally.between_tokens.total) == (2, 2.0)
    assert (sum(tally.per_token.counts), tally.per_token.total) == (2, 2.0)


def test_an_answer_cut_at_a_stop_string_was_stopped() -> None:
    tally = RequestMetrics(NAMES)
    tally.opened(asked(1, "t1"), 0.0)
    tally.delivered([plain(1)], 1.0)
    tally.ended(1, ev.Status.OK, 1.0)
    assert tally.finished["stop"] == 1


def test_an_answer_that_was_to_have_no_token_has_its_length() -> None:
    tally = RequestMetrics(NAMES)
    tally.opened(asked(1, "t1"), 0.0)
    tally.delivered([deliver(1, 0, 0, 0, ev.Finish.LENGTH)], 1.0)
    tally.ended(1, ev.Status.OK, 1.0)
    assert tally.finished["length"] == 1
    assert sum(tally.first_token.counts) == 0


def test_what_fails_has_a_reason_and_no_duration() -> None:
    tally = RequestMetrics(NAMES)
    failures = [status for status in ev.Status if status is not ev.Status.OK]
    for number, status in enumerate(failures):
        tally.opened(asked(number, "t1"), 0.0)
        tally.ended(number, status, 1.0)
    reasons = {reason for reason, n in tally.finished.items() if n}
    assert len(reasons) == len(failures)
    assert "error" in reasons
    assert sum(tally.request.counts) == 0


def test_only_the_transfer_that_is_under_way_counts() -> None:
    tally = RequestMetrics(NAMES)
    to = ev.TransferEndpoint("d", "i", "address", "secret")
    tally.opened(asked(1, "t1"), 0.0)
    tally.sent(ev.Send("p", 1, 1, to, 2, 5, 0), 1.0)
    tally.received(ev.Received("d", 1, 9, 5, 100), 1.5)
    tally.received(ev.Received("d", 1, 2, 5, 100), 3.0)
    tally.received(ev.Received("d", 1, 2, 5, 100), 4.0)
    assert (tally.kv_transfer.total, tally.kv_transfer_bytes) == (2.0, 100)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("open"), st.integers(1, 4), st.sampled_from(["t1", "t2", "who"])),
            st.tuples(st.just("token"), st.integers(1, 4), st.integers(0, 3)),
            st.tuples(st.just("end"), st.integers(1, 4), st.sampled_from(list(ev.Status))),
        )
    )
)
def test_totals_agree_with_what_happened(story: list[tuple[str, int, object]]) -> None:
    tally, live, ended, tokens = RequestMetrics(NAMES), dict[int, str](), 0, dict.fromkeys(NAMES, 0)
    so_far: dict[int, int] = {}
    for now, (what, request, detail) in enumerate(story):
        if what == "open" and request not in live:
            live[request] = str(detail)
            so_far[request] = 0
            tally.opened(asked(request, str(detail)), float(now))
        elif what == "token":
            assert isinstance(detail, int)
            tally.delivered([plain(request, so_far.get(request, 0), detail)], float(now))
            if request in live:
                so_far[request] += detail
                tokens[live[request]] = tokens.get(live[request], 0) + detail
        elif what == "end":
            assert isinstance(detail, ev.Status)
            tally.ended(request, detail, float(now))
            ended += live.pop(request, None) is not None
    assert sum(tally.finished.values()) == ended
    generated = tally.generated_by_tenant()
    assert set(generated) == {*NAMES.values(), OTHER_TENANT}  # bounded, whoever asks
    assert generated["key-1"] == tokens["t1"]
    assert generated[OTHER_TENANT] == tokens.get("who", 0)
    assert len(tally._open_requests) == len(live)
