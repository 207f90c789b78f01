"""The router's side of one helper process."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from penstock.router.helpers.fork_server import STATUS_BYTES, StartedHelper
from penstock.router.helpers.frames import BadFrameError, FrameReader, frame_size, pieces
from penstock.router.helpers.replies import Reply, decode_reply
from penstock.router.helpers.serving import OUT_OF_MEMORY


class Cause(Enum):
    """Why a helper process ended: the limit that its job exceeded, if any."""

    CPU_TIME = "CPU time"
    WALL_TIME = "time"
    MEMORY = "memory"
    OTHER = "none"  # no limit was exceeded: the process was killed, or it failed


@dataclass(slots=True, eq=False)
class Job:
    """A job for a helper process.

    Attributes:
        items: name of the handler that does the job, then the handler's arguments.
        name: how error messages name the job's input, for example "the body".
        param: request field that the error names if the job is refused, or None.
        done: future that gets the reply to the job.
        was_tried: whether a process has ended during this job without exceeding a limit.
    """

    items: Sequence[bytes]
    name: str
    param: str | None
    done: asyncio.Future[Reply]
    was_tried: bool = False

    @property
    def size(self) -> int:
        """Number of bytes that are sent to the process."""
        return frame_size(self.items)


class HelperProcess(asyncio.Protocol):
    """A connection to a helper process, which does its jobs in order.

    Args:
        started: socket and pipe of the process.
        on_reply: called with the job and its reply.
        on_end: called once, with the cause, when the process has ended. At that time `jobs`
            contains the jobs without a reply; the process was working on the first of them.
    """

    def __init__(
        self,
        started: StartedHelper,
        on_reply: Callable[[Job, Reply], None],
        on_end: Callable[[Cause], None],
    ) -> None:
        self.jobs: deque[Job] = deque()
        self._started = started
        self._on_reply = on_reply
        self._on_end = on_end
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        # For each job, the pieces that have not been passed to the transport. In Python 3.11, the
        # transport copies bytes that the socket does not accept at once, so it gets one piece at a
        # time: copying a large job would hold the event loop for milliseconds.
        self._unsent: deque[Iterator[bytes | memoryview]] = deque()
        self._is_writable = True
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def connect(self) -> None:
        """Connect to the process; must be called before `send`."""
        await self._loop.create_unix_connection(lambda: self, sock=self._started.connection)

    def send(self, job: Job) -> None:
        """Send a job to the process, which does its jobs in the order in which they are sent."""
        self.jobs.append(job)
        self._unsent.append(pieces(job.items))
        self._write()

    def close(self) -> None:
        """Close the connection without calling `on_end`; the process ends after its current job."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._write()

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._write()

    def data_received(self, data: bytes) -> None:
        try:
            for items in self._reader.feed(data):
                reply = decode_reply(items)
                self._on_reply(self.jobs.popleft(), reply)
        # The process has sent something other than the reply to a job, so end the connection.
        except (BadFrameError, ValueError, IndexError):
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._unsent.clear()
        if self._is_closed:
            os.close(self._started.status)
            return
        # The fork server writes the exit status shortly after the connection ends.
        self._loop.add_reader(self._started.status, self._read_status)

    def _write(self) -> None:
        """Pass pieces of jobs to the transport until it accepts no more."""
        transport = self._transport
        if transport is None:
            return
        while self._unsent and self._is_writable and not transport.is_closing():
            piece = next(self._unsent[0], None)
            if piece is None:
                self._unsent.popleft()
            else:
                transport.write(piece)

    def _read_status(self) -> None:
        descriptor = self._started.status
        self._loop.remove_reader(descriptor)
        status = os.read(descriptor, STATUS_BYTES)
        os.close(descriptor)
        self._on_end(cause_of(int.from_bytes(status, "little")))


def cause_of(status: int) -> Cause:
    """Return why a process ended, given the exit status `status` from `os.waitpid`."""
    code = os.waitstatus_to_exitcode(status)
    causes = {
        -signal.SIGPROF: Cause.CPU_TIME,
        -signal.SIGALRM: Cause.WALL_TIME,
        OUT_OF_MEMORY: Cause.MEMORY,
        -signal.SIGABRT: Cause.MEMORY,  # a library called `abort` because an allocation failed
        -signal.SIGSEGV: Cause.MEMORY,  # the kernel ends the process if its stack cannot grow
    }
    return causes.get(code, Cause.OTHER)


def settings_job(data: bytes) -> Job:
    """Return the first job of a process, which contains the encoded settings `data`."""
    done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    return Job([data], "the model's chat template", None, done)
