"""The scan of rows of logits, by compiled loops and by numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from penstock.kernels.sampling.row_scan import RowScan, scan_rows, scan_rows_reference

Scan = Callable[[Tensor], RowScan]
both = pytest.mark.parametrize("scan", [scan_rows, scan_rows_reference])

FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, -3e38]),
    st.floats(width=32),
)


@settings(max_examples=300, deadline=None)
@given(arrays.arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(1, 9)), elements=FLOATS))
@example(np.array([[-np.nan, 1.0]], np.float32))
@example(np.array([[-np.inf, -np.inf]], np.float32))
@example(np.array([[-0.0, 0.0], [0.0, -0.0]], np.float32))
@example(np.array([[3e38, 3e38, -3e38, -3e38]], np.float32))
def test_definition(values: np.ndarray) -> None:
    for scan in (scan_rows, scan_rows_reference):
        found = scan(torch.from_numpy(values))
        for row, token, finite, largest_is_finite in zip(values, *found, strict=True):
            has_nan = bool(np.isnan(row).any())
            assert finite == np.isfinite(row).all()
            assert largest_is_finite == (not has_nan and np.isfinite(row.max()))
            assert has_nan or token == row.argmax()


@both
@pytest.mark.parametrize("num_tokens", [1023, 1024, 1025, 5000, 32000])
def test_long_rows(scan: Scan, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    logits = torch.randn(9, num_tokens)
    logits[1, -1] = logits[2, 0] = 9.0
    logits[3, num_tokens // 2] = logits[3, num_tokens // 3] = 9.0
    logits[4] = -5.0
    logits[5, num_tokens - 2], logits[6, 1], logits[7, 700] = torch.nan, -torch.inf, torch.inf
    tokens, finite, largest_is_finite = scan(logits)
    expected = logits.numpy().argmax(-1)
    valid = [0, 1, 2, 3, 4, 6, 7, 8]
    assert tokens[valid].tolist() == expected[valid].tolist()
    assert tokens[4] == 0
    assert finite.tolist() == [True] * 5 + [False] * 3 + [True]
    assert largest_is_finite.tolist() == [True] * 5 + [False, True, False, True]


def test_rows_with_gaps_between_them() -> None:
    logits = torch.randn(6, 50)
    found, expected = scan_rows(logits[:, :40]), scan_rows(logits[:, :40].contiguous())
    assert found.tokens.tolist() == expected.tokens.tolist()
