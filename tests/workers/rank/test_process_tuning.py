"""Tuning of a worker's process (memory allocator, OpenMP) before torch is imported."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from penstock.kernels.cpu_common.numba_runtime import OPENMP
from penstock.workers.rank.process_tuning import NCCL_VARIABLES, SPINS

SCRIPT = """
import os, sys, resource
from penstock.workers.rank.process_tuning import tune_process
tune_process()
assert not {"torch", "numpy"} & sys.modules.keys()
print(os.environ.get("GOMP_SPINCOUNT"))
import torch
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def run(**environment: str) -> list[str]:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="requires glibc")
def test_freed_memory_is_kept_and_threads_spin_briefly() -> None:
    spins, faults = run()
    assert spins == SPINS
    assert int(faults) < 100


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="requires glibc")
def test_settings_of_the_user_are_kept() -> None:
    spins, faults = run(OMP_WAIT_POLICY="active", MALLOC_ARENA_MAX="2")
    assert spins == "None"
    assert int(faults) > 100


NCCL = """
import json, os, sys
from penstock.workers.rank.process_tuning import NCCL_VARIABLES, tune_process
tune_process()
assert "torch" not in sys.modules
print(json.dumps({name: os.environ[name] for name in NCCL_VARIABLES}))
"""


@pytest.mark.process
def test_nccl_ends_no_process_unless_the_user_wants_it() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for given, expected in (({}, "0"), ({name: "3"}, "3")):
        kept = {key: value for key, value in os.environ.items() if key not in NCCL_VARIABLES}
        command = [sys.executable, "-c", NCCL]
        done = subprocess.run(command, env=kept | given, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert found == {**NCCL_VARIABLES, name: expected}


POOLS = """
from penstock.workers.rank.process_tuning import tune_process
tune_process()
import torch
from penstock.kernels.linear.cpu_packed_f32 import pack_f32
torch.set_num_threads(2)
pack_f32(torch.randn(4096, 64), None)(torch.randn(64, 64))
import numba
assert numba.threading_layer() == "omp"
print({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line})
import ctypes
assert ctypes.CDLL("libgomp.so.1.0.0").omp_get_max_active_levels() == 1  # no nested teams
"""


def has_openmp() -> bool:
    try:
        ctypes.CDLL(OPENMP)
    except OSError:
        return False
    return True


@pytest.mark.process
@pytest.mark.skipif(not has_openmp(), reason="requires libgomp, which numba uses for OpenMP")
def test_torch_and_numba_share_one_thread_pool() -> None:
    command = [sys.executable, "-c", POOLS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("libgomp") == 1
