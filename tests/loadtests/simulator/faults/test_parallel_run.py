"""Long runs of fault schedules: batches, the record file and resumption."""

import json
from collections import Counter
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.loadtests.simulator.faults import faults
from penstock.loadtests.simulator.faults.parallel_run import (
    BadRecord,
    RunRecord,
    SeedBatch,
    remaining_batches,
)
from penstock.loadtests.simulator.faults.schedule_run import RunCounts


def batch(first: int, count: int, failed: tuple[int, ...] = ()) -> SeedBatch:
    counts = RunCounts(count, 2 * count, ends=Counter(ok=count), faults=Counter(kill=1))
    return SeedBatch(first, count, counts, list(failed))


def test_remaining_batches_exclude_finished_ones() -> None:
    assert remaining_batches(range(3, 10), [], 3) == [range(3, 6), range(6, 9), range(9, 10)]
    done = [batch(8, 1), batch(4, 2)]
    assert remaining_batches(range(3, 10), done, 5) == [range(3, 4), range(6, 8), range(9, 10)]
    assert remaining_batches(range(3, 10), [batch(3, 7)], 5) == []


def test_a_record_returns_the_batches_that_were_added(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "record")
    assert record.read(range(100)) == []
    batches = [batch(0, 50), batch(50, 50, (51, 60))]
    for each in batches:
        record.add(each)
    assert record.read(range(100)) == batches
    assert record.read(range(50)) == batches[:1]


def test_a_truncated_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = RunRecord(path)
    record.add(batch(0, 50))
    with path.open("a") as out:
        out.write('{"first": 50, "cou')
    assert record.read(range(100)) == [batch(0, 50)]
    record.add(batch(50, 50))
    assert record.read(range(100)) == [batch(0, 50), batch(50, 50)]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"first": 1}', '{"first": "1"}', "7"])
def test_an_invalid_line_in_a_record_is_refused(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record"
    RunRecord(path).add(batch(0, 50))
    with path.open("a") as out:
        out.write(f"{line}\n")
    with pytest.raises(BadRecord, match=":2: expected a line that --record wrote"):
        RunRecord(path).read(range(100))
    assert main(["simulate", "faults", "--record", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_resumes_from_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[int] = []

    def play(seeds: range) -> tuple[RunCounts, list[int]]:
        played.extend(seeds)
        return batch(seeds.start, len(seeds)).counts, []

    monkeypatch.setattr(faults, "play_seeds", play)
    path, num_requests = tmp_path / "record", []
    for count in (70, 130, 130):
        options = [f"--schedules={count}", "--processes=1", f"--record={path}", "--as-json"]
        assert main(["simulate", "faults", *options]) == 0
        num_requests.append(json.loads(capsys.readouterr().out)["counts"]["requests"])
    assert num_requests == [70, 130, 130]
    assert played == list(range(130))


def test_a_record_is_refused_with_a_single_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "faults", "--seed=1", "--record=x"]) == 2
    assert "--record cannot be used with --seed" in capsys.readouterr().err


def test_each_failure_is_printed_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "play_seeds", lambda seeds: (RunCounts(), list(seeds)[:2]))
    monkeypatch.setattr(faults, "failure_of", lambda schedule: "fake failure")
    monkeypatch.setattr(faults, "shrunk", lambda schedule: schedule.only([0], []))
    monkeypatch.setattr(faults, "_SHOWN_FAILURES", 1)
    assert main(["simulate", "faults", "--schedules=9", "--processes=1", "--first=5"]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "seed 5 failed: fake failure  penstock simulate faults --seed 5 --requests 0 --faults none"
    )
    assert second.startswith(
        "seed 6 failed: fake failure  penstock simulate faults --seed 6 --requests 0,"
    )
