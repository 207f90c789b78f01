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


def wait_for_zombie(pid: int) -> None:
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_ZOMBIE:
        pass


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return done.stdout


def test_orphan_is_found_and_killed() -> None:
    tracker = DescendantTracker()
    orphan = psutil.Process(int(run(ORPHAN)))
    assert orphan in tracker.alive()
    tracker.kill(10.0)
    assert not is_alive(orphan)


def test_orphan_that_has_ended_is_reaped() -> None:
    tracker = DescendantTracker()
    tracker.reap_orphans()  # there are no children
    orphan = psutil.Process(int(run(ORPHAN)))
    tracker.reap_orphans()
    assert is_alive(orphan)
    orphan.kill()
    wait_for_zombie(orphan.pid)
    tracker.reap_orphans()
    assert not psutil.pid_exists(orphan.pid)
    tracker.kill(0.0)


def test_ended_children_keep_their_exit_codes_for_their_owner() -> None:
    with subprocess.Popen(["false"]) as before:
        tracker = DescendantTracker()
        with (
            subprocess.Popen(["false"]) as own,
            subprocess.Popen(["false"], start_new_session=True) as own_leader,
        ):
            orphan = psutil.Process(int(run(ORPHAN)))
            orphan.kill()
            for pid in (before.pid, own.pid, own_leader.pid, orphan.pid):
                wait_for_zombie(pid)
            tracker.reap_orphans({own_leader.pid})
            assert not psutil.pid_exists(orphan.pid)
            assert [each.wait() for each in (before, own, own_leader)] == [1, 1, 1]
    tracker.kill(0.0)


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
