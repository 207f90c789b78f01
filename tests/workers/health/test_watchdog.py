"""Watchdog and crash dumps; these tests do not end a process, but `test_hang` does."""

import asyncio
import json
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.step_times import StepTimes
from penstock.workers.health import crash_dump, watchdog
from penstock.workers.health.crash_dump import write_crash_dump
from penstock.workers.health.watchdog import EXIT_HUNG, HANG_FACTOR, ProgressTimer, Watchdog
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.sequence import NewSequence

SECONDS = 0.5


class RecordedWatchdog:
    """A watchdog that records its reasons and exit codes instead of ending the process."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = SECONDS
    ) -> None:
        monkeypatch.setattr(watchdog, "NOTIFY_SECONDS", 0.0)
        self.reasons: list[str] = []
        self.codes: list[int] = []
        self.exited = threading.Event()
        self.watchdog = Watchdog("w0, rank 0", seconds, folder, self.reasons.append, self.end)

    def end(self, code: int) -> None:
        self.codes.append(code)
        self.exited.set()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedWatchdog:
    return RecordedWatchdog(tmp_path / "dumps", monkeypatch)


def test_timer_runs_only_while_progress_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, now = ProgressTimer("p", 30.0), 1000.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    assert timer.waited(1100.0) == 0.0
    timer.begin()
    assert timer.waited(1100.0) == 100.0
    timer.extend(40.0)
    assert timer.waited(1100.0) == 60.0
    now = 1050.0
    timer.begin()
    assert timer.waited(1100.0) == 60.0, "a second `begin` is not progress"
    timer.progressed(8.0)
    assert timer.waited(1100.0) == 50.0
    assert timer.bound == HANG_FACTOR * 8.0
    timer.progressed(0.1)
    assert timer.bound == 30.0
    timer.idle()
    assert timer.waited(1100.0) == 0.0


def test_longest_step_time_decays_over_shorter_steps() -> None:
    times = StepTimes()
    times.add(2.0, with_prompts=True)
    assert times.longest == 2.0
    for _ in range(200):
        times.add(0.01, with_prompts=False)
    assert 0.01 < times.longest < 0.1
    assert StepTimes(times.longest).longest == times.longest


@pytest.mark.slow
async def test_process_that_makes_progress_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 2.0  # A busy machine should not delay this test for that long.
    recorded = RecordedWatchdog(tmp_path / "dumps", monkeypatch, seconds)
    timer = recorded.watchdog.timer("the engine")
    recorded.watchdog.start()
    for _ in range(8):
        timer.progressed()
        await asyncio.sleep(seconds / 5)
    timer.idle()
    await asyncio.sleep(1.2 * seconds)
    assert recorded.codes == []
    recorded.watchdog.stop()


async def test_hung_process_is_ended_with_a_reason_and_a_crash_dump(
    recorded: RecordedWatchdog,
) -> None:
    recorded.watchdog.state_source = lambda: {"sequences": 3}
    recorded.watchdog.timer("the engine").begin()
    recorded.watchdog.start()
    assert await asyncio.to_thread(recorded.exited.wait, 60)
    assert recorded.codes == [EXIT_HUNG]
    (reason,) = recorded.reasons
    (path,) = (recorded.watchdog._folder or Path()).iterdir()
    assert reason.startswith("process hung: the engine made no progress for ")
    assert reason.endswith(f"(crash dump: {path})")
    state = json.loads((path / crash_dump.STATE).read_text())
    assert state["sequences"] == 3
    assert state["pulses"]["the engine"] > SECONDS
    assert state["pulses"]["the engine"] > state["pulses"]["the event loop"]
    assert "_watch" in (path / crash_dump.STACKS).read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


async def test_blocked_event_loop_is_detected(recorded: RecordedWatchdog) -> None:
    recorded.watchdog.start()
    await asyncio.sleep(0.05)
    assert recorded.exited.wait(60), "the wait itself blocks the event loop"
    assert "the event loop made no progress" in recorded.reasons[0]


async def test_hung_process_is_ended_even_if_the_crash_dump_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    recorded = RecordedWatchdog(tmp_path / "file", monkeypatch)
    recorded.watchdog.timer("the engine").begin()
    recorded.watchdog.start()
    assert await asyncio.to_thread(recorded.exited.wait, 60)
    assert recorded.codes == [EXIT_HUNG]
    assert "no crash dump could be written" in recorded.reasons[0]


# ------------------------------------------------------------------ crash dumps


def no_state() -> Mapping[str, Any]:
    return {}


def test_only_the_newest_crash_dumps_are_kept(tmp_path: Path) -> None:
    other = tmp_path / "something-else"
    other.mkdir()
    for number in range(crash_dump.MAX_DUMPS + 3):
        (tmp_path / f"{crash_dump.PREFIX}20200101T0000{number:02}Z-old-1").mkdir()
    newest = write_crash_dump(tmp_path, "w/0: rank 1", {}, no_state)
    left = sorted(path.name for path in tmp_path.glob(f"{crash_dump.PREFIX}*"))
    assert len(left) == crash_dump.MAX_DUMPS
    assert left[-1] == newest.name
    assert "w-0-rank-1" in newest.name
    assert other.exists()


def test_crash_dump_is_written_without_the_state_if_reading_it_fails(tmp_path: Path) -> None:
    def broken() -> Mapping[str, Any]:
        raise RuntimeError("dictionary changed size during iteration")

    path = write_crash_dump(tmp_path, "w", {"why": "it hung"}, broken)
    state = json.loads((path / crash_dump.STATE).read_text())
    assert (state["why"], "changed size" in state["unknown"]) == ("it hung", True)


def test_symbolic_link_is_refused_as_crash_dump_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        write_crash_dump(tmp_path / "link", "w", {}, no_state)


def test_scheduler_state_contains_no_tokens() -> None:
    batcher = Batcher(
        SchedulerConfig(num_blocks=8, max_model_len=32, block_size=4, max_sequences=2)
    )
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for name in ("a", "b", "c"):
        batcher.submit(NewSequence(name, [91, 92, 93, 94, 95], 5, params))
    assert batcher.plan() is not None
    state = batcher.debug_state()
    assert state["ledger"] == "balances"
    assert sum(state["blocks"].values()) == 8
    assert [each["phase"] for each in state["sequences"]] == ["running", "running", "waiting"]
    assert state["sequences"][0] == {
        "sequence": "a",
        "choice": 0,
        "phase": "running",
        "prompt_len": 5,
        "num_tokens": 5,
        "row": 0,
        "num_computed": 0,
        "num_blocks": 2,
    }
    (step,) = state["steps_in_flight"]
    assert (step["rows"], step["new_tokens"]) == ([0, 1], [5, 5])
    assert not {"91", "92", "93"} & set(json.dumps(state).replace(",", " ").split())
