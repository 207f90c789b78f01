"""Whatever our processes start is ended with them, also what has lost its parent."""

import subprocess
import sys

import psutil
import pytest

from penstock.cluster.processes.process_tree import DescendantTracker, is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans over")

ORPHAN = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleeper, stdout=2, start_new_session=True).pid)
"""

# Whoever kills what was seen at one look misses what is started between look and kill.
MOTHER = """
import subprocess
while True:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""


# Its main thread ends, so that the process is a zombie, while another one goes on.
HEADLESS = """
import ctypes, threading
threading.Thread(target=input).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return done.stdout


def test_an_orphan_is_seen_and_ended() -> None:
    brood = DescendantTracker()
    orphan = psutil.Process(int(run(ORPHAN)))
    assert orphan in brood.alive()
    brood.kill(10.0)
    assert not is_alive(orphan)


def test_a_process_that_goes_on_starting_others_is_ended_with_all_of_them() -> None:
    brood = DescendantTracker()
    with subprocess.Popen([sys.executable, "-c", MOTHER]):
        while len(brood.alive()) < 8:
            pass
        brood.kill(30.0)
    assert brood.alive() == []


def test_a_zombie_lives_while_it_has_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            pass
        assert is_alive(process)
        child.kill()
        child.wait()
        assert not is_alive(process)


def test_what_was_there_before_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as before:
        brood = DescendantTracker()
        assert brood.alive() == []
        brood.kill(1.0)
        assert before.poll() is None
        before.communicate(b"\n")
    assert before.returncode == 0
