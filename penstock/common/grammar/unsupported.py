"""The error for a schema that the format of a model's tool calls cannot express."""


class UnsupportedSchemaError(Exception):
    """The format of a model's tool calls cannot express a keyword of a schema.

    Args:
        path: JSON pointer of the keyword.
        problem: a clause that says what is not supported.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
