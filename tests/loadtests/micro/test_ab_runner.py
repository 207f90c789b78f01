import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.micro.ab_runner import (
    MeasurementFailed,
    Quantiles,
    Setup,
    checked,
    run,
    steady_rate,
    whole_rate,
)


def outcome(arrivals: list[float], counts: list[int | None] | None = None) -> Outcome:
    made = Outcome(
        0, 0.0, 1, len(arrivals), arrivals=arrivals, counts=counts or [1] * len(arrivals)
    )
    made.output_len = sum(count or 0 for count in made.counts)
    return made


def test_quantiles_match_hand_computed_values() -> None:
    quantiles = Quantiles.of([float(n) for n in range(101)])
    assert (quantiles.median, quantiles.low, quantiles.high, quantiles.count) == (50, 10, 90, 101)
    assert str(quantiles) == "50 (80% of 101: 10 to 90)"
    assert Quantiles.of([3.0]) == Quantiles(3.0, 3.0, 3.0, 1)


def test_rates_match_hand_computed_values() -> None:
    early = outcome([1.0, 2.0, 3.0, 4.0, 5.0])  # the first request to end
    late = outcome([1.0, 3.0, 4.5, 6.0], [1, 3, 4, 9])  # the last request to begin decoding
    # Between 3.0 and 5.0 s, both requests decode: `early` gets two tokens, and `late` gets four.
    assert steady_rate([early, late]) == pytest.approx(6 / 2)
    assert whole_rate([early, late]) == pytest.approx(22 / 6)


@given(st.integers(1, 20), st.integers(3, 50), st.floats(0.001, 1.0))
def test_steady_decoding_has_its_rate(count: int, length: int, step: float) -> None:
    outcomes = [outcome([step * n for n in range(1, length + 1)]) for _ in range(count)]
    assert steady_rate(outcomes) == pytest.approx(count / step)
    assert whole_rate(outcomes) == pytest.approx(count / step)


def test_requests_that_never_decode_together_have_no_rate() -> None:
    with pytest.raises(MeasurementFailed, match="longer answers"):
        steady_rate([outcome([1.0, 2.0, 3.0]), outcome([2.0, 3.0, 4.0])])


def test_failed_request_fails_the_measurement() -> None:
    failed = Outcome(1, 0.0, 1, 1, error="gone")
    with pytest.raises(MeasurementFailed, match="1 of 2 requests failed: gone"):
        checked([outcome([1.0]), failed])
    assert len(checked([outcome([1.0])])) == 1


def test_the_server_gets_the_same_model_and_threads() -> None:
    assert Setup(model="/m", threads=3).serve_arguments() == ["/m", "--threads", "3"]
    shared = Setup(model="/m", default_threads=True)
    assert shared.serve_arguments() == ["/m"]
    assert shared.engine_threads == len(os.sched_getaffinity(0))
    assert (Setup().model_folder / "config.json").is_file()


def test_result_is_saved_with_the_configuration(tmp_path: Path) -> None:
    async def measure() -> dict[str, Any]:
        return {"ratio": 0.9}

    saved = tmp_path / "o.json"
    assert run(measure, {"threads": 1}, str(saved)) == 0
    result = json.loads(saved.read_text())
    assert (result["ratio"], result["config"]) == (0.9, {"threads": 1})
    assert result["machine"]["memory_gib"] > 0


def test_failed_measurement_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    async def measure() -> dict[str, Any]:
        raise MeasurementFailed("nothing to compare")

    assert run(measure, {}, "") == 1
    assert capsys.readouterr().err == "nothing to compare\n"


_INTERRUPTED = """
import asyncio, signal
from penstock.loadtests.micro.ab_runner import run

async def measure():
    try:
        signal.raise_signal({number})
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("ended")

exit(run(measure, {{}}, ""))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_measurement_ends_its_servers_after_a_signal(number: signal.Signals, code: int) -> None:
    script = _INTERRUPTED.format(number=int(number))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode, done.stderr) == ("ended\n", code, "")


def test_sigterm_ends_a_measurement_in_the_background_of_a_script() -> None:
    script = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN){_INTERRUPTED}"
    command = [sys.executable, "-c", script.format(number=int(signal.SIGTERM))]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 143
