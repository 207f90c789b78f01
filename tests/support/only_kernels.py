"""On a GPU a test of a kernel fails where the kernel was not what computed."""

from collections.abc import Iterator

import pytest

from penstock.kernels.fallback import forbid_fallback
from tests.support.devices import DEVICE


@pytest.fixture(autouse=True)
def only_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """To be had in a folder by its conftest; where kernels are interpreted, it holds nobody up."""
    if any(request.node.get_closest_marker(name) for name in ("interpreted", "gpu")):
        with forbid_fallback(DEVICE):
            yield
    else:
        yield
