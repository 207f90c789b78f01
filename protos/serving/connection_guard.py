"""Limits how many connections each client address may have open to a gRPC port.

gRPC limits the total number of connections of a port, but not the number of connections of each
client address. One client could therefore prevent all others from connecting. gRPC accepts
connections in threads of its own, and Python code gets only the calls on these connections. A
thread of this module therefore checks the sockets of this process. If an address exceeds its limit,
the thread shuts down the newest sockets of this address. gRPC then closes these connections, as if
the clients had disconnected.

The limit of each address needs Linux. On other systems, only the total number of connections is
limited.
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
"""Seconds between two checks.

After a check that closed a connection, the next check follows without this pause. It immediately
finds the connections that a client opens in place of the closed ones.
"""

PAUSE_PER_SECOND = 10.0
"""Additional seconds of pause per CPU second of the last check.

This pause limits the checks to less than a tenth of a core.
"""


class ConnectionGuard:
    """Closes the newest connections of a client address that has too many connections to a port.

    A thread checks the connections periodically. While this process has at most as many open
    descriptors as the limit allows connections, no address can exceed the limit. In this usual
    case, a check is only one system call.

    Args:
        port: number of the port on which this process listens.
        max_per_address: largest number of open connections of one IPv4 address or IPv6 network, or
            0 for no limit.
        refused: counts the closed connections.
    """

    def __init__(self, port: int, max_per_address: int, refused: RefusedConnections) -> None:
        self._port = port
        self._max_per_address = max_per_address
        self._refused = refused
        # For each known socket, by inode number, the client's network, or "" if the socket is not
        # counted. The key is the inode number, because it is reused only after 2**32 other sockets.
        # The number of a descriptor may be reused immediately.
        self._known: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        if max_per_address:
            self._thread.start()

    def close(self) -> None:
        """End the thread that checks the connections."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._stop.wait(pause):
            began = time.thread_time()
            before = self._refused.total
            with suppress(OSError):  # the process may have no free descriptor for this check
                self._check()
            pause = 0.0 if self._refused.total > before else LOOK_SECONDS
            pause += PAUSE_PER_SECOND * (time.thread_time() - began)

    def _check(self) -> None:
        if num_descriptors() <= self._max_per_address:
            return
        known: dict[int, str] = {}
        # Descriptor of each new socket, by inode number. Several descriptors may belong to one
        # socket, because the guard of another port may just have duplicated its descriptor.
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
        connection = socket_of(descriptor)
        if connection is None:
            return
        with connection:
            inode = _socket_inode(connection.fileno())
            if inode in self._known:  # the descriptor was reused for a known socket
                return
            network = self._client_of(connection)
            if network and num_open[network] >= self._max_per_address:
                self._refused.add(network)
                with suppress(OSError):  # the client may have disconnected
                    connection.shutdown(socket.SHUT_RDWR)
                network = ""
            num_open[network] += 1
            self._known[inode] = network

    def _client_of(self, connection: socket.socket) -> str:
        """Return the network of the client if the socket is a connection to the port, else ""."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        try:
            own, peer = connection.getsockname(), connection.getpeername()
        except OSError:  # the socket is listening, or the client has disconnected
            return ""
        return client_network(peer[0]) if own[1] == self._port else ""


def socket_of(descriptor: int) -> socket.socket | None:
    """Return the socket of a file descriptor, or None if it is closed or not a socket.

    gRPC may close the descriptor at any time, and its number may then be reused for another file.
    The returned object has a copy of the descriptor, which stays the same socket until it is
    closed.
    """
    try:
        copy = os.dup(descriptor)
    except OSError:  # the descriptor has been closed
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # the descriptor was reused, but not for a socket
        os.close(copy)
        return None


def num_descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    # Since Linux 6.2, the size of the folder is the number of its entries. Before, it was 0.
    return os.stat(DESCRIPTORS).st_size or len(os.listdir(DESCRIPTORS))


def _socket_inode(descriptor: int) -> int:
    """Return the inode number of a socket, or 0 if the descriptor is closed or not a socket."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0
