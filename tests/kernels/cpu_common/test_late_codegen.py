"""Late code generation has the same results as numba's own code generation, also when cached."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

PROGRAM = """
import sys
import numpy as np
import numba
from penstock.kernels.cpu_common import late_codegen
from penstock.kernels.cpu_common.late_codegen import LateLibrary, inner

numba.config.CACHE_DIR = sys.argv[2]
if sys.argv[1] == "late":
    assert late_codegen.install() and late_codegen.install()

assembled = []
original = LateLibrary._assemble
def assemble(self):
    if not self._assembled:
        assembled.append(self.name)
    original(self)
LateLibrary._assemble = assemble

@inner()
def third(x):
    if x < 0:
        raise ValueError("negative")
    return x / np.float32(3)

@inner(fastmath={"contract"})
def sums(a, first, last):
    total = np.float32(0)
    for i in range(first, last):
        total += third(a[i])
    return total

@numba.njit("void(float32[::1], float32[::1], int64)", parallel=True, nogil=True, cache=True)
def in_threads(a, out, count):
    for thread in numba.prange(count):
        out[thread] = sums(a, len(a) * thread // count, len(a) * (thread + 1) // count)

@numba.njit("float32(float32[::1])", nogil=True, cache=True)
def alone(a):
    return sums(a, 0, len(a))

a = np.random.default_rng(0).random(1000).astype(np.float32)
out = np.zeros(2, np.float32)
in_threads(a, out, 2)
try:
    alone(-a)
except ValueError as error:
    print(error)
print(out.view(np.int32).tolist(), np.float32(alone(a)).view(np.int32))
print(sum(alone.stats.cache_hits.values()) + sum(in_threads.stats.cache_hits.values()))
print(sorted(name.partition("<")[0] for name in assembled))
"""


def run(tmp_path: Path, mode: str, cache: str) -> list[str]:
    """Run PROGRAM; return the lines that it prints (error, bits, cache hits, functions)."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), mode, str(tmp_path / cache)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_late_code_has_the_same_results_and_is_assembled_once(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", "one")
    late = run(tmp_path, "late", "two")
    again = run(tmp_path, "late", "two")
    by_numba = run(tmp_path, "plain", "two")
    assert plain[:2] == late[:2] == again[:2] == by_numba[:2]
    assert plain[0] == "negative"
    assert [lines[2] for lines in (plain, late, again, by_numba)] == ["0", "0", "2", "2"]
    assert late[3] == "['alone', 'in_threads']", (
        "inlined callees and bodies of parallel loops are not assembled"
    )
    assert plain[3] == again[3] == "[]"


CLOSURES = """
import re
import sys
import numba
from penstock.kernels.cpu_common.numba_runtime import configure_numba

configure_numba()
from penstock.kernels.cpu_common.late_codegen import inner

def adding(amount):
    @inner()
    def add(x):
        return x + amount
    return add

add = adding(int(sys.argv[1]))

@numba.njit("int64(int64)")
def call(x):
    return add(x)

for module in call.inspect_llvm().values():
    print(*re.findall("@[^ ]*adding[^ ]*", module))
"""


def test_code_of_two_processes_has_different_names() -> None:
    """Two processes compile closures that differ in a constant only; a third may load both."""
    names = [
        subprocess.run(
            [sys.executable, "-c", CLOSURES, amount], capture_output=True, text=True, check=True
        ).stdout.split()
        for amount in ("1", "10")
    ]
    assert all(names)
    assert not set(names[0]) & set(names[1])


def test_inner_functions_without_reference_counts_cannot_create_arrays() -> None:
    configure_numba()
    from numba.core.errors import NumbaError

    from penstock.kernels.cpu_common.late_codegen import inner

    @inner()
    def create(count: int) -> Any:
        return np.empty(count)[0]

    @inner()
    def cut(values: Any) -> Any:
        return values[1:]

    calls: tuple[Any, ...] = ((create, 3), (cut, np.empty(3)))
    for function, given in calls:
        with pytest.raises(NumbaError, match="Only accept returning of array passed into"):
            function(given)
