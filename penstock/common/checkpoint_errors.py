"""Exceptions for checkpoints that cannot be served. Each message has only one line."""


class BadCheckpoint(ValueError):
    """A checkpoint is incomplete or invalid. The message names the problem."""


class UnsupportedModel(ValueError):
    """The checkpoint is valid, but its model or one of its options is not supported.

    The message names the unsupported model or option.
    """
