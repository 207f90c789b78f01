"""The comparison of predictions with measurements, and the loads that are compared."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.loadtests.bench.clients import ServerUnusable
from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.calibration.compare import (
    Playing,
    WrongOptions,
    load_of,
    main,
    recorded_load,
    simulated,
    thinned,
)
from penstock.loadtests.simulator.calibration.comparison import (
    Latencies,
    Row,
    charts_of,
    compare,
)
from penstock.loadtests.simulator.calibration.server import (
    Arrangement,
    admin_address,
    arrangement_of,
)
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.page import page


@pytest.mark.parametrize(
    ("measured", "predicted", "is_met"),
    [
        ((1.0, 1.0), 1.09, True),  # within 10%
        ((1.0, 1.0), 1.11, False),
        ((0.5, 1.5), 1.4, True),  # differs by over 10% from the mean, but is between the two runs
        ((0.5, 1.5), 1.6, False),
        ((1.0,), 0.91, True),
        ((0.9, 1.0, 1.4), 1.3, False),  # a third run does not widen the range
        ((math.nan, math.nan), math.nan, False),  # no samples
        ((0.1, 0.1), math.nan, False),
        ((math.nan, 0.1), 0.1, False),
        ((0.0, 0.0), 0.0, False),
    ],
)
def test_prediction_is_met_near_the_mean_or_between_two_runs(
    measured: tuple[float, ...], predicted: float, is_met: bool
) -> None:
    row = Row("TTFT median", measured, predicted)
    assert row.is_met == is_met
    assert row.cells()[-1] == ("met" if is_met else "missed")


def test_comparison_has_median_and_p90_of_both_latencies() -> None:
    runs = [Latencies([0, 1, 2], [0.1, 0.2, 0.3], [0.01]), Latencies([0, 1, 2], [0.3] * 3, [0.03])]
    rows = compare(runs, Latencies([0, 1, 2], [0.2, 0.2, 0.4], []))
    assert [row.name for row in rows] == ["TTFT median", "TTFT p90", "TPOT median", "TPOT p90"]
    assert rows[0].measured == pytest.approx([0.2, 0.3])
    assert rows[0].predicted == pytest.approx(0.2)
    assert rows[1].predicted == pytest.approx(0.36)
    assert math.isnan(rows[3].predicted)
    assert rows[3].cells() == ["TPOT p90", "10.0, 30.0 ms", "- ms", "-", "100.0%", "missed"]


def test_answers_of_one_token_have_no_time_per_token_to_compare() -> None:
    run = Latencies([0, 1], [0.1, 0.2], [])
    assert [row.name for row in compare([run, run], run)] == ["TTFT median", "TTFT p90"]


def test_the_page_shows_percentiles_and_times() -> None:
    run = Latencies([0.0, 30.0], [0.1, 0.2], [0.01, 0.02])
    text = page("Measured", [], ["a"], [["b"]], charts_of([run, run], run))
    assert text.count("<svg") == 3
    assert text.count("measured, run 2") == 3
    assert ">90%</text>" in text
    assert ">0.5 min</text>" in text


def test_a_thinned_trace_keeps_the_times_and_divides_the_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{second:02}.5000000,{40 + second},3" for second in range(60)]
    path.write_text("\n".join(lines))
    whole, part = thinned(path, 29.0, 1.0, 4, 0), thinned(path, 29.0, 0.3, 4, 7)
    assert [one.due for one in whole] == [float(second) for second in range(30)]
    assert [one.input_len for one in whole] == [(40 + second) // 4 for second in range(30)]
    assert {one.output_len for one in whole} == {1}
    assert 3 <= len(part) <= 16
    assert part == thinned(path, 29.0, 0.3, 4, 7)
    assert {one.due for one in part} <= {one.due for one in whole}
    assert [one.number for one in part] == list(range(len(part)))


def test_a_recorded_load_is_played_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    rows = [
        {"due": 2.0, "input_len": 5, "output_len": 6},
        {"due": 1, "input_len": 3, "output_len": 4},
    ]
    path.write_text(json.dumps({"requests": rows}))
    assert [(one.due, one.input_len, one.output_len) for one in recorded_load(path)] == [
        (1.0, 3, 4),
        (2.0, 5, 6),
    ]
    path.write_text("{}")
    with pytest.raises(WrongOptions, match="save-rows"):
        recorded_load(path)


def test_a_burst_arrives_at_once_and_a_steady_load_over_time() -> None:
    burst = load_of(Playing(rate=float("inf"), num_requests=9), 0)
    assert [one.due for one in burst] == [0.0] * 9
    steady = load_of(Playing(rate=3.0, seconds=10.0), 0)
    assert len(steady) == 30
    assert steady[-1].due == pytest.approx(10.0)


def test_the_time_outside_of_the_engine_delays_the_first_token() -> None:
    given = Arrangement({"mixed": 1}, 8, 512, 200, 0.0, 0.0, 0.0)
    load = load_of(Playing(rate=float("inf"), num_requests=3, input_len="16", output_len="4"), 0)
    timing = Timing(launch=0.01, weights=0.0, token=0.0, pair=0.0, kv_token=0.0)
    plain = simulated(load, given, timing)
    slow = Timing(0.01, 0.0, 0.0, 0.0, 0.0, router=0.1, request=0.5, request_token=0.01)
    late = simulated(load, given, slow)
    assert len(set(plain.ttft)) == 1
    added = [after - before for after, before in zip(late.ttft, plain.ttft, strict=True)]
    assert added == pytest.approx([0.76, 0.86, 0.96], abs=0.02)
    assert late.tpot == pytest.approx(plain.tpot, rel=0.05)


def test_the_arrangement_is_read_from_the_status() -> None:
    numbers = {
        "places": 64,
        "max_batched_tokens": 512,
        "enough_prompt_tokens": 128,
        "block_size": 32,
        "blocks": {"used": 3, "free": 97},
    }
    workers = [
        {"role": "prefill", "state": "ready", "numbers": numbers},
        {
            "role": "decode",
            "state": "ready",
            "numbers": {**numbers, "places": 32, "max_batched_tokens": 256, "block_size": 16},
        },
        {"role": "decode", "state": "draining", "numbers": numbers},
        {"role": "", "state": "down", "numbers": None},
    ]
    cost = {"bytes_per_token": 512.0, "bytes_per_second": 1e9, "fixed_seconds": 0.002}
    status = {
        "workers": workers,
        "kv_transfer_cost": cost,
        "ttft_slo_seconds": 2.0,
        "tpot_slo_seconds": 0.15,
    }
    found = arrangement_of(status)
    pools = {"prefill": 1, "decode": 1}
    assert found == Arrangement(pools, 32, 256, 100, 512.0, 1e9, 0.002, 16, 2.0, 0.15, 128)
    with pytest.raises(ServerUnusable, match="no worker that is ready"):
        arrangement_of({**status, "workers": workers[2:]})
    del numbers["block_size"]
    with pytest.raises(ServerUnusable, match="has no 'block_size': use the same release"):
        arrangement_of(status)


def test_the_simulated_servers_have_the_slos_of_the_server() -> None:
    given = Arrangement({"mixed": 1}, 8, 512, 1000, 0.0, 0.0, 0.0)
    timing = Timing(launch=0.01, weights=0.0, token=0.001, pair=0.0, kv_token=0.0)
    load = [Planned(0, 0.0, 16, 64), Planned(1, 0.3, 2000, 2)]
    limited = simulated(load, replace(given, tpot_slo_seconds=0.03), timing)
    assert limited.tpot[0] < 0.9 * simulated(load, given, timing).tpot[0]
    # With an SLO of the first token, short prompts overtake the long ones that arrived before them.
    load = [Planned(0, 0.0, 512, 2)]  # its step shows the speed of the worker
    load += [Planned(number, 5.0, 2000 if number < 7 else 16, 2) for number in range(1, 13)]
    early = simulated(load, replace(given, ttft_slo_seconds=5.0), timing)
    assert max(early.ttft[7:]) < 0.5 * max(simulated(load, given, timing).ttft[7:])


def test_operators_address_follows_from_the_clients_address() -> None:
    assert admin_address("http://127.0.0.1:8000") == "http://127.0.0.1:8001"
    assert admin_address("grpc://10.0.0.5:9000") == "http://10.0.0.5:8001"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--timing FILE"),
        (["--timing", "none.yaml"], "No such file"),
        (["--keep", "0"], "must be above 0 and at most 1"),
        (["ftp://x"], "expected grpc://HOST:PORT or http"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = tmp_path / "timing.yaml"
    timing.write_text("launch: 0.01")
    given = (
        arguments
        if "--timing" in arguments or not arguments
        else [*arguments, "--timing", str(timing)]
    )
    assert main(given) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
