"""A fixture that fails a kernel test if a fallback runs instead of a Triton kernel."""

from collections.abc import Iterator

import pytest

from penstock.kernels.fallback import forbid_fallback
from tests.support.devices import DEVICE


@pytest.fixture(autouse=True)
def only_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forbid kernel fallbacks in tests marked `gpu` or `interpreted`. A conftest imports this."""
    if any(request.node.get_closest_marker(name) for name in ("interpreted", "gpu")):
        with forbid_fallback(DEVICE):
            yield
    else:
        yield
