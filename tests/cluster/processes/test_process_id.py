"""Ids of processes: a hung process is killed, and another process with the same PID is not."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from penstock.cluster.processes import process_id
from penstock.cluster.processes.start_time import start_time

HOUR = 3600.0


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_kill_local_kills_a_stopped_process_but_not_a_reused_process_id(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    started = start_time(sleeper.pid)
    assert not process_id.kill_local(sleeper.pid, started - 60.0)
    sleeper.send_signal(signal.SIGSTOP)
    assert process_id.kill_local(sleeper.pid, started)
    assert sleeper.wait(60) == -signal.SIGKILL
    assert not process_id.kill_local(sleeper.pid, started)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has a time since boot")
@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_kill_local_kills_a_process_after_the_clock_was_changed(
    sleeper: "subprocess.Popen[bytes]", step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start_time(sleeper.pid)
    created = psutil.Process(sleeper.pid).create_time()
    # Linux computes the time of its boot from the current time.
    boot = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + step)
    assert abs(psutil.Process(sleeper.pid).create_time() - created) > HOUR / 2
    assert process_id.kill_local(sleeper.pid, started)
    assert sleeper.wait(60) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_start_time_of_a_process_with_a_strange_name() -> None:
    """The name of the process is in /proc/PID/stat, in front of the start time."""
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'a) S 1 (\\xff'); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        created = psutil.Process(process.pid).create_time() - psutil.boot_time()
        assert start_time(process.pid) == pytest.approx(created, abs=1.0)
        process.communicate(b"\n")


def test_start_time_of_an_ended_process_is_refused() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(psutil.NoSuchProcess):
        start_time(process.pid)
