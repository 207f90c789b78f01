"""How processes are struck: signals, and connections that break. Of this user, on this machine.

A connection is cut with the process's own socket: its kernel hands out a second name of it
(pidfd_getfd, Linux), on which `shutdown` ends it for both sides at once.
"""

import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

_PIDFD_GETFD = 438  # the number of the system call, on every machine

_libc = ctypes.CDLL(None, use_errno=True)


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def cut_connections(one: int, other: Sequence[int]) -> int:
    """Break the TCP connections between a process and some others; returns how many there were."""
    theirs = {_plain(each.laddr) for pid in other for each in _connections(pid)}
    ours = [each for each in _connections(one) if _plain(each.raddr) in theirs]
    return sum(_shut(one, each.fd) for each in ours)


def _plain(address: Any) -> tuple[str, int]:
    """An address as both ends name it: a socket for both protocols has its own name for IPv4."""
    return address.ip.removeprefix("::ffff:"), address.port


def _connections(pid: int) -> list[Any]:
    with suppress(psutil.Error):
        found = psutil.Process(pid).net_connections("tcp")
        return [each for each in found if each.status == psutil.CONN_ESTABLISHED and each.fd >= 0]
    return []


def _shut(pid: int, number: int) -> bool:
    """Shut a socket of another process."""
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            copy = _libc.syscall(_PIDFD_GETFD, process, number, 0)
        finally:
            os.close(process)
        if copy < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        with socket.socket(fileno=copy) as theirs:
            theirs.shutdown(socket.SHUT_RDWR)
        return True
    return False
