"""Ends a gRPC call whose client does not read the messages of the call.

gRPC sends a call's status after its messages, and a server that uses `grpc.aio` cannot reset the
call's HTTP/2 stream. A client that reads nothing therefore keeps its call open. To end the call,
its connection is closed.
"""

import asyncio
import os
import socket
from contextlib import suppress
from urllib.parse import unquote

import grpc.aio

from penstock.protos.serving.connection_guard import DESCRIPTORS, socket_of


async def until_written(
    writer: asyncio.Task[None], context: grpc.aio.ServicerContext, port: int, seconds: float
) -> None:
    """Wait until the last messages of a call have been written.

    Args:
        writer: writes the messages, and ends if the client has disconnected.
        context: the call.
        port: number of the port on which this process listens.
        seconds: after this time, the connection of the client is closed. All of its calls end.
    """
    await asyncio.wait((writer,), timeout=seconds)
    if not writer.done():
        close_connection(port, context.peer())
    await writer


def close_connection(port: int, peer: str) -> None:
    """Close a client's connection to a port of this process, as if the client had disconnected.

    This needs Linux. On other systems, the function does nothing.

    Args:
        port: number of the port.
        peer: address of the client, as gRPC writes it, for example "ipv4:127.0.0.1:40000".
    """
    host, _, client_port = unquote(peer).partition(":")[2].rpartition(":")
    client = (_address(host.strip("[]")), int(client_port))
    for name in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():
        connection = socket_of(int(name))
        if connection is None:
            continue
        with connection, suppress(OSError):  # the socket may not be connected
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                own, other = connection.getsockname(), connection.getpeername()
                if own[1] == port and (_address(other[0]), other[1]) == client:
                    connection.shutdown(socket.SHUT_RDWR)


def _address(host: str) -> str:
    """Return `host` without `::ffff:`, which IPv6 sockets put before IPv4 addresses."""
    return host.removeprefix("::ffff:")
