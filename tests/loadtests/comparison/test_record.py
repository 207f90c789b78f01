import dataclasses
import json
from pathlib import Path

import pytest

from penstock.loadtests.comparison.record import BadRecord, merged, read
from tests.loadtests.comparison.records import engine_run, record


def test_saved_record_is_read_back(tmp_path: Path) -> None:
    made = record([engine_run("penstock"), engine_run("transformers")], [engine_run("penstock", 1)])
    file = tmp_path / "run.json"
    file.write_text(json.dumps(made.as_json()))
    assert read(file) == made
    assert made.as_json()["summary"]["penstock"]["tokens"]["total"] == 8


def test_merged_record_has_the_rounds_of_all() -> None:
    one = record([engine_run("penstock"), engine_run("openvino")])
    two = record([engine_run("vllm")])
    both = merged([one, two])
    assert both.rounds == [*one.rounds, *two.rounds]
    assert both.left_out == {}, "vllm ran in the second record"
    assert both.about.keys() == {"penstock", "openvino", "vllm"}
    assert both.commits == ["abc"]
    assert len(both.dates) == 2


def test_records_with_different_settings_are_not_merged() -> None:
    one = record([engine_run("penstock")])
    with pytest.raises(BadRecord, match="different values of 'threads'"):
        merged([one, dataclasses.replace(one, threads=1)])


def test_records_with_different_kv_cache_formats_are_not_merged() -> None:
    one = record([engine_run("penstock")])
    one.about["penstock"]["kv"] = "bfloat16"
    other = record([engine_run("penstock")])
    other.about["penstock"]["kv"] = "int8"
    with pytest.raises(BadRecord, match="runs of penstock with different KV cache formats"):
        merged([one, other])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"summary": {}, "work": {"requests": 0}}'])
def test_file_that_is_not_a_record_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(BadRecord, match=r"run\.json is not a record"):
        read(file)
