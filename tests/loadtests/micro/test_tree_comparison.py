from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.micro import regression_check
from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.source_tree import SourceTree
from penstock.loadtests.micro.tree_comparison import KINDS, Comparison, compare_trees
from penstock.loadtests.micro.tree_figures import Amounts, Figures

THEN, NOW = SourceTree(Path("/then")), SourceTree(Path("/now"))
VALUES = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8)


def test_ratios_match_hand_computed_values() -> None:
    comparison = Comparison("path", then=[10.0, 20.0], now=[20.0, 30.0])
    ratio, within = comparison.ratio, comparison.within_tree
    assert (ratio.median, ratio.count) == (1.75, 2)
    # The ratios between rounds of the same tree are 2, 1/2, 3/2 and 2/3.
    assert within.count == 4
    assert within.median == pytest.approx((2 / 3 + 3 / 2) / 2)


@given(VALUES)
def test_equal_trees_have_the_same_figures(values: list[float]) -> None:
    for name in KINDS:
        assert Comparison(name, values, values).verdict == "same"


@given(VALUES, st.floats(1.01, 5.0))
def test_change_beyond_the_spread_is_better_or_worse_by_kind(
    values: list[float], factor: float
) -> None:
    spread = max(values) / min(values)
    grown = [value * spread * factor for value in values]
    for name, kind in KINDS.items():
        better, worse = ("better", "worse") if kind.higher_is_better else ("worse", "better")
        assert Comparison(name, values, grown).verdict == better
        assert Comparison(name, grown, values).verdict == worse


def test_change_within_the_spread_of_one_tree_is_not_reported() -> None:
    then, now = [1.0, 1.3, 1.0, 1.3], [1.1, 1.4, 1.1, 1.4]
    assert Comparison("transfer", then, now).verdict == "same"
    steady = Comparison("transfer", [1.0] * 4, [1.1] * 4)
    assert steady.verdict == "worse"
    assert str(steady).startswith("worse  transfer    now/then 1.1 ")


async def test_trees_are_measured_in_turns_and_the_warm_up_is_dropped() -> None:
    calls: list[SourceTree] = []

    async def measure(tree: SourceTree) -> Figures:
        calls.append(tree)
        warm_up = len(calls) <= 2
        return dict.fromkeys(KINDS, 100.0 if warm_up else 2.0 if tree == NOW else 1.0)

    lines: list[str] = []
    comparisons = await compare_trees(THEN, NOW, 2, measure, lines.append)
    assert calls == [THEN, NOW] * 3
    assert lines[0] == "warm-up: /then"
    assert lines[-1] == "round 2 of 2: /now"
    assert [each.name for each in comparisons] == list(KINDS)
    assert all((each.then, each.now) == ([1.0, 1.0], [2.0, 2.0]) for each in comparisons)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Fake figures of the current tree. All figures of the other tree are 1."""
    values = dict.fromkeys(KINDS, 1.0)

    async def measure_tree(tree: SourceTree, amounts: Amounts) -> Figures:
        if values["decode"] <= 0:
            raise MeasurementFailed("the engine does not decode")
        assert amounts.threads == 1
        return dict.fromkeys(KINDS, 1.0) if tree.root.name == "other" else dict(values)

    monkeypatch.setattr(regression_check, "measure_tree", measure_tree)
    return values


def older_checkout(folder: Path) -> str:
    """Make a folder like a checkout of an older commit, whose modules had other names."""
    for name in ("cli/__init__", "loadtests/guard", "loadtests/stubs", "loadtests/lone_router"):
        path = folder / "other" / "penstock" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(folder / "other")


def test_exit_code_reports_a_figure_that_got_worse(
    tmp_path: Path, measured: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--against", older_checkout(tmp_path), "--rounds", "2"]
    assert regression_check.main(flags) == 0
    measured["decode"] = 1.2
    assert regression_check.main(flags) == 0
    measured["router_grpc"] = 1.2
    assert regression_check.main(flags) == 1
    output = capsys.readouterr().out
    assert (output.count("better"), output.count("worse")) == (2, 1)
    measured["decode"] = 0
    assert regression_check.main(flags) == 1
    assert "the engine does not decode" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--rounds", "1"], ["--record"]])
def test_flags_that_do_not_fit_are_refused(tmp_path: Path, flags: list[str]) -> None:
    assert regression_check.main(["--against", older_checkout(tmp_path), *flags]) == 2


def test_folders_without_a_checkout_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, reason in ((tmp_path / "none", "not a folder"), (tmp_path, "not a checkout")):
        assert regression_check.main(["--against", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert reason in error
