"""The report of `make gpu`: figures in columns, comparisons with peers, and every failure."""

from penstock.loadtests.gpu.goals import Goal, Measured
from penstock.loadtests.gpu.sections import Outcome
from penstock.loadtests.gpu.table import columns, report
from tests.loadtests.gpu.test_goals import BOUNDS


def shown(outcomes: list[Outcome]) -> str:
    """Return the sections of the report, without the report's heading."""
    return report(outcomes, {"device": "x"}, is_small=False).partition("\n\n")[2]


def test_report_begins_with_the_device_and_ends_with_the_verdicts() -> None:
    outcomes = [
        Outcome("smoke", 5.0, [], {}),
        Outcome("tuning", 5.0, ["late"], {"not_run": "x"}),
        Outcome("two ranks", 5.0, [], {"not_run": "two GPUs are needed"}),
        Outcome("bounds", 5.0, [], {}),
    ]
    lines = report(outcomes, {"device": "H100", "torch": "2.11"}, is_small=True).splitlines()
    assert lines[:2] == [
        "device H100, torch 2.11",
        "REHEARSAL with tiny sizes: the times and goals mean nothing",
    ]
    assert lines[-3:] == ["passed: smoke, bounds", "FAILED: tuning", "NOT RUN: two ranks"]


def test_rows_show_the_goal_and_the_compared_peers() -> None:
    rows = [
        Measured("decode", Goal(most_us=300), 1e9, 2e12, 280e-6, True, {"torch": 1e-3}, {}),
        Measured("draw", Goal(least_of_peer=1), 1e9, 0, 500e-6, False, {}, {"FlashInfer": "no"}),
    ]
    figures = {"rows": [row.figures(BOUNDS) for row in rows], "failures": []}
    text = shown([Outcome("operations", 61.2, [], figures)])
    assert text.splitlines()[0] == "operations: passed in 61 s"
    decode, draw = text.splitlines()[2:4]
    assert decode.split() == [
        "decode",
        "280.0",
        "893%",
        "7143",
        "300",
        "µs",
        "or",
        "less",
        "yes",
        "torch",
        "3.57",
    ]
    assert "draw (uncaptured)" in draw
    assert draw.endswith("none, no FlashInfer")
    assert "not compared" in draw


def test_batches_and_failures_are_shown_together() -> None:
    row = {
        "step_us": 1234.5,
        "step_p99_us": 1300.0,
        "floor_us": 1000.0,
        "over_floor": 1.2345,
        "gap_p50_us": 3.0,
        "gap_p99_us": 9.0,
        "waits": ["a.py:3"],
    }
    figures = {"about": "a model", "batches": {"16": row}, "failures": ["one"]}
    lines = shown([Outcome("engine", 5.0, ["one", "two\nlines"], figures)]).splitlines()
    assert lines[:5] == ["engine: FAILED in 5 s", "    one", "    two", "    lines", "    a model"]
    assert lines[6].split() == ["16", "1234", "1300", "1000", "1.23x", "3", "9", "a.py:3"]


def test_cost_of_determinism_is_shown_with_its_range() -> None:
    row = {"plain_us": 100.0, "deterministic_us": 112.0, "times": 1.12, "least": 1.1, "most": 1.3}
    figures = {"about": "a model", "prices": {"decode step of 1": row}, "failures": []}
    line = shown([Outcome("deterministic", 5.0, [], figures)]).splitlines()[3]
    assert line.split()[-5:] == ["100", "112", "1.12x", "1.10x", "1.30x"]


def test_loads_are_shown_with_their_ratios_to_torch() -> None:
    ours = {"tokens_per_second": 5000.0, "first_token_p50_us": 2e4, "first_token_p99_us": 4e4}
    ratios = {"tokens_per_second": 1.5, "first_token_p50_us": 2.0, "first_token_p99_us": 0.5}
    row = {"ours": ours, "torch": {}, "ratios": ratios, "equal_first_tokens": 0.875}
    figures = {"about": "a model", "loads": {"prefill of 512": row}, "failures": []}
    line = shown([Outcome("beside torch", 5.0, [], figures)]).splitlines()[3]
    assert line.split()[3:] == ["5000", "1.50x", "20.0", "2.00x", "40.0", "0.50x", "88%"]


def test_tuned_tiles_are_shown_with_their_speed() -> None:
    row = {
        "default": {"rows": 16, "columns": 64},
        "best": {"rows": 16, "columns": 128},
        **{"gain": 1.25, "least_gain": 1.2},
        **{"num_timed": 30, "num_passed": 31, "num_candidates": 36},
    }
    figures = {"tuned": {"split_kv, 8b": row}, "failures": []}
    line = shown([Outcome("tuning", 5.0, [], figures)]).splitlines()[2]
    assert line.split()[2:] == ["16/64", "16/128", "1.25x", "1.20x", "30", "31", "36"]


def test_lost_peer_is_shown_for_each_backend() -> None:
    row = {"error": "reset", "lost_seconds": 0.5, "release_seconds": 0.25, "recovery_seconds": 2.0}
    figures = {"lost_peer": {"gloo": row, "NCCL on one GPU": {"not_run": "duplicate GPU"}}}
    lines = shown([Outcome("KV transfer", 5.0, [], figures)]).splitlines()[1:3]
    assert "noticed after 0.50 s (reset), pair released in 0.25 s" in lines[0]
    assert lines[1].strip() == "source killed, NCCL on one GPU: NOT RUN (duplicate GPU)"


def test_a_peer_whose_loss_was_not_noticed_is_shown_as_failed() -> None:
    figures = {"lost_peer": {"gloo": {"recovery_seconds": 2.0}}}
    text = shown([Outcome("KV transfer", 5.0, [], figures)])
    assert "source killed, gloo: FAILED\n" in text + "\n"


def test_columns_are_aligned() -> None:
    assert list(columns(("a", "b"), [])) == []
    assert list(columns(("a", "bb"), [("long", "1")])) == ["    a     bb", "    long   1"]


def test_a_section_that_lacks_something_is_not_shown_as_passed() -> None:
    figures = {"not_run": "two GPUs are needed, and torch finds 1", "failures": []}
    text = shown([Outcome("two ranks, 1b", 5.0, [], figures)])
    assert text.startswith("two ranks, 1b: NOT RUN (two GPUs are needed, and torch finds 1) in 5 s")


def test_collectives_and_loads_of_ranks_are_shown() -> None:
    wrong = {"us": 10.0, "bytes": 1 << 20, "error": 0.5, "passed": False, "captured": True}
    two = {"tokens_per_second": 50.0, "first_token_p50_us": 2e3, "per_token_p50_us": 1e3}
    ratios = {"tokens_per_second": 1.5, "first_token_p50_us": 2.0, "per_token_p50_us": 1.25}
    load = {"two_ranks": two, "ratios": ratios, "equal_first_tokens": 1.0, "equal_answers": 0.5}
    figures = {"collectives": {"all-gather": wrong}, "loads_of_ranks": {"1 request": load}}
    lines = shown([Outcome("two ranks", 5.0, ["x"], figures)]).splitlines()
    assert lines[3].split() == ["all-gather", "10.0", "104.86", "5.0e-01", "WRONG"]
    assert lines[5].split()[2:] == ["50", "1.50x", "2.0", "2.00x", "1.0", "1.25x", "100%", "50%"]
