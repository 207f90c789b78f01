"""Measurement of the CPU time that processes use."""

import subprocess
import sys

from penstock.loadtests.micro.cpu_time import cpu_seconds

# The parent process only waits. Its child uses CPU time, then waits too.
CHILD = "import sys\nfor i in range(10**6): pass\nprint('done', flush=True)\nsys.stdin.read()"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_cpu_time_of_child_processes_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        first = cpu_seconds(parent.pid)
        assert 0.001 < first <= cpu_seconds(parent.pid)
        assert parent.stdin is not None
        parent.stdin.close()
