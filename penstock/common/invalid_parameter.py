"""Error of an invalid request parameter."""


class InvalidParameterError(ValueError):
    """A parameter of a request is invalid.

    Args:
        message: one line for the client: what was wrong and what is allowed.
        param: name of the parameter, as in the OpenAI API.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
