"""Checks for errors in the formats of OpenAI and Anthropic, and for the text of any error."""

import re
from pathlib import Path
from typing import Any

import httpx


def check_form(response: httpx.Response) -> dict[str, Any]:
    """Check that a response is an error in its API's format, without internal details."""
    body = response.json()
    error: dict[str, Any] = body["error"]
    check_text(error["message"])
    if response.request.url.path.startswith("/v1/messages"):
        assert (set(error), body["type"]) == ({"message", "type"}, "error")
        assert response.headers["request-id"] == body["request_id"]
        return error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (response.status_code, "context_length_exceeded")
    return error


def check_text(message: str) -> None:
    """Check that the text of an error is one line without paths, addresses or tracebacks."""
    assert message
    assert "\n" not in message
    for leak in ("Traceback", 'File "', "0x", str(Path.cwd()), "/tmp", ".py", "pydantic"):
        assert leak not in message
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", message), "the error has an IP address"
