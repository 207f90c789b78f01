"""The overload measurement with small sizes, and the stub workers that it uses."""

import json
from pathlib import Path

import pytest

from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.micro import overload
from penstock.loadtests.micro.overload_workers import (
    BoundedSession,
    BoundedWorker,
    WorkerOptions,
)
from penstock.loadtests.simulator.scaling.call import Call
from penstock.loadtests.simulator.scaling.overload import GREEDY
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import pack_tokens


def submit(session: BoundedSession, request: int, num_prompt: int = 4) -> None:
    message = pb.Submit(request=request, attempt=1, prompt=pack_tokens(range(num_prompt)))
    message.params.max_tokens = 2
    session.receive(pb.ToWorker(submit=message))


def running(session: BoundedSession) -> list[int]:
    return [request for request, _, _ in session.runs]


def bounded(**options: int) -> tuple[BoundedWorker, BoundedSession]:
    worker = BoundedWorker("w0", WorkerOptions(**options))
    session = worker.session("router")
    worker.sessions.append(session)
    return worker, session


def test_sequences_beyond_the_bound_wait_and_are_reported() -> None:
    worker, session = bounded(max_sequences=2)
    for request in range(4):
        submit(session, request)
    session.admit()
    assert running(session) == [0, 1]
    load = worker.load()
    assert (load.running, load.queued, load.queued_tokens) == (2, 2, 8)
    assert load.prompt_tokens_computed == 8
    assert worker.welcome().max_sequences == 2
    for _ in range(2):  # an answer has two tokens, so both running requests end
        session.make_step(list(session.runs.values()))
    session.admit()
    assert running(session) == [2, 3]


def test_step_computes_no_more_prompt_tokens_than_its_budget() -> None:
    _, session = bounded(max_batched_tokens=10)
    for request, num_prompt in enumerate((6, 6, 30)):
        submit(session, request, num_prompt)
    admitted = []
    for _ in range(3):
        before = set(running(session))
        session.admit()
        admitted.append(set(running(session)) - before)
    assert admitted == [{0}, {1}, {2}], "a prompt beyond the budget gets a step of its own"


def test_waiting_sequence_can_be_dropped() -> None:
    _, session = bounded(max_sequences=1)
    for request in range(3):
        submit(session, request)
    session.receive(pb.ToWorker(drop=pb.Drop(request=1, attempt=1)))
    assert [run.submit.request for run in session.waiting] == [0, 2]


def test_calls_of_a_greedy_tenant_do_not_count_beside_others() -> None:
    calls = [Call(Planned(number, 0.0, 1, 1)) for number in range(3)]
    assert overload.counted_calls(calls, ["", "", ""]) == calls
    assert overload.counted_calls(calls, [GREEDY, "tenant-1", GREEDY]) == [calls[1]]


@pytest.mark.process
@pytest.mark.slow
def test_measurement_prints_json_and_reports_missed_goals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(overload, "KEPT", 0.0)  # requests may all miss goals on a busy machine
    path = tmp_path / "overload.json"
    flags = ["--seconds", "1.5", "--tries", "1", "--max-sequences", "4", "--output-len", "4-8"]
    code = overload.main([*flags, "--save-json", str(path)])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["missed"] else 0)
    assert report == json.loads(path.read_text())
    assert report["overload"]["rate"] > 2 * report["capacity"]["rate"] > 0
    assert report["cores"]["router"] > 0


@pytest.mark.parametrize("wrong", [["--tries", "0"], ["--factor", "0.5"], ["--max-wait", "-1"]])
def test_invalid_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert overload.main(wrong) == 2
    assert capsys.readouterr().err.count("\n") == 1
