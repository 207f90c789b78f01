"""Fixtures of the kernel tests. The fixture `device` is for Triton, interpreted or on a GPU."""

import pytest
import torch

from tests.support.devices import DEVICE, runs_kernels
from tests.support.only_kernels import only_kernels

__all__ = ["only_kernels"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the CPU if Triton kernels are interpreted; with `make gpu`, return the GPU."""
    if not runs_kernels():
        pytest.skip("needs TRITON_INTERPRET=1 before the start (make kernels), or a GPU (make gpu)")
    return DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("interpreted")
