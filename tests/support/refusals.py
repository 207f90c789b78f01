"""Checks of the errors of commands."""

from collections.abc import Callable, Sequence

import pytest


def assert_refused(
    main: Callable[[list[str]], int],
    arguments: Sequence[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Assert that a command exits with 2 and prints one line that contains `message`."""
    try:
        code = main([*arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
