"""Checks for errors in OpenAI's format."""

from pathlib import Path
from typing import Any

import httpx


def check_form(response: httpx.Response) -> dict[str, Any]:
    """Check that a response is an error in OpenAI's format without internal details."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    message = error["message"]
    assert message
    assert "\n" not in message
    for leak in ("Traceback", 'File "', "0x", str(Path.cwd()), "/tmp", ".py", "pydantic"):
        assert leak not in message
    return error
