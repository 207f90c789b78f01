"""Numbers of clients in error messages."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.number_text import number_text

LONG = "a number of more than 64 bits"


@given(st.integers(-(2**64) + 1, 2**64 - 1) | st.floats())
def test_numbers_are_shown(value: float) -> None:
    assert number_text(value) == str(value)


@given(st.integers(min_value=2**64) | st.integers(max_value=-(2**64)))
def test_long_integers_are_not_shown(value: int) -> None:
    assert number_text(value) == LONG


def test_integers_that_python_cannot_convert_are_not_shown() -> None:
    assert number_text(10**5000) == LONG
