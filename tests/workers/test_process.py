"""A worker's process, tuned before torch is there."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, resource
from penstock.workers.process import settle
settle()
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
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept_and_threads_wait_little() -> None:
    spins, faults = run()
    assert spins == "1000"
    assert int(faults) < 100


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_a_users_own_settings_stay() -> None:
    spins, faults = run(OMP_WAIT_POLICY="active", MALLOC_ARENA_MAX="2")
    assert spins == "None"
    assert int(faults) > 100
