"""Fixtures of the kernel tests. The fixture `device` is for Triton, interpreted or on a GPU."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from tests.support.devices import DEVICE, runs_kernels
from tests.support.only_kernels import only_kernels

__all__ = ["only_kernels"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the CPU if Triton kernels are interpreted; with `make gpu`, return the GPU."""
    if not runs_kernels():
        pytest.skip("needs TRITON_INTERPRET=1 before the start (make kernels), or a GPU (make gpu)")
    return DEVICE


@pytest.fixture(autouse=True)
def _freed_arrays() -> Iterator[None]:
    """Check that compiled loops free every array that they allocate."""
    if not has_numba():
        yield
        return
    configure_numba()  # numba reads its settings only before it first compiles
    runtime: Any = importlib.import_module("numba.core.runtime._nrt_python")
    runtime.memsys_enable_stats()
    before = runtime.memsys_get_stats_alloc() - runtime.memsys_get_stats_free()
    yield
    assert runtime.memsys_get_stats_alloc() - runtime.memsys_get_stats_free() == before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("interpreted")
