"""Parses request bodies; a refusal names the field as the client wrote it."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from penstock.router.api.generation.strict_model import StrictModel
from penstock.router.errors import ServingError, invalid

Body = TypeVar("Body", bound=StrictModel)

NOT_AN_OBJECT = ("model_type", "model_attributes_type")
"""Types of pydantic's errors whose messages contain the name of a Python class."""


def parse(kind: type[Body], body: bytes) -> Body:
    """Parse a JSON body.

    Raises:
        ServingError: INVALID; the message is the first problem, as one line.
    """
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _to_serving_error(error, body) from error
    parsed.check_extra()
    parsed.check()
    return parsed


def keys(body: bytes) -> Collection[str]:
    """Return the keys of a JSON object; no keys for any other text, which `parse` refuses."""
    try:
        content = from_json(body)
    except ValueError:
        return ()
    return content.keys() if isinstance(content, dict) else ()


def _to_serving_error(error: ValidationError, body: bytes) -> ServingError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return invalid(errors[0]["msg"].replace("Invalid JSON", "the body is not valid JSON"))
    content = from_json(body)
    found = [(_path(each, content), each) for each in errors]
    first, _ = found[0]
    # A value that fits no type of a union has one error for each type of the union.
    # The error with the longest path is reported: a list with a bad item was probably meant as a
    # list.
    same = [(path, each) for path, each in found if path[: len(first)] == first]
    path, chosen = max(same, key=lambda entry: len(entry[0]))
    where = ".".join(path) if path else "the body"
    why = "Input should be an object" if chosen["type"] in NOT_AN_OBJECT else chosen["msg"]
    return invalid(f"{where}: {why}", path[0] if path else None)


def _path(error: ErrorDetails, content: Any) -> Sequence[str]:
    """Return the keys that lead to the wrong value, without pydantic's names of union members."""
    path = []
    *_, last = error["loc"] or (None,)
    for key in error["loc"]:
        if _has(content, key):
            content = content[key]
        elif not (key is last and error["type"] == "missing"):
            continue
        path.append(str(key))
    return path


def _has(content: Any, key: int | str) -> bool:
    return key in content if isinstance(content, dict) else isinstance(key, int)
