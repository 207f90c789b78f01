"""Formats JSON values in clients' requests for error messages."""

from penstock.common.number_text import number_text

MAX_CHARS = 40


def value_text(value: object) -> str:
    """Return a JSON value as short text, without the contents of a list or an object."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return number_text(value)
        case str():
            return repr(value[:MAX_CHARS])
        case list() | tuple():
            return f"a list of {len(value)} items"
        case dict():
            return f"an object of {len(value)} members"
    return f"a value of type {type(value).__name__}"
