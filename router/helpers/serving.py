"""The loop of a helper process: reads a job, does the job within its limits, sends the reply."""

import gc
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

from penstock.router.errors import Code, ServingError
from penstock.router.helpers.frames import FrameReader, pack
from penstock.router.helpers.limits import limit_process, limited_time
from penstock.router.helpers.replies import Reply, encode_reply
from penstock.router.helpers.settings import HelperSettings, decode_settings

log = logging.getLogger(__name__)

RECEIVE_BYTES = 64 << 10
OUT_OF_MEMORY = 3
"""Exit code of a process that ran out of memory during a job."""

Work: TypeAlias = Callable[[Sequence[bytes]], list[bytes]]
SetUp: TypeAlias = Callable[[HelperSettings], tuple[Work, list[bytes]]]


def serve_jobs(connection: socket.socket, set_up: SetUp) -> int:
    """Do jobs in order until the router closes the connection, and return the exit code.

    The first frame contains the settings. `set_up` returns the function that does the jobs, and the
    items of the first reply.
    """
    frames = _frames(connection)
    first = next(frames, None)
    if first is None:
        return 0
    settings = decode_settings(first[0])
    limits = settings.limits
    limit_process(limits.memory_bytes)
    work: Work = _no_work

    def begin(items: Sequence[bytes]) -> list[bytes]:
        nonlocal work
        work, found = set_up(settings)
        return found

    job: Work = begin
    items: Sequence[bytes] | None = ()
    while items is not None:
        try:
            # A large job may create a million objects, which the garbage collector would scan again
            # and again.
            gc.disable()
            with limited_time(limits.cpu_seconds, limits.wall_seconds):
                reply = pack(encode_reply(do_job(job, items)))
        except MemoryError:
            return OUT_OF_MEMORY  # do not continue: the free memory may be fragmented
        gc.enable()
        try:
            connection.sendall(reply)
        except OSError:  # the router has closed the connection
            return 0
        job, items = work, next(frames, None)
    return 0


def do_job(work: Work, items: Sequence[bytes]) -> Reply:
    """Do a job and return its reply; exceptions become error replies.

    Raises:
        MemoryError: the process has no memory left.
    """
    began = time.thread_time()
    found: list[bytes] = []
    error: ServingError | None = None
    try:
        found = work(items)
    except ServingError as refusal:
        # The traceback refers to the data of the job, and to this frame, which refers to the error.
        # This cycle would keep up to 100 MB until the garbage collector runs.
        refusal.__traceback__ = refusal.__cause__ = refusal.__context__ = None
        error = refusal
    except MemoryError:
        raise
    except Exception:
        log.exception("a job of a helper process failed")
        error = ServingError(Code.INTERNAL, "internal error: see the server's log")
    except BaseException as failure:
        # Libraries that are written in Rust panic if they cannot allocate an object. The type
        # PanicException cannot be imported.
        if type(failure).__name__ == "PanicException":
            raise MemoryError from failure
        raise
    return Reply(round((time.thread_time() - began) * 1e6), found, error)


def _frames(connection: socket.socket) -> Iterator[list[bytes]]:
    reader = FrameReader()
    with suppress(ConnectionResetError):
        while data := connection.recv(RECEIVE_BYTES):
            yield from reader.feed(data)


def _no_work(items: Sequence[bytes]) -> list[bytes]:
    raise ServingError(Code.INTERNAL, "the helper process was not set up")
