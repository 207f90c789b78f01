"""Locks of compilations: a function that several processes need is compiled by one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.cpu_common.compile_lock import compile_lock
from penstock.kernels.cpu_common.numba_runtime import has_numba

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

PROGRAM = """
import sys
from penstock.kernels.cpu_common.numba_runtime import configure_numba, lock_folder
configure_numba()
from penstock.kernels.activation.cpu import _serial
print(lock_folder(), flush=True)
input()
kernel = _serial.load()
print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()), flush=True)
"""
NAME = "penstock.kernels.activation.cpu._serial"


def test_one_of_two_processes_compiles_a_function_and_the_other_loads_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    folders = [process.stdout.readline().strip() for process in processes if process.stdout]
    assert folders[0] == folders[1]
    with compile_lock(Path(folders[0]), NAME) as is_held:
        assert is_held
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    answers = [process.communicate()[0].strip() for process in processes]
    assert sorted(answers) == ["0 1", "1 0"]


def test_lock_that_is_held_is_not_acquired_again(tmp_path: Path) -> None:
    with compile_lock(tmp_path, "one", 0.0) as first, compile_lock(tmp_path, "one", 0.0) as second:
        assert (first, second) == (True, False)
    with compile_lock(tmp_path, "one", 0.0) as again:
        assert again


def test_folder_without_locks_gives_every_process_the_lock(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with compile_lock(missing, "one", 0.0) as first, compile_lock(missing, "one", 0.0) as second:
        assert (first, second) == (True, True)
