"""These tests run where Triton interprets, or on a GPU; anywhere else they are skipped."""

import pytest

from tests.support.devices import runs_kernels


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    if not runs_kernels():
        pytest.skip("needs TRITON_INTERPRET=1 from the start (make kernels), or a GPU (make gpu)")
