"""Tests that take the fixture `device` hold a kernel to its reference: interpreted, or on a GPU."""

import pytest
import torch

from tests.support.devices import DEVICE, runs_kernels
from tests.support.only_kernels import only_kernels

__all__ = ["only_kernels"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The CPU, where kernels are interpreted, or the GPU of `make gpu`."""
    if not runs_kernels():
        pytest.skip("needs TRITON_INTERPRET=1 from the start (make kernels), or a GPU (make gpu)")
    return DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("interpreted")
