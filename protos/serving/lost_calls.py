"""Keeps gRPC from logging an error for each call that ends while its reply is being sent."""

import logging

log = logging.getLogger(__name__)

GRPC_LOGGER = "grpc._cython.cygrpc"
"""Name of the logger of gRPC's server."""

LOST = ("ExecuteBatchError", 'Failed "execute_batch"')
"""Type and first words of the error that gRPC raises if a message could not be sent.

Errors of this type with another text mean that the server used gRPC in a wrong way.
"""


class _LostCalls(logging.Filter):
    """Logs gRPC's records about unsent replies at the level DEBUG instead of ERROR.

    A reply cannot be sent after the client has disconnected or the call's deadline has expired. If
    gRPC learns of this only while it sends the reply, it logs an error with a traceback.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        name, text = LOST
        if type(error).__name__ != name or not str(error).startswith(text):
            return True
        log.debug("a call ended before its reply was sent: %s", error)
        return False


_FILTER = _LostCalls()


def ignore_lost_calls() -> None:
    """Log at level DEBUG, instead of ERROR, each call that ends while its reply is being sent."""
    logging.getLogger(GRPC_LOGGER).addFilter(_FILTER)
