"""The pipes to an engine, with adapters that only pretend to compute."""

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


def test_it_answers_sleeps_wakes_and_leaves_nothing() -> None:
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


def test_a_turn_asks_all_and_keeps_what_the_first_round_said() -> None:
    work = Work(requests=3, input_len=2, output_len=4, stream_len=2, long_len=5)
    with running() as engine:
        turn = run_engine(engine, work, 50, 0, {})
        again = run_engine(engine, work, 50, 1, {})
    sums = [sum(prompt) for prompt in work.prompts(50, 0, 0, 3, 2)]
    assert turn.tokens == [[total] * 4 for total in sums]
    assert again.tokens == []
    assert turn.batch >= 0.01
    assert len(turn.first) == len(turn.stream) == len(turn.long) == 2
    assert turn.memory_mib > 1


def test_short_answers_are_no_measurement() -> None:
    with running(short=1) as engine, pytest.raises(EngineFailed, match="2 of 3 were asked"):
        engine.generate([[1], [2]], 3)


def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineFailed, match=r"Fake ended; its last words:[\s\S]*no such kernel"):
        EngineProcess(ENGINE, Path(sys.executable), {"broken": True})


def test_ended_at_once_even_while_it_computes() -> None:
    engine = EngineProcess(ENGINE, Path(sys.executable), {"seconds": 600})
    tree = engine.tree()
    assert engine._process.stdin is not None
    engine._process.stdin.write(b'{"prompts": [[1]], "output_len": 1}\n')
    engine._process.stdin.flush()
    engine.close(at_once=True)  # which computes for longer than a test may take
    assert not [each for each in tree if each.is_running()]
