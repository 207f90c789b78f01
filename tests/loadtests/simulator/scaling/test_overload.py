"""`penstock simulate overload`: its simulations, its goals, and invalid options."""

import json
from dataclasses import replace

import pytest

from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.scaling.call import Call
from penstock.loadtests.simulator.scaling.overload import (
    GREEDY,
    Outcome,
    Overload,
    load_of,
    main,
    missed,
    outcome_of,
    run,
)

TOY = Overload(workers=1, max_sequences=16, input_len="200", output_len="8-16", seconds=6.0)
GOOD = Outcome(10.0, 10.0, 1.0, 0.0, 0.1, 0.2, 0.03)


def test_goals_compare_the_overload_with_the_capacity_and_the_greedy_with_the_equal_run() -> None:
    outcomes = dict.fromkeys(("capacity", "overload", "equal", "greedy"), GOOD)
    assert missed(outcomes) == []
    assert missed({**outcomes, "overload": replace(GOOD, goodput=9.6, ttft_p99=0.39)}) == []
    slow = missed({**outcomes, "overload": replace(GOOD, goodput=9.4, ttft_p99=0.41)})
    assert slow == [
        "overload: goodput 0.940 of 0.95",
        "overload: p99 of the first token 2.05 of 2.0",
    ]
    assert missed({**outcomes, "greedy": replace(GOOD, goodput=9.4)}) == [
        "greedy: goodput 0.940 of 0.95"
    ]


def test_goodput_counts_served_requests_that_keep_both_goals() -> None:
    planned = Planned(0, 1.0, 10, 3)
    kept = Call(planned, first=1.9, last=1.98, num_tokens=3, status="ok")
    late = Call(planned, first=2.1, last=2.2, num_tokens=3, status="ok")
    slow = Call(planned, first=1.1, last=1.3, num_tokens=3, status="ok")
    refused = Call(planned, status="overloaded")
    outcome = outcome_of([kept, late, slow, refused], 2.0)
    assert (outcome.rate, outcome.goodput) == (2.0, 0.5)
    assert (outcome.kept, outcome.refused) == (0.25, 0.25)


def test_load_of_several_tenants_is_in_order_of_time() -> None:
    load, tenants = load_of(TOY, [("a", 5.0), ("b", 20.0)])
    assert [each.number for each in load] == list(range(len(load)))
    assert sorted(load, key=lambda each: each.due) == load
    assert tenants.count("b") > 2 * tenants.count("a") > 0


@pytest.mark.slow
def test_overload_and_a_greedy_tenant_are_survived_at_toy_size() -> None:
    """At these sizes, overload hardly affects goodput or other tenants; runs are reproducible."""
    rate = 12.0
    alone, above = run(TOY, [("", rate)]), run(TOY, [("", 10 * rate)])
    assert alone.refused == 0.0
    assert above.refused > 0.4
    assert above.goodput >= alone.goodput
    assert above.ttft_p99 < 1.0
    others = [(f"tenant-{number}", rate / 10) for number in range(1, 10)]
    assert run(TOY, [(GREEDY, 10 * rate), *others]).kept > 0.8
    assert run(TOY, [("", 10 * rate)]) == above


@pytest.mark.slow
def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers", "1", "--input-len", "200", "--output-len", "8-16", "--seconds", "4"]
    code = main([*flags, "--tries", "3"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["missed"] else 0)
    assert set(report) == {"options", "capacity", "overload", "equal", "greedy", "missed"}
    assert report["overload"]["rate"] > 2 * report["capacity"]["rate"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["--workers", "0"],
        ["--tries", "0"],
        ["--seed", "-1"],
        ["--seconds", "0"],
        ["--max-wait", "nan"],
        ["--factor", "0.5"],
        ["--input-len", "x"],
    ],
)
def test_invalid_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == 2
    assert capsys.readouterr().err.startswith("penstock simulate overload: ")
