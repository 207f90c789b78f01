"""The largest magnitude of float32 values, as bits."""

import numpy as np
import pytest

from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba

pytestmark = pytest.mark.skipif(not has_numba(), reason="needs numba")


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([], 0.0),
        ([-0.0], 0.0),
        ([1.5, -2.5, 2.0], 2.5),
        ([1e-45, 0.0], 1e-45),
        ([1.0, -np.inf], np.inf),
    ],
)
@pytest.mark.parametrize("zeros", [0, 37, 200])
def test_largest_magnitude(values: list[float], largest: float, zeros: int) -> None:
    given = np.array([0.0] * zeros + values, np.float32)
    assert find(given) == np.float32(largest).view(np.int32)


def test_bits_of_nan_are_the_largest() -> None:
    values = np.array([np.inf] * 50, np.float32)
    values[33] = np.nan
    assert find(values) > np.float32(np.inf).view(np.int32)


def find(values: np.ndarray) -> int:
    configure_numba()
    import numba

    from penstock.kernels.cpu_common.magnitude import largest_magnitude_bits

    call = numba.njit(lambda values: largest_magnitude_bits(values))
    return int(call(values))
