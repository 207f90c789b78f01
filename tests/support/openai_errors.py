"""The form of OpenAI's errors, checked."""

from pathlib import Path
from typing import Any

import httpx


def check_form(response: httpx.Response) -> dict[str, Any]:
    """An error in OpenAI's form that tells nothing it should not."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    message = error["message"]
    assert message
    assert "\n" not in message
    for leak in ("Traceback", 'File "', "0x", str(Path.cwd()), "/tmp", ".py", "pydantic"):
        assert leak not in message
    return error
