"""Exceptions for checkpoints that cannot be served; each message is one line."""


class BadCheckpoint(ValueError):
    """A checkpoint is incomplete or invalid; the message names the problem."""


class UnsupportedModel(ValueError):
    """The checkpoint is valid, but its model or an option (named in the message) is unsupported."""
