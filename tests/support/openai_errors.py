"""Checks for errors in OpenAI's format, and for texts of errors of all protocols."""

import re
from pathlib import Path
from typing import Any

import httpx


def check_form(response: httpx.Response) -> dict[str, Any]:
    """Check that a response is an error in OpenAI's format without internal details."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (response.status_code, "context_length_exceeded")
    check_text(error["message"])
    return error


def check_text(message: str) -> None:
    """Check that the text of an error is one line without paths, addresses or tracebacks."""
    assert message
    assert "\n" not in message
    for leak in ("Traceback", 'File "', "0x", str(Path.cwd()), "/tmp", ".py", "pydantic"):
        assert leak not in message
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", message), "the error has an IP address"
