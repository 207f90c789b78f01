"""These tests run where Triton interprets; anywhere else they are skipped."""

import pytest

from penstock.kernels.launch import INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 from the start (make kernels), and triton")
