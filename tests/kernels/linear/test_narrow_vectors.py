"""The loops for CPUs with AVX2 are correct, tested on a CPU with AVX-512 too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.cpu_common.cpu_features import has_avx512

HERE = Path(__file__).parent
TESTED = [
    HERE / "test_cpu_packed_f32.py",
    HERE / "test_cpu_packed_int4.py",
    HERE / "test_cpu_packed_int8.py",
    HERE / "test_quantized.py",
    HERE.parent / "step_graph" / "test_step_graph_quantized.py",
]


@pytest.mark.long
@pytest.mark.skipif(not has_avx512(), reason="on other CPUs, the files run with AVX2 by themselves")
def test_loops_for_avx2_pass_the_tests_of_their_modules(tmp_path: Path) -> None:
    limited = {"ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTED],
        env=os.environ | limited, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
