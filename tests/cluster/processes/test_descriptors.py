import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, sys
def table_size():
    [line] = [each for each in open("/proc/self/status") if each.startswith("FDSize")]
    return line.split()[1]
inherited = table_size()
from penstock.cluster.processes.descriptors import reserve_descriptors
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
before = os.listdir("/proc/self/fd")
reserve_descriptors()
assert len(os.listdir("/proc/self/fd")) == len(before), "no descriptor is left open"
print(inherited, table_size())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the size of the table")
@pytest.mark.parametrize(("limit", "size"), [(8192, 4096), (4096, 4096), (512, 512)])
def test_descriptor_table_is_grown_to_its_final_size(limit: int, size: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # The table of descriptors never shrinks. A process inherits the table of its parent, which may
    # have many descriptors.
    inherited, grown = map(int, done.stdout.split())
    assert grown == max(size, inherited)
