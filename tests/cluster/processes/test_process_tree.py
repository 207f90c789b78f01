"""Killing our processes also kills all their descendants, including orphans."""

import subprocess
import sys

import psutil
import pytest

from penstock.cluster.processes.process_tree import DescendantTracker, is_alive

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux reparents orphans to us"
)

ORPHAN = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleeper, stdout=2, start_new_session=True).pid)
"""

# This program starts processes without pause, so one list of processes would miss new ones.
FORK_LOOP = """
import subprocess
while True:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""


# The main thread exits while another thread runs, so the process looks like a zombie.
HEADLESS = """
import ctypes, threading
threading.Thread(target=input).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return done.stdout


def test_orphan_is_found_and_killed() -> None:
    tracker = DescendantTracker()
    orphan = psutil.Process(int(run(ORPHAN)))
    assert orphan in tracker.alive()
    tracker.kill(10.0)
    assert not is_alive(orphan)


def test_process_that_keeps_starting_others_is_killed_with_all_of_them() -> None:
    tracker = DescendantTracker()
    with subprocess.Popen([sys.executable, "-c", FORK_LOOP]):
        while len(tracker.alive()) < 8:
            pass
        tracker.kill(30.0)
    assert tracker.alive() == []


def test_zombie_with_running_threads_counts_as_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            pass
        assert is_alive(process)
        child.kill()
        child.wait()
        assert not is_alive(process)


def test_processes_from_before_the_tracker_are_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as before:
        tracker = DescendantTracker()
        assert tracker.alive() == []
        tracker.kill(1.0)
        assert before.poll() is None
        before.communicate(b"\n")
    assert before.returncode == 0
