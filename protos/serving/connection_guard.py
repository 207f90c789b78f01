"""Limits the open connections of each client address to a gRPC port.

gRPC limits the total number of connections of a port, but not the number of each address, so one
client could prevent all others from connecting. gRPC accepts connections in threads of its own and
shows Python only their calls. A thread therefore checks the sockets of this process. If an address
exceeds its limit, the thread shuts down the address's newest connections in the kernel. To gRPC,
these clients then seem to have disconnected.

This needs Linux; on other systems, only the total number of connections is limited.
"""

import os
import socket
import stat
import threading
import time
from collections import Counter
from contextlib import suppress

from penstock.protos.serving.refused_connections import RefusedConnections, client_network

DESCRIPTORS = "/proc/self/fd"
"""Folder with an entry for each open file descriptor of this process."""

LOOK_SECONDS = 0.25
"""Pause between two checks. After a refusal, there is none, so that the port is hard to refill."""

PAUSE_PER_SECOND = 10.0
"""Additional seconds of pause per CPU second of a check; limits the checks' share of a core."""


class ConnectionGuard:
    """Closes an address's newest connections to a port when the address has too many.

    A thread checks this periodically. A check usually takes one system call: if this process has no
    more open descriptors than the limit, no address can exceed the limit.

    Args:
        port: the number of the port, on which this process listens.
        max_per_address: open connections from one IPv4 address or IPv6 network; 0: any number.
        refused: counts the closed connections.
    """

    def __init__(self, port: int, max_per_address: int, refused: RefusedConnections) -> None:
        self._port = port
        self._max_per_address = max_per_address
        self._refused = refused
        # For each known socket, by inode number, the client's network, or "" if the socket is not
        # counted. Descriptor numbers are reused at once, inode numbers only after 2**32 others.
        self._known: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        if max_per_address:
            self._thread.start()

    def close(self) -> None:
        """End the checks."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._stop.wait(pause):
            began = time.thread_time()
            before = self._refused.total
            with suppress(OSError):  # without a free descriptor, the check cannot run this time
                self._check()
            pause = 0.0 if self._refused.total > before else LOOK_SECONDS
            pause += PAUSE_PER_SECOND * (time.thread_time() - began)

    def _check(self) -> None:
        if num_descriptors() <= self._max_per_address:
            return
        known: dict[int, str] = {}
        # Descriptor of each new socket, by inode: another guard may hold a duplicate descriptor of
        # the same socket open.
        new: dict[int, int] = {}
        for descriptor in map(int, os.listdir(DESCRIPTORS)):
            inode = _socket_inode(descriptor)
            if inode in self._known:
                known[inode] = self._known[inode]
            elif inode:
                new[inode] = descriptor
        self._known = known
        num_open = Counter(known.values())
        for descriptor in sorted(new.values()):
            self._admit(descriptor, num_open)

    def _admit(self, descriptor: int, num_open: Counter[str]) -> None:
        """Count a new socket in `num_open`, or shut it down if its address has too many."""
        # gRPC may close the descriptor at any time, and its number may then be reused. The copy
        # stays the same socket, and only the copy is examined and shut down.
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed
            return
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # the descriptor was reused, but not for a socket
            os.close(copy)
            return
        with connection:
            inode = _socket_inode(copy)
            if inode in self._known:  # the descriptor was reused for a known socket
                return
            network = self._client_of(connection)
            if network and num_open[network] >= self._max_per_address:
                self._refused.add(network)
                with suppress(OSError):  # the client has disconnected
                    connection.shutdown(socket.SHUT_RDWR)
                network = ""
            num_open[network] += 1
            self._known[inode] = network

    def _client_of(self, connection: socket.socket) -> str:
        """Return the network of the client of a connection to the port; "" for any other socket."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        try:
            own, peer = connection.getsockname(), connection.getpeername()
        except OSError:  # a listening socket, or the client has disconnected
            return ""
        return client_network(peer[0]) if own[1] == self._port else ""


def num_descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    # Linux before 6.2 reports a size of 0.
    return os.stat(DESCRIPTORS).st_size or len(os.listdir(DESCRIPTORS))


def _socket_inode(descriptor: int) -> int:
    """Return the inode number of a socket, or 0 if the descriptor is closed or not a socket."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0
