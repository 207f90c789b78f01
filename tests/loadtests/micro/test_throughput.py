import pytest

from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.micro.ab_runner import MeasurementFailed, NeverAllDecoding
from penstock.loadtests.micro.throughput import Rates, figures


def outcome(*arrivals: float) -> Outcome:
    """Return a request that started at 0 s and received one token at each of these times."""
    count = len(arrivals)
    made = Outcome(0, 0.0, 1, count, arrivals=list(arrivals), counts=[1] * count)
    made.output_len = count
    return made


TOGETHER = [outcome(1.0, 2.0, 3.0), outcome(1.0, 2.0, 3.0)]
NEVER_TOGETHER = [outcome(1.0, 2.0, 3.0), outcome(2.0, 3.0, 4.0)]


def rates(*rounds: list[Outcome]) -> Rates:
    made = Rates()
    for outcomes in rounds:
        made.note(outcomes)
    return made


def test_ratios_of_rounds_in_which_all_requests_decoded_together() -> None:
    result = figures(rates(TOGETHER, TOGETHER), rates(TOGETHER, TOGETHER))
    assert result["decode_ratio"]["median"] == pytest.approx(1.0)
    assert result["decode_through_path"]["median"] == pytest.approx(2.0)
    assert result["with_prefill_engine_alone"]["median"] == pytest.approx(2.0)


def test_a_round_that_never_decodes_together_leaves_out_the_decode_rates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, direct = rates(TOGETHER, NEVER_TOGETHER), rates(TOGETHER, TOGETHER)
    result = figures(path, direct)
    assert result["with_prefill_ratio"]["count"] == 2
    assert not [name for name in result if name.startswith("decode")]
    assert "decode: not measured, because the requests never all" in capsys.readouterr().out
    with pytest.raises(NeverAllDecoding):
        path.decode_rates()


def test_a_failed_request_fails_the_measurement() -> None:
    failed = Outcome(1, 0.0, 1, 1, error="gone")
    with pytest.raises(MeasurementFailed, match="1 of 2 requests failed: gone"):
        rates([outcome(1.0), failed])
