"""Fixtures of tests that need Triton's interpreter or a GPU, and are skipped otherwise."""

from collections.abc import Iterator

import pytest

from tests.support.devices import DEVICE, ON_GPU, runs_kernels

INTERPRETED_ONLY = {"test_model", "test_attention_mutants", "test_mla_mutants"}
"""Modules that compare interpreted kernels with CPU ops, or change the kernels' sources."""


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    if not runs_kernels():
        pytest.skip("needs TRITON_INTERPRET=1 before the start (make kernels), or a GPU (make gpu)")


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU machine, make the GPU the default device of tests without the fixture `device`."""
    if not ON_GPU or "device" in request.fixturenames:
        yield
        return
    if request.module.__name__.rpartition(".")[2] in INTERPRETED_ONLY:
        pytest.skip("runs in the interpreter only")
    with DEVICE:
        yield
