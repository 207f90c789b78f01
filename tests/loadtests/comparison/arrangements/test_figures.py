import pytest

from penstock.loadtests.bench.metrics import Goals, Outcome
from penstock.loadtests.comparison.arrangements.figures import Sample, sample_of, summary, table
from penstock.loadtests.micro.ab_runner import MeasurementFailed


def sample(rate: float, first: float, good: float | None = None) -> Sample:
    return Sample(rate, first, 10.0, 20.0, 30.0, good, None if good is None else 0.5)


def outcome(first: float, gap: float, count: int = 3) -> Outcome:
    arrivals = [first + gap * at for at in range(count)]
    return Outcome(0, 0.0, 8, count, arrivals=arrivals, counts=[1] * count, output_len=count)


def test_ratios_are_to_the_best_static_arrangement_of_each_round() -> None:
    rounds = [
        {
            "64 streams": {
                "default": sample(100, 50, 3.0),
                "two-mixed": sample(100, 100, 2.0),
                "one-mixed": sample(80, 40, 4.0),
            }
        },
        {
            "64 streams": {
                "default": sample(90, 40, 3.0),
                "two-mixed": sample(60, 80, 1.0),
                "one-mixed": sample(90, 80, 1.5),
            }
        },
    ]
    found = summary(rounds)["64 streams"]
    ratios = found["ratios"]["default"]
    assert ratios["throughput_ratio"]["median"] == 1.0
    assert ratios["first_ratio"]["median"] == pytest.approx((1.25 + 0.5) / 2)
    assert ratios["good_ratio"]["median"] == pytest.approx((0.75 + 2.0) / 2)
    assert found["medians"]["default"]["output_per_second"] == 95
    text = table(summary(rounds))
    assert "two mixed workers" in text
    assert "penstock serve relative to the best static one, tokens/s: 1 (" in text


def test_default_with_slos_is_compared_with_static_arrangements_with_slos() -> None:
    measured = {
        "default": sample(90, 50),
        "default-slo": sample(80, 60),
        "two-mixed": sample(100, 100),
        "two-mixed-slo": sample(100, 30),
        "one-mixed": sample(400, 10),
    }
    found = summary([{"64 streams": measured}])
    ratios = found["64 streams"]["ratios"]
    assert ratios["default"]["throughput_ratio"]["median"] == pytest.approx(90 / 400)
    assert ratios["default-slo"]["throughput_ratio"]["median"] == pytest.approx(0.8)
    assert ratios["default-slo"]["first_ratio"]["median"] == pytest.approx(2.0)
    compared = "penstock serve with SLOs relative to the best static one with SLOs, tokens/s: 0.8 ("
    assert compared in table(found)


def test_there_are_no_ratios_without_the_default_or_a_static_arrangement() -> None:
    for name in ("default", "two-mixed"):
        found = summary([{"1 stream": {name: sample(10, 10)}}])["1 stream"]
        assert found["ratios"] == {}
        assert found["medians"][name]["good_per_second"] is None


def test_sample_counts_requests_that_meet_the_goals() -> None:
    outcomes = [outcome(1.0, 0.1), outcome(3.0, 0.1), outcome(1.0, 0.2)]
    found = sample_of(outcomes, 2.0, Goals(ttft=2000.0, tpot=150.0))
    assert found.good_per_second == 0.5
    assert found.good_fraction == pytest.approx(1 / 3)
    assert found.output_per_second == 4.5
    assert found.first_median == 1000.0
    assert sample_of(outcomes, 2.0, None).good_per_second is None


def test_gaps_between_tokens_are_told_from_mean_times_per_token() -> None:
    steady, stalled = outcome(1.0, 0.1, 21), outcome(1.0, 0.1, 21)
    stalled.arrivals[11:] = [at + 5.0 for at in stalled.arrivals[11:]]
    found = sample_of([steady, stalled, stalled], 20.0, None)
    assert found.tpot_p99 == pytest.approx(350.0)
    assert found.itl_p99 == pytest.approx(5100.0)
    heads = table(summary([{"1 stream": {"default": found}}])).splitlines()[0]
    assert "TPOT p99" in heads
    assert "ITL p99" in heads


def test_failed_request_fails_the_measurement() -> None:
    failed = outcome(1.0, 0.1)
    failed.error = "HTTP 500"
    with pytest.raises(MeasurementFailed, match="HTTP 500"):
        sample_of([failed], 1.0, None)
