"""These tests run where Triton interprets, or on a GPU; anywhere else they are skipped."""

from collections.abc import Iterator

import pytest

from tests.support.devices import DEVICE, ON_GPU, runs_kernels

INTERPRETED_ONLY = {"test_model", "test_attention_mutants", "test_mla_mutants"}
"""They hold interpreted kernels to what a CPU computes, or change the kernels' sources."""


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    if not runs_kernels():
        pytest.skip("needs TRITON_INTERPRET=1 from the start (make kernels), or a GPU (make gpu)")


@pytest.fixture(autouse=True)
def _made_there(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU a test that does not take `device` makes its tensors there all the same."""
    if not ON_GPU or "device" in request.fixturenames:
        yield
        return
    if request.module.__name__.rpartition(".")[2] in INTERPRETED_ONLY:
        pytest.skip("for the interpreter")
    with DEVICE:
        yield
