"""If a client waits for the time in Retry-After, its next request is accepted."""

import pytest

from penstock.router.api.http import error_response
from penstock.router.errors import Code, ServingError


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (1.0, "1"), (1.2, "2"), (59.9, "60")])
def test_retry_after_is_rounded_up_to_whole_seconds(seconds: float, header: str) -> None:
    error = ServingError(Code.OVERLOADED, "try later", retry_after=seconds)
    assert error_response(error).headers["retry-after"] == header
