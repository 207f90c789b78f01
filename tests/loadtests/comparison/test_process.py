"""The pipes to an engine's process, with an adapter that runs no model."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock.loadtests.comparison import process
from penstock.loadtests.comparison.engines import HERE, Engine
from penstock.loadtests.comparison.process import EngineFailed, EngineProcess
from penstock.loadtests.comparison.work import Work, run_engine

pytestmark = pytest.mark.process

FAKE = """
import contextlib, subprocess, sys, time

@contextlib.contextmanager
def engine(options):
    if options.get("broken"):
        raise RuntimeError("no such kernel")
    print("engines print what they like")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def generate(prompts, output_len):
        time.sleep(options.get("seconds", 0.01))
        return [[sum(prompt)] * (output_len - options.get("short", 0)) for prompt in prompts]

    yield generate, {"version": "1"}
"""
ENGINE = Engine("vllm", "Fake", "on_fake", HERE)


@pytest.fixture(autouse=True)
def _adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(process._ADAPTERS / "host.py", tmp_path)
    (tmp_path / "on_fake.py").write_text(FAKE)
    monkeypatch.setattr(process, "_ADAPTERS", tmp_path)


@contextmanager
def running(**options: object) -> Iterator[EngineProcess]:
    engine = EngineProcess(ENGINE, Path(sys.executable), dict(options))
    try:
        yield engine
    finally:
        engine.close()


def test_engine_answers_pauses_resumes_and_leaves_no_process() -> None:
    with running() as engine:
        assert engine.about == {"version": "1"}
        answer = engine.generate([[1, 2], [3, 4]], 3)
        assert answer.tokens == [[3] * 3, [7] * 3]
        assert answer.seconds >= 0.01
        tree = engine.tree()
        assert len(tree) == 2
        engine.pause()
        assert {each.status() for each in tree} == {psutil.STATUS_STOPPED}
        engine.resume()
        assert engine.generate([[5]], 1).tokens == [[5]]
        engine.pause()
    assert not [each for each in tree if each.is_running()]


def test_run_measures_all_phases_and_keeps_tokens_of_round_0_only() -> None:
    work = Work(requests=3, input_len=2, output_len=4, stream_len=2, long_len=5)
    with running() as engine:
        run = run_engine(engine, work, 50, 0, {})
        next_run = run_engine(engine, work, 50, 1, {})
    sums = [sum(prompt) for prompt in work.prompts(50, 0, 0, 3, 2)]
    assert run.tokens == [[total] * 4 for total in sums]
    assert next_run.tokens == []
    assert run.batch >= 0.01
    assert len(run.first) == len(run.stream) == len(run.long) == 2
    assert run.memory_mib > 1


def test_short_answer_is_an_error() -> None:
    with running(short=1) as engine, pytest.raises(EngineFailed, match="expected 2 answers of 3"):
        engine.generate([[1], [2]], 3)


def test_failed_start_reports_the_end_of_the_log() -> None:
    with pytest.raises(
        EngineFailed, match=r"Fake exited; last lines of its log:[\s\S]*no such kernel"
    ):
        EngineProcess(ENGINE, Path(sys.executable), {"broken": True})


def test_close_at_once_ends_an_engine_that_computes() -> None:
    engine = EngineProcess(ENGINE, Path(sys.executable), {"seconds": 600})
    tree = engine.tree()
    assert engine._process.stdin is not None
    engine._process.stdin.write(b'{"prompts": [[1]], "output_len": 1}\n')
    engine._process.stdin.flush()
    engine.close(at_once=True)  # do not wait 600 s for the answer
    assert not [each for each in tree if each.is_running()]
