"""The error for an invalid parameter of a request."""


class InvalidParameterError(ValueError):
    """A parameter of a request is invalid.

    Args:
        message: one line for the client, with the wrong value and the allowed values.
        param: name of the parameter, as in the OpenAI API.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
