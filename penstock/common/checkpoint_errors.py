"""Exceptions for checkpoints that cannot be served; each message is one line."""


class BadCheckpoint(ValueError):
    """A checkpoint is not complete and valid; the message says what to do."""


class UnsupportedModel(ValueError):
    """The checkpoint is valid, but its model or an option (named in the message) is not served."""
