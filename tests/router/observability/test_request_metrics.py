"""Request metrics: totals match the events, times match the clock, and memory is bounded."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.router.observability.explanations import Explanations
from penstock.router.observability.request_metrics import (
    FIRST_BOUNDS,
    OTHER_TENANT,
    FinishedRequest,
    Histogram,
    RequestMetrics,
)
from penstock.router.requests.open_requests import OpenRequests
from penstock.router.routing import events as ev
from penstock.router.routing.transfer_peers import TransferEndpoint
from tests.support.columns import NewToken, columns_of
from tests.support.silent_output import silent_output

NONE = ev.Finish.NONE
NAMES = {"t1": "key-1", "t2": "key-2"}


def request_of(number: int, tenant: str, num_prompt: int = 3) -> ev.Request:
    return ev.Request(number, [7] * num_prompt, SamplingParams(), tenant=tenant)


def requests_of(metrics: RequestMetrics) -> OpenRequests:
    return OpenRequests(metrics, Explanations(NAMES, "cost"))


def deliver(
    request: int, choice: int, position: int, num_tokens: int = 1, finish: ev.Finish = NONE
) -> list[NewToken]:
    return [
        NewToken(request, 1, choice, position + later, 7, finish) for later in range(num_tokens)
    ]


def plain(request: int, position: int = 0, num_tokens: int = 1) -> list[NewToken]:
    return deliver(request, 0, position, num_tokens)


@given(st.lists(st.floats(0, 100)))
def test_histogram_counts_each_value_in_the_first_bucket_that_holds_it(
    values: list[float],
) -> None:
    histogram = Histogram(FIRST_BOUNDS)
    for value in values:
        histogram.add(value)
    below = [sum(value <= bound for value in values) for bound in FIRST_BOUNDS]
    assert [sum(histogram.counts[: n + 1]) for n in range(len(FIRST_BOUNDS))] == below
    assert sum(histogram.counts) == len(values)
    assert histogram.total == sum(values)


def test_latencies_of_one_request() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    requests.open(request_of(1, "t1"), silent_output(2), 10.0)
    for position, moment in enumerate((10.5, 11.0, 13.0)):
        requests.deliver(columns_of(plain(1, position)), moment)
    requests.deliver(columns_of(deliver(1, 0, 3, finish=ev.Finish.LENGTH)), 14.0)
    metrics.ended(1, ev.Status.OK, 14.5)
    assert metrics.first_token.total == 0.5
    assert metrics.between_tokens.total == 3.5
    assert sum(metrics.between_tokens.counts) == 3
    assert metrics.per_token.total == 3.5 / 3
    assert metrics.request.total == 4.5
    assert {reason: n for reason, n in metrics.finished.items() if n} == {"length": 1}


def test_preemptions_are_counted_for_every_finished_request() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    for number in (1, 2, 3):
        requests.open(request_of(number, "t1"), silent_output(1), 10.0)
    for worker, preempted in (("a", [1, 1, 9]), ("b", [1, 2])):
        requests.observe(ev.Stepped(worker, ev.TokenColumns(), preempted=preempted), 11.0)
    metrics.ended(1, ev.Status.DEADLINE, 12.0)
    metrics.ended(2, ev.Status.CANCELLED, 12.0)
    metrics.ended(3, ev.Status.OK, 12.0)
    requests.observe(ev.Stepped("b", ev.TokenColumns(), preempted=[1]), 13.0)
    assert metrics.preemptions.total == 3 + 1
    assert metrics.preemptions.counts == [1, 1, 0, 1, 0, 0, 0, 0, 0]


def test_request_time_is_split_into_queue_prefill_and_decode() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    request = replace(request_of(1, "t1", num_prompt=9), num_choices=2, max_tokens=50)
    requests.open(request, silent_output(2), 10.0)
    metrics.accepted(1)
    for moment in (12.0, 13.0):  # first submission: to a prefill worker; second: to a decode worker
        metrics.submitted(ev.Submit("w", request, 1, [], [], None, 1), moment)
    for position, moment in enumerate((15.0, 19.0)):
        requests.deliver(columns_of(plain(1, position)), moment)
    ended = metrics.ended(1, ev.Status.OK, 20.0)
    assert (metrics.queue.total, metrics.prefill.total, metrics.decode.total) == (2.0, 3.0, 4.0)
    assert metrics.inference.total == 7.0
    assert (metrics.prompt_lengths.total, metrics.answer_lengths.total) == (9, 2)
    assert (metrics.choices.total, metrics.max_tokens.total) == (2, 50)
    assert metrics.prompt_tokens == 9
    assert ended == FinishedRequest(request, "key-1", "stop", 2, 2.0, 5.0, 10.0)
    assert metrics.ended(1, ev.Status.OK, 21.0) is None


def test_request_that_never_ran_has_only_a_total_time() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    requests.open(request_of(1, "who"), silent_output(2), 0.0)
    metrics.accepted(1)
    ended = metrics.ended(1, ev.Status.OVERLOADED, 1.0)
    assert ended is not None
    assert (ended.tenant, ended.reason, ended.seconds) == (OTHER_TENANT, "overloaded", 1.0)
    assert (ended.queued, ended.first_token) == (None, None)
    assert sum(metrics.queue.counts) == sum(metrics.answer_lengths.counts) == 0


def test_request_that_the_queue_refuses_is_not_counted() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    for number in (1, 2):
        requests.open(request_of(number, "t1", num_prompt=4), silent_output(), 0.0)
    assert metrics.prompt_tokens == 0
    ended = metrics.ended(1, ev.Status.OVERLOADED, 0.0)
    metrics.accepted(1)
    assert ended is not None, "its end is still logged and explained"
    assert (ended.reason, metrics.prompt_tokens) == ("overloaded", 0)
    assert sum(metrics.finished.values()) == sum(metrics.preemptions.counts) == 0
    metrics.accepted(2)
    metrics.ended(2, ev.Status.OVERLOADED, 1.0)
    assert (metrics.prompt_tokens_by_tenant["key-1"], metrics.finished["overloaded"]) == (4, 1)


def test_resumed_answer_that_ends_on_arrival_counts_its_prompt_once() -> None:
    metrics = RequestMetrics(NAMES)
    requests_of(metrics).open(request_of(1, "t1", num_prompt=4), silent_output(), 0.0)
    metrics.ended(1, ev.Status.OK, 0.0)
    metrics.accepted(1)
    assert (metrics.prompt_tokens, sum(metrics.finished.values())) == (4, 1)


def test_choices_are_timed_separately_but_first_token_per_request() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    requests.open(request_of(1, "t1"), silent_output(2), 0.0)
    for position, moment in enumerate((1.0, 2.0)):
        both = [token for choice in (0, 1) for token in deliver(1, choice, position)]
        requests.deliver(columns_of(both), moment)
    metrics.ended(1, ev.Status.OK, 2.0)
    assert (sum(metrics.first_token.counts), metrics.first_token.total) == (1, 1.0)
    assert (sum(metrics.between_tokens.counts), metrics.between_tokens.total) == (2, 2.0)
    assert (sum(metrics.per_token.counts), metrics.per_token.total) == (2, 2.0)


def test_answer_cut_at_a_stop_string_counts_as_stop() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    requests.open(request_of(1, "t1"), silent_output(2), 0.0)
    requests.deliver(columns_of(plain(1)), 1.0)
    metrics.ended(1, ev.Status.OK, 1.0)
    assert metrics.finished["stop"] == 1


def test_answer_without_tokens_counts_as_length() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    requests.open(request_of(1, "t1"), silent_output(2), 0.0)
    metrics.ended(1, ev.Status.OK, 1.0)
    assert metrics.finished["length"] == 1
    assert sum(metrics.first_token.counts) == 0


def test_failed_request_has_a_reason_and_no_duration() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    failures = [status for status in ev.Status if status is not ev.Status.OK]
    for number, status in enumerate(failures):
        requests.open(request_of(number, "t1"), silent_output(2), 0.0)
        metrics.accepted(number)
        metrics.ended(number, status, 1.0)
    reasons = {reason for reason, n in metrics.finished.items() if n}
    assert len(reasons) == len(failures)
    assert "error" in reasons
    assert sum(metrics.request.counts) == 0


def test_stale_and_repeated_transfer_events_are_not_counted() -> None:
    metrics = RequestMetrics(NAMES)
    requests = requests_of(metrics)
    to = TransferEndpoint("d", "i", "address", "secret")
    requests.open(request_of(1, "t1"), silent_output(2), 0.0)
    metrics.sent(ev.Send("p", 1, 1, to, 2, 5, 0), 1.0)
    metrics.received(ev.Received("d", 1, 9, 5, 100), 1.5)
    metrics.received(ev.Received("d", 1, 2, 5, 100), 3.0)
    metrics.received(ev.Received("d", 1, 2, 5, 100), 4.0)
    assert (metrics.kv_transfer.total, metrics.kv_transfer_bytes) == (2.0, 100)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("open"), st.integers(1, 4), st.sampled_from(["t1", "t2", "who"])),
            st.tuples(st.just("token"), st.integers(1, 4), st.integers(0, 3)),
            st.tuples(st.just("end"), st.integers(1, 4), st.sampled_from(list(ev.Status))),
        )
    )
)
def test_totals_agree_with_the_events(events: list[tuple[str, int, object]]) -> None:
    metrics, live, ended, tokens = (
        RequestMetrics(NAMES),
        dict[int, str](),
        0,
        dict.fromkeys(NAMES, 0),
    )
    requests = requests_of(metrics)
    num_delivered: dict[int, int] = {}
    for now, (kind, request, detail) in enumerate(events):
        if kind == "open" and request not in live:
            live[request] = str(detail)
            num_delivered[request] = 0
            requests.open(request_of(request, str(detail)), silent_output(2), float(now))
            metrics.accepted(request)
        elif kind == "token":
            assert isinstance(detail, int)
            new = plain(request, num_delivered.get(request, 0), detail)
            requests.deliver(columns_of(new), float(now))
            if request in live:
                num_delivered[request] += detail
                tokens[live[request]] = tokens.get(live[request], 0) + detail
        elif kind == "end":
            assert isinstance(detail, ev.Status)
            requests.end(ev.EndRequest(request, detail), float(now))
            ended += live.pop(request, None) is not None
    assert sum(metrics.finished.values()) == ended
    generated = metrics.generated_by_tenant()
    # All unknown tenants share one label, so clients cannot create labels.
    assert set(generated) == {*NAMES.values(), OTHER_TENANT}
    assert generated["key-1"] == tokens["t1"]
    assert generated[OTHER_TENANT] == tokens.get("who", 0)
    assert len(metrics._open_requests) == len(live)
