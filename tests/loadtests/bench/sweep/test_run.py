"""`penstock bench --sweep` from its flags to its exit code, against stub servers."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from penstock.loadtests.bench import datasets
from penstock.loadtests.bench.command import main
from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.options import Sweep, Work, WrongOptions
from penstock.loadtests.bench.sweep import run
from penstock.loadtests.bench.sweep.run import check_sweep, step_plan
from tests.support.serving import INTERRUPTIBLE
from tests.support.stub_servers import Behaviour, grpc_stub, http_stub

GOALS = ["--sweep", "--goal", "ttft:600s", "--goal", "tpot:600s"]
SMALL = ["--input-len", "8", "--output-len", "2", "--rate", "50", "--step-seconds", "0.4"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the limit on late requests, because a busy machine may send requests late."""
    monkeypatch.setattr(run, "MAX_LAG_MS", float("inf"))


@pytest.mark.parametrize("api", ["grpc", "chat"])
def test_rate_is_raised_until_the_server_misses_the_goals(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The stub answers a warm-up, 20 requests at 50/s and 40 at 100/s, and refuses all others.
    behaviour = Behaviour(refuse_after=61)
    saved, drawn = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    flags = [*GOALS, *SMALL, "--save-json", str(saved), "--save-svg", str(drawn)]
    with (grpc_stub if api == "grpc" else http_stub)(behaviour) as address:
        assert main([address, *flags, "--api", api]) == 0
    found = json.loads(saved.read_text())
    assert found["knee"] == 100
    rates = [step["rate"] for step in found["steps"]]
    assert rates == sorted(rates)
    assert [step["rate"] for step in found["steps"] if step["kept"]] == [50, 100]
    assert 1 < min(rate for rate in rates if rate > 100) / 100 <= 1.1
    assert found["steps"][0]["completed"] == 20
    assert found["steps"][-1]["missed"] == {"ttft": 0, "tpot": 0, "failed": 80}
    assert ET.fromstring(drawn.read_text()).tag.endswith("svg")
    words = capsys.readouterr().out
    assert "knee: 100 requests/s" in words
    assert "requests fail first" in words
    assert len(set(map(str, behaviour.prompts))) == len(behaviour.prompts)


def test_server_that_keeps_no_rate_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with grpc_stub(Behaviour(refuse_after=1)) as address:
        assert main([address, *GOALS, *SMALL[:4], "--rate", "400", "--step-seconds", "0.01"]) == 1
    assert "no rate kept the goals" in capsys.readouterr().out


def test_first_rate_comes_from_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*GOALS, "--input-len", "8", "--output-len", "20", "--step-seconds", "0.1"]
    with grpc_stub(Behaviour(refuse_after=21)) as address:
        assert main([address, *flags]) == 0
    first = float(capsys.readouterr().out.splitlines()[1].split()[0])
    assert 0 < first < 50  # each answer of the stub takes at least 20 ms


@pytest.mark.parametrize("refuse_after", [None, 1])
def test_client_that_sends_late_ends_the_sweep(
    refuse_after: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "MAX_LAG_MS", -1.0)
    with grpc_stub(Behaviour(refuse_after=refuse_after)) as address:
        assert main([address, *GOALS, *SMALL]) == 1
    assert f"no step was measured: {run.CLIENT_LATE}" in capsys.readouterr().out


def test_ctrl_c_reports_the_steps_that_have_ended() -> None:
    with grpc_stub(Behaviour()) as address:
        command = ["-m", "penstock.loadtests.bench.command", address, *GOALS, "--rate", "20"]
        process = subprocess.Popen(
            [*INTERRUPTIBLE, sys.executable, *command, "--step-seconds", "1", "--output-len", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()  # skip the heading
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        words, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert first.split()[0] == "20"
    assert "knee: 20 requests/s" in words or "knee: 40 requests/s" in words
    assert "Traceback" not in errors


def test_steps_have_different_prompts_and_the_same_lengths_of_time() -> None:
    sweep = Sweep(step_seconds=5.0)
    plans = [step_plan(Work(), sweep, rate, n, 0) or [] for n, rate in enumerate((1, 40))]
    assert [len(plan) for plan in plans] == [20, 200]
    assert plans[1][-1].due == pytest.approx(5.0)


def test_sweep_ends_when_the_dataset_has_too_few_unused_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [[{"value": f"question number {n}"}, {"value": "answer " * 4}] for n in range(70)]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    behaviour = Behaviour()
    flags = ["--dataset", str(path), "--rate", "50", "--step-seconds", "0.4", "--num-warmups", "0"]
    with grpc_stub(behaviour) as address:
        assert main([address, *GOALS, *flags]) == 0
    # The steps at 50/s and 100/s need 20 and 40 prompts, so 10 remain for the step at 200/s.
    assert len(behaviour.prompts) == len(set(behaviour.prompts)) == 60
    words = capsys.readouterr().out
    assert "knee: 100 requests/s" in words
    assert "too few requests for the next step" in words


def test_all_steps_read_the_dataset_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = [[{"value": f"question number {n}"}, {"value": "answer " * 4}] for n in range(70)]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    read, paths = datasets.read_conversations, []

    def count(path: Path) -> list[datasets.Conversation]:
        paths.append(path)
        return read(path)

    monkeypatch.setattr(datasets, "read_conversations", count)
    work, sweep = Work(dataset=path), Sweep(step_seconds=1.0)
    plans = [step_plan(work, sweep, 20.0, number, 20 * number) or [] for number in range(3)]
    assert len({each.text for plan in plans for each in plan}) == 60
    assert paths == [path]


def test_step_needs_enough_requests_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(
        f"2023-11-16 18:17:0{n % 6},9,9\n" for n in sorted(range(30), key=lambda n: n % 6)
    )
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    work, sweep = Work(trace=path), Sweep(step_seconds=1.0)
    assert len(step_plan(work, sweep, 30.0, 0, 0) or []) == 30
    # A step may have the same rows of the trace as an earlier step: its prompts are still new.
    assert len(step_plan(work, sweep, 30.0, 1, 30) or []) == 30
    assert step_plan(work, sweep, 31.0, 2, 60) is None


@pytest.mark.parametrize(
    ("sweep", "work", "words"),
    [
        (Sweep(save_svg=Path("a.svg")), Work(), "--save-svg requires --sweep"),
        (Sweep(sweep=True), Work(num_requests=5), "cannot be used with --sweep"),
        (Sweep(sweep=True), Work(concurrency=5), "cannot be used with --sweep"),
        (Sweep(sweep=True), Work(trace=Path("t"), trace_speed=2.0), "cannot be used with --sweep"),
        (Sweep(sweep=True), Work(rate=float("inf")), "give a finite first rate"),
        (Sweep(sweep=True), Work(num_warmups=0), "has no first rate"),
        (Sweep(sweep=True, step_seconds=0.0), Work(), "--step-seconds"),
        (Sweep(sweep=True, attainment=1.5), Work(), "--attainment"),
        (Sweep(sweep=True, precision=1.0), Work(), "--precision"),
        (Sweep(sweep=True, save_svg=Path("/none/a.svg")), Work(), "--save-svg /none/a.svg"),
    ],
)
def test_wrong_sweep_options_are_refused(sweep: Sweep, work: Work, words: str) -> None:
    with pytest.raises(WrongOptions, match=words):
        check_sweep(sweep, work, Goals(ttft=1.0))


def test_sweep_needs_a_goal() -> None:
    with pytest.raises(WrongOptions, match="--sweep needs a goal"):
        check_sweep(Sweep(sweep=True), Work(), None)
