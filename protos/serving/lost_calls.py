"""Keeps gRPC from logging an error for each call that ends while its reply is being sent."""

import logging

import grpc.aio

log = logging.getLogger(__name__)

GRPC_LOGGER = "grpc._cython.cygrpc"
"""Name of the logger of gRPC's server."""


class _LostCalls(logging.Filter):
    """Drops gRPC's records of replies that could not be sent, and logs them as DEBUG instead.

    If a client disconnects or its deadline expires, the reply can no longer be sent. gRPC logs
    nothing if it has noticed this before, but otherwise an error with a traceback.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError):
            return True
        log.debug("a call ended before its reply was sent: %s", record.getMessage())
        return False


_FILTER = _LostCalls()


def ignore_lost_calls() -> None:
    """Log calls that end while their reply is being sent as DEBUG, not as ERROR."""
    logging.getLogger(GRPC_LOGGER).addFilter(_FILTER)
