import dataclasses
import json
from pathlib import Path

import pytest

from penstock.loadtests.comparison.record import BadRecord, merged, read
from tests.loadtests.comparison.records import record, turn


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    made = record([turn("penstock"), turn("transformers")], [turn("penstock", 1)])
    file = tmp_path / "run.json"
    file.write_text(json.dumps(made.as_json()))
    assert read(file) == made
    assert made.as_json()["summary"]["penstock"]["tokens"]["total"] == 8


def test_merged_runs_are_all_their_rounds() -> None:
    one = record([turn("penstock"), turn("openvino")])
    two = record([turn("vllm")])
    both = merged([one, two])
    assert both.rounds == [*one.rounds, *two.rounds]
    assert both.left_out == {}, "vllm ran in the second"
    assert both.about.keys() == {"penstock", "openvino", "vllm"}
    assert both.commits == ["abc"]
    assert len(both.dates) == 2


def test_different_work_is_not_merged() -> None:
    one = record([turn("penstock")])
    with pytest.raises(BadRecord, match="different threads"):
        merged([one, dataclasses.replace(one, threads=1)])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"summary": {}, "work": {"requests": 0}}'])
def test_what_is_no_run_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(BadRecord, match=r"run\.json holds no run"):
        read(file)
