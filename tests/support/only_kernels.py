"""A fixture that fails a kernel test on a GPU if a fallback computed the result."""

from collections.abc import Iterator

import pytest

from penstock.kernels.fallback import forbid_fallback
from tests.support.devices import DEVICE


@pytest.fixture(autouse=True)
def only_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forbid kernel fallbacks in tests marked `gpu` or `interpreted`; imported by a conftest."""
    if any(request.node.get_closest_marker(name) for name in ("interpreted", "gpu")):
        with forbid_fallback(DEVICE):
            yield
    else:
        yield
