"""Sections of `make gpu`: failures are reported, and figures from before a failure are kept."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from penstock.kernels.triton_common.tuned_tiles import VARIABLE
from penstock.loadtests.gpu import __main__ as gpu
from penstock.loadtests.gpu import sections
from penstock.loadtests.gpu.models import SHAPES
from penstock.loadtests.gpu.sections import Outcome, Section, read_figures, run_section
from tests.support.serving import wait_for

STARTED = 6.0  # time in seconds within which a section's Python starts, even on a busy machine
SCRIPT = """
import json, pathlib, sys, time
path, kind = sys.argv[2], sys.argv[3]
pathlib.Path(path).write_text(json.dumps({"kind": kind}))
if kind == "crash":
    print("the reason"); sys.exit(3)
if kind == "hang":
    time.sleep(60)
if kind == "leaves one":
    import subprocess
    left = subprocess.Popen(["sleep", "60"])
    pathlib.Path(path).write_text(json.dumps({"left": left.pid}))
    if sys.argv[4:]:
        time.sleep(60)
if kind == "says so":
    pathlib.Path(path).write_text(json.dumps({"failures": ["one is wrong"], "rows": []}))
if kind == "nothing":
    pathlib.Path(path).unlink()
if kind == "half":
    pathlib.Path(path).write_text('{"rows": [')
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    (tmp_path / "stub_section.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(kind: str, seconds: float = 30.0, left: float = 100.0, *others: str) -> Outcome:
        return run_section(Section(kind, "stub_section", seconds, (kind, *others)), left)

    return run


def test_outcome_has_the_figures_and_the_failures(run) -> None:  # type: ignore[no-untyped-def]
    fine = run("fine")
    assert fine.passed
    assert fine.figures == {"kind": "fine"}
    crashed = run("crash")
    assert not crashed.passed
    assert "exited with code 3" in crashed.failures[0]
    assert "the reason" in crashed.failures[0]
    assert crashed.figures == {"kind": "crash"}
    assert run("says so").failures == ["one is wrong"]
    assert run("nothing").failures == ["it wrote no results"]
    assert run("half").failures == ["it wrote no results"]


@pytest.mark.slow
def test_section_is_stopped_at_its_time_limit(run) -> None:  # type: ignore[no-untyped-def]
    hung = run("hang", seconds=STARTED)
    assert f"stopped after its time limit of {STARTED:.0f} s" in hung.failures[0]
    assert hung.figures == {"kind": "hang"}
    assert run("fine", left=0.0).failures == ["not started: no time left"]


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_child_processes_of_a_section_end_with_it(hangs: bool, run) -> None:  # type: ignore[no-untyped-def]
    found = run("leaves one", STARTED, 100.0, *(["and hangs"] if hangs else []))
    assert found.passed is not hangs, found
    wait_for(lambda: not is_alive(found.figures["left"]), "the end of the section's child process")


def is_alive(process: int) -> bool:
    """Return True if the process exists and still runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_sections_after_a_failed_one_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stub(section: Section, left: float) -> Outcome:
        failures = ["it broke"] if section.name == "operations" else []
        return Outcome(section.name, 1.0, failures, {"failures": failures, "seen": left > 0})

    monkeypatch.setattr(gpu, "run_section", stub)
    target = tmp_path / "folder" / "gpu.json"
    assert gpu.main(["--device", "cpu", "--save-json", str(target)]) == 1
    found = json.loads(target.read_text())["sections"]
    assert [name for name, each in found.items() if not each["passed"]] == ["operations"]
    assert list(found) == [each.name for each in all_sections()]
    said = capsys.readouterr().out
    assert "operations: FAILED in 1 s\n    it broke\n" in said
    with tarfile.open(tmp_path / "folder" / "gpu.tar.gz") as archive:
        assert archive.getnames() == ["gpu.json", "bounds.json", "report.txt", "tiles"]
        kept = archive.extractfile("report.txt")
        assert kept is not None
        assert kept.read().decode() in said
    assert gpu.main(["engine", "--device", "cpu", "--save-json", str(target)]) == 0
    found = json.loads(target.read_text())["sections"]
    assert list(found) == ["bounds", "engine, 8b", "engine, moe", "engine, 1b"]


def test_stages_that_run_one_by_one_add_up_to_one_file_with_tuned_tiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    def stub(section: Section, left: float) -> Outcome:
        folder = Path(section.arguments[section.arguments.index("--folder") + 1])
        assert section.environment == {VARIABLE: str(folder / "tiles")}
        if section.name == "tuning":
            (folder / "tiles" / "x.json").write_text('{"tiles": {"moe": {"a=1": {}}}}')
        (folder / f"{section.name}.jsonl").write_text(str(len(ran)))
        ran.append(section.name)
        if section.name == "operations":
            assert json.loads((folder / "bounds.json").read_text()) == {"order": len(ran) - 2}
        return Outcome(section.name, 1.0, [], {"order": len(ran)})

    ran: list[str] = []
    monkeypatch.setattr(gpu, "run_section", stub)
    target = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--save-json", str(target), "--keep"]
    for stage in "123":
        assert gpu.main([stage, *options]) == 0
    found = json.loads(target.read_text())["sections"]
    assert {*found} == {each.name for each in all_sections()}
    assert found["bounds"]["order"] == ran.index("deterministic, 1b") - 3
    tuned = [name for name, each in found.items() if each["uses_tuned_tiles"]]
    assert "smoke" not in tuned
    assert "tuning" not in tuned
    assert {"operations", "engine, 8b", "deterministic, 1b"} <= {*tuned}
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        names = archive.getnames()
        report = archive.extractfile("report.txt")
        assert report is not None
        assert b"smoke: passed" in report.read()
    assert {"tiles/x.json", "smoke.jsonl", "engine, moe.jsonl"} <= {*names}
    assert len(names) == len({*names})
    saved = json.loads(target.read_text())
    target.write_text(json.dumps(saved | {"about": saved["about"] | {"torch": "1.0"}}))
    assert gpu.main(["3", *options]) == 2
    assert "measured with another torch: '1.0' in the file" in capsys.readouterr().err


@pytest.mark.process
def test_command_runs_a_section_in_a_process_and_writes_all_results(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--small", "--save-json", str(target)]
    assert gpu.main([gpu.BOUNDS, *options]) == 0
    found = json.loads(target.read_text())
    assert found["about"]["torch"] == torch.__version__
    assert found["sections"]["bounds"]["bytes_per_second"] > 0
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        assert {"gpu.json", "bounds.json", "report.txt"} <= {*archive.getnames()}


def all_sections() -> list[Section]:
    return [each for stage in gpu.stages(Path(), "cuda", False).values() for each in stage]


def test_a_stage_takes_less_than_eight_minutes() -> None:
    by_stage = gpu.stages(Path(), "cuda", small=False)
    bounds = by_stage["1"][0]
    assert bounds.name == gpu.BOUNDS
    for stage in by_stage:
        sections = gpu.chosen_sections([stage], by_stage)
        assert sections == ([] if stage == "1" else [bounds]) + by_stage[stage]
        assert sum(section.seconds for section in sections) <= gpu.STAGE_SECONDS < 480


def test_every_model_has_an_engine_section() -> None:
    names = {each.name for each in all_sections()}
    assert {f"engine, {model}" for model in SHAPES} <= names
    assert gpu.chosen_sections([], gpu.stages(Path(), "cuda", False)) == all_sections()


def test_missing_gpu_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_repeated_section_does_not_read_the_lines_of_its_earlier_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stub(section: Section, left: float) -> Outcome:
        folder = Path(section.arguments[section.arguments.index("--folder") + 1])
        found = sorted(path.name for path in folder.glob("*.jsonl"))
        if section.name == "smoke":
            (folder / "smoke-a.jsonl").write_text("{}")
            (folder / "other.jsonl").write_text("{}")
        return Outcome(section.name, 1.0, [], {"found": found})

    monkeypatch.setattr(gpu, "run_section", stub)
    target = tmp_path / "gpu.json"
    for expected in ([], ["other.jsonl"]):
        options = ["smoke", "--device", "cpu", "--keep", "--save-json", str(target)]
        assert gpu.main(options) == 0
        assert json.loads(target.read_text())["sections"]["smoke"]["found"] == expected


def test_figures_file_is_complete_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_figures(path) == {}
    sections.write_figures(path, {"a": 1})
    assert read_figures(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
