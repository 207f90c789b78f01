import json
from pathlib import Path

import pytest

from penstock.loadtests.comparison.__main__ import Run, main
from penstock.loadtests.comparison.engines import ENGINES
from tests.loadtests.comparison.records import engine_run, record
from tests.support.refusals import assert_refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines", "vlm"], "unknown engine 'vlm': expected one of penstock, "),
        (["--without", "x"], "unknown engine 'x'"),
        (["--rounds", "0"], "must be at least 1"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--engines", "vllm", "--without", "vllm"], "no engine is left"),
        (["--model", "7b"], "invalid choice"),
        (["--turns", "3"], "unrecognized arguments"),
        (["--kv-cache-dtype", "int4"], "expected auto, float32, bfloat16, fp8, int8"),
    ],
)
def test_wrong_flags_give_a_one_line_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(main, flags, message, capsys)


def test_engines_left_out_are_listed_with_the_reason() -> None:
    run = Run(engines=("penstock", "vllm", "openvino"), without=("vllm",))
    assert [engine.name for engine in run.chosen()] == ["penstock", "openvino"]
    assert run.left_out()["vllm"] == "left out by a flag"
    assert run.left_out().keys() | {"penstock", "openvino"} == {each.name for each in ENGINES}


def test_records_are_merged_into_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, engine in (("a", "penstock"), ("b", "transformers")):
        text = json.dumps(record([engine_run(engine)]).as_json())
        (tmp_path / f"{name}.json").write_text(text)
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main(["--merge", *files, "--save", str(tmp_path / "both")]) == 0
    assert (
        "8 of 8 tokens before the first that differs from transformers" in capsys.readouterr().out
    )
    assert (tmp_path / "both.html").stat().st_size > 1000
    assert len(json.loads((tmp_path / "both.json").read_text())["rounds"]) == 2


def test_missing_file_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--merge", "/nowhere.json"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
