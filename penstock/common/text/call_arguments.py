"""The arguments of a tool call, in the form that a chat template reads."""

import json


def read_arguments(arguments: str) -> object:
    """Return the arguments of a call as a mapping, or unchanged if they are not a JSON object."""
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
