"""Starts helper processes by forking a process that has already imported their libraries.

Starting Python and importing the libraries takes 0.3 s; a fork takes a few milliseconds. The router
itself cannot be forked safely, because it has many threads. The fork server is therefore a separate
process with one thread.

Protocol: for each helper, the router sends one byte and two file descriptors: the helper's end of a
socket, and the write end of a pipe. When the helper has ended, the fork server writes the helper's
exit status to the pipe.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import penstock

_PASSED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Environment variables that helper processes inherit; only `PYTHONPATH` is set in addition.

Other variables may contain secrets, and helper processes run untrusted templates.
"""

STATUS_BYTES = 4
"""Size of an exit status in the pipe: a status from `os.waitpid`, as a little-endian integer."""


class StartedHelper(NamedTuple):
    """One side's ends of the connections of a new helper process: a socket and the status pipe.

    The router and the helper process each have one end of the socket. In the router, `status` is
    the read end of the pipe. In the helper process, `status` is -1, because only the fork server
    keeps the write end.
    """

    connection: socket.socket
    status: int  # file descriptor of the status pipe


class ForkServer:
    """The process from which helper processes are forked. It starts on first use.

    Args:
        module: name of the module that the process runs. The module gets the file descriptor of a
            socket as its argument and calls `serve_forks` with this socket.
    """

    def __init__(self, module: str = "penstock.router.helpers.main") -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process if it is not running."""
        if self._process is not None and self._process.poll() is None:
            return
        self._close_control()
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=helper_environment(os.environ),
                pass_fds=(other.fileno(),),
                start_new_session=True,  # Ctrl-C ends only the router, which then ends this process
            )
        self._control = own

    def fork(self) -> StartedHelper:
        """Start a helper process.

        The call does not wait for the process. If the process cannot be started, the other end of
        the returned socket is closed.
        """
        self.start()
        assert self._control is not None
        own, other = socket.socketpair()
        status, status_end = os.pipe()
        try:
            socket.send_fds(self._control, [b"f"], [other.fileno(), status_end])
        except OSError:  # the fork server has just died, and the caller finds its socket closed
            pass
        finally:
            other.close()
            os.close(status_end)
        own.setblocking(False)
        os.set_blocking(status, False)
        return StartedHelper(own, status)

    def close(self) -> None:
        """Kill the process, which also ends all helper processes, and wait for its end."""
        self._close_control()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def helper_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the fork server and of helper processes."""
    passed = {name: environment[name] for name in _PASSED if name in environment}
    # `-P` excludes the working directory, but the router may have found the package there.
    source = str(Path(penstock.__file__).resolve().parents[1])
    paths = [source, *filter(None, [environment.get("PYTHONPATH")])]
    return {**passed, "PYTHONPATH": os.pathsep.join(paths)}


# ------------------------------------------------------------ in the fork server's process


def serve_forks(control: socket.socket) -> StartedHelper | None:
    """Fork helper processes until the router has ended.

    Returns:
        In each helper process, its ends of the connections, immediately after the fork. In the fork
        server, None when the router has ended.
    """
    wake, wake_end = os.pipe()
    for end in (wake, wake_end):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}  # by process id: the write end of the status pipe
    ends = (control.fileno(), wake)
    while True:
        ready, _, _ = select.select(ends, [], [])
        if wake in ready:
            os.read(wake, 4096)
            _report_ended(statuses)
        if control.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not message:
                return None
            connection, status = descriptors
            try:
                pid = os.fork()
            except OSError as error:  # the system lacks memory, or has too many processes
                print(f"a helper process cannot be forked: {error}", file=sys.stderr)
                os.close(connection)
                os.close(status)
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                for descriptor in (wake, wake_end, status, *statuses.values()):
                    os.close(descriptor)
                return StartedHelper(socket.socket(fileno=connection), -1)
            os.close(connection)
            statuses[pid] = status


def _report_ended(statuses: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        descriptor = statuses.pop(pid, None)
        if descriptor is not None:
            with suppress(BrokenPipeError):  # the router has already closed its end of the pipe
                os.write(descriptor, status.to_bytes(STATUS_BYTES, "little"))
            os.close(descriptor)
