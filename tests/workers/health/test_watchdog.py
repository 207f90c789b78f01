"""The watchdog's pulses and its end, without a process that dies; `test_hang` has one."""

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


class Ends:
    """What a watchdog says and does."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = SECONDS
    ) -> None:
        monkeypatch.setattr(watchdog, "NOTIFY_SECONDS", 0.0)
        self.told: list[str] = []
        self.codes: list[int] = []
        self.over = threading.Event()
        self.dog = Watchdog("w0, rank 0", seconds, folder, self.told.append, self.end)

    def end(self, code: int) -> None:
        self.codes.append(code)
        self.over.set()


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(tmp_path / "dumps", monkeypatch)


def test_a_pulse_waits_only_while_something_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, now = ProgressTimer("p", 30.0), 1000.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    assert pulse.waited(1100.0) == 0.0
    pulse.begin()
    assert pulse.waited(1100.0) == 100.0
    pulse.extend(40.0)
    assert pulse.waited(1100.0) == 60.0
    now = 1050.0
    pulse.begin()
    assert pulse.waited(1100.0) == 60.0, "what is asked meanwhile is no progress"
    pulse.progressed(8.0)
    assert pulse.waited(1100.0) == 50.0
    assert pulse.bound == HANG_FACTOR * 8.0
    pulse.progressed(0.1)
    assert pulse.bound == 30.0
    pulse.idle()
    assert pulse.waited(1100.0) == 0.0


def test_what_a_step_may_take_follows_the_longest_of_late() -> None:
    times = StepTimes()
    times.add(2.0, with_prompts=True)
    assert times.longest == 2.0
    for _ in range(200):
        times.add(0.01, with_prompts=False)
    assert 0.01 < times.longest < 0.1
    assert StepTimes(times.longest).longest == times.longest


@pytest.mark.slow
async def test_whoever_moves_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 2.0  # more than this test may be kept from a core
    ends = Ends(tmp_path / "dumps", monkeypatch, seconds)
    pulse = ends.dog.timer("the engine")
    ends.dog.start()
    for _ in range(8):
        pulse.progressed()
        await asyncio.sleep(seconds / 5)
    pulse.idle()
    await asyncio.sleep(1.2 * seconds)
    assert ends.codes == []
    ends.dog.stop()


async def test_what_hangs_is_told_with_a_bundle_and_ended(ends: Ends) -> None:
    ends.dog.state_source = lambda: {"sequences": 3}
    ends.dog.timer("the engine").begin()
    ends.dog.start()
    assert await asyncio.to_thread(ends.over.wait, 60)
    assert ends.codes == [EXIT_HUNG]
    (reason,) = ends.told
    (path,) = (ends.dog._folder or Path()).iterdir()
    assert reason.startswith("it hung: the engine has not moved for ")
    assert reason.endswith(f"(see {path})")
    state = json.loads((path / crash_dump.STATE).read_text())
    assert state["sequences"] == 3
    assert state["pulses"]["the engine"] > SECONDS
    assert state["pulses"]["the engine"] > state["pulses"]["the event loop"]
    assert "_watch" in (path / crash_dump.STACKS).read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


async def test_an_event_loop_that_stands_still_is_seen(ends: Ends) -> None:
    ends.dog.start()
    await asyncio.sleep(0.05)
    assert ends.over.wait(60), "and this waits on the event loop"
    assert "the event loop has not moved" in ends.told[0]


async def test_without_a_folder_to_write_to_it_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    ends = Ends(tmp_path / "file", monkeypatch)
    ends.dog.timer("the engine").begin()
    ends.dog.start()
    assert await asyncio.to_thread(ends.over.wait, 60)
    assert ends.codes == [EXIT_HUNG]
    assert "no bundle could be written" in ends.told[0]


# ------------------------------------------------------------------ crash dumps


def nothing() -> Mapping[str, Any]:
    return {}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    other = tmp_path / "something-else"
    other.mkdir()
    for number in range(crash_dump.MAX_DUMPS + 3):
        (tmp_path / f"{crash_dump.PREFIX}20200101T0000{number:02}Z-old-1").mkdir()
    newest = write_crash_dump(tmp_path, "w/0: rank 1", {}, nothing)
    left = sorted(path.name for path in tmp_path.glob(f"{crash_dump.PREFIX}*"))
    assert len(left) == crash_dump.MAX_DUMPS
    assert left[-1] == newest.name
    assert "w-0-rank-1" in newest.name
    assert other.exists()


def test_a_scheduler_in_disorder_is_no_reason_to_write_nothing(tmp_path: Path) -> None:
    def broken() -> Mapping[str, Any]:
        raise RuntimeError("dictionary changed size during iteration")

    path = write_crash_dump(tmp_path, "w", {"why": "it hung"}, broken)
    state = json.loads((path / crash_dump.STATE).read_text())
    assert (state["why"], "changed size" in state["unknown"]) == ("it hung", True)


def test_a_folder_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        write_crash_dump(tmp_path / "link", "w", {}, nothing)


def test_the_scheduler_is_told_without_what_is_said() -> None:
    batcher = Batcher(
        SchedulerConfig(num_blocks=8, max_model_len=32, block_size=4, max_sequences=2)
    )
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for name in ("a", "b", "c"):
        batcher.submit(NewSequence(name, [91, 92, 93, 94, 95], 5, params))
    assert batcher.plan(0.0) is not None
    told = batcher.debug_state()
    assert told["ledger"] == "balances"
    assert sum(told["blocks"].values()) == 8
    assert [each["phase"] for each in told["sequences"]] == ["running", "running", "waiting"]
    assert told["sequences"][0] == {
        "sequence": "a",
        "choice": 0,
        "phase": "running",
        "prompt_len": 5,
        "num_tokens": 5,
        "row": 0,
        "num_computed": 0,
        "num_blocks": 2,
    }
    (step,) = told["steps_in_flight"]
    assert (step["rows"], step["new_tokens"]) == ([0, 1], [5, 5])
    assert not {"91", "92", "93"} & set(json.dumps(told).replace(",", " ").split())
