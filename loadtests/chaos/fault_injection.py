"""Injects faults into processes of this user on this machine: signals and broken connections.

A connection is broken through a duplicate of the process's own socket (`pidfd_getfd`, Linux).
`shutdown` on the duplicate immediately closes the connection for both sides.
"""

import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

_PIDFD_GETFD = 438  # number of the system call, the same on all architectures

_libc = ctypes.CDLL(None, use_errno=True)


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal. Return False if the process does not exist."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def cut_connections(one: int, other: Sequence[int]) -> int:
    """Break the TCP connections between a process and others. Return how many were broken."""
    theirs = {_plain(each.laddr) for pid in other for each in _connections(pid)}
    ours = [each for each in _connections(one) if _plain(each.raddr) in theirs]
    return sum(_shut(one, each.fd) for each in ours)


def _plain(address: Any) -> tuple[str, int]:
    """Return an address without the IPv6 prefix of IPv4 addresses on dual-stack sockets."""
    return address.ip.removeprefix("::ffff:"), address.port


def _connections(pid: int) -> list[Any]:
    with suppress(psutil.Error):
        found = psutil.Process(pid).net_connections("tcp")
        return [each for each in found if each.status == psutil.CONN_ESTABLISHED and each.fd >= 0]
    return []


def _shut(pid: int, number: int) -> bool:
    """Shut down a socket of another process. Return False if that fails."""
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
