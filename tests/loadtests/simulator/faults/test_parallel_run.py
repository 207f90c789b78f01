"""Long runs of schedules: shared out, written down, gone on with."""

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


def part(first: int, count: int, failed: tuple[int, ...] = ()) -> SeedBatch:
    tally = RunCounts(count, 2 * count, ends=Counter(ok=count), faults=Counter(kill=1))
    return SeedBatch(first, count, tally, list(failed))


def test_what_is_left_is_what_was_not_played() -> None:
    assert remaining_batches(range(3, 10), [], 3) == [range(3, 6), range(6, 9), range(9, 10)]
    done = [part(8, 1), part(4, 2)]
    assert remaining_batches(range(3, 10), done, 5) == [range(3, 4), range(6, 8), range(9, 10)]
    assert remaining_batches(range(3, 10), [part(3, 7)], 5) == []


def test_a_record_gives_back_what_was_written_down(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "record")
    assert record.read(range(100)) == []
    parts = [part(0, 50), part(50, 50, (51, 60))]
    for one in parts:
        record.add(one)
    assert record.read(range(100)) == parts
    assert record.read(range(50)) == parts[:1]


def test_a_line_that_was_cut_short_is_played_again(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = RunRecord(path)
    record.add(part(0, 50))
    with path.open("a") as out:
        out.write('{"first": 50, "cou')
    assert record.read(range(100)) == [part(0, 50)]
    record.add(part(50, 50))
    assert record.read(range(100)) == [part(0, 50), part(50, 50)]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"first": 1}', '{"first": "1"}', "7"])
def test_a_record_with_nonsense(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record"
    RunRecord(path).add(part(0, 50))
    with path.open("a") as out:
        out.write(f"{line}\n")
    with pytest.raises(BadRecord, match=":2: no record of schedules played"):
        RunRecord(path).read(range(100))
    assert main(["simulate", "faults", "--record", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_long_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[int] = []

    def play(seeds: range) -> tuple[RunCounts, list[int]]:
        played.extend(seeds)
        return part(seeds.start, len(seeds)).tally, []

    monkeypatch.setattr(faults, "play_seeds", play)
    path, told = tmp_path / "record", []
    for count in (70, 130, 130):
        given = [f"--schedules={count}", "--processes=1", f"--record={path}", "--as-json"]
        assert main(["simulate", "faults", *given]) == 0
        told.append(json.loads(capsys.readouterr().out)["tally"]["requests"])
    assert told == [70, 130, 130]
    assert played == list(range(130))


def test_a_record_is_of_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "faults", "--seed=1", "--record=x"]) == 2
    assert "--record is of many schedules" in capsys.readouterr().err


def test_every_failure_is_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "play_seeds", lambda seeds: (RunCounts(), list(seeds)[:2]))
    monkeypatch.setattr(faults, "failure_of", lambda schedule: "as if")
    monkeypatch.setattr(faults, "shrunk", lambda schedule: schedule.only([0], []))
    monkeypatch.setattr(faults, "_SHOWN_FAILURES", 1)
    assert main(["simulate", "faults", "--schedules=9", "--processes=1", "--first=5"]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "seed 5 failed: as if  penstock simulate faults --seed 5 --requests 0 --faults none"
    )
    assert second.startswith(
        "seed 6 failed: as if  penstock simulate faults --seed 6 --requests 0,"
    )
