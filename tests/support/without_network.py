"""Runs `penstock serve` where only loopback exists, and prints an answer of the bundled model.

Start it with `NAMESPACE` in front of `python -m tests.support.without_network`.
"""

import fcntl
import socket
import struct
import sys
import tempfile
from pathlib import Path

import httpx

from penstock.loadtests.micro.server import free_ports
from tests.support.serving import TIMEOUT_SECONDS, serving

NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
"""Command that runs a program in a network namespace without interfaces except loopback."""

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # numbers of Linux's ioctls, and a flag
REQUEST = "16sh22x"  # struct ifreq


def start_loopback() -> None:
    """Switch on the loopback interface of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        given = struct.pack(REQUEST, b"lo", 0)
        _, flags = struct.unpack(REQUEST, fcntl.ioctl(any_socket, GET_FLAGS, given))
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack(REQUEST, b"lo", flags | UP))


def main() -> None:
    """Serve the bundled model, and print the answer of a chat."""
    start_loopback()
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        arguments = ["demo", "--kv-cache-mib", "64"]
        ports = free_ports(2)
        with serving(arguments, ports, Path(name)) as running:
            running.wait_for_output("is served after")
            body = {"messages": [{"role": "user", "content": "What is 2 plus 2?"}]}
            url = f"http://127.0.0.1:{running.http}/v1/chat/completions"
            answer = httpx.post(url, json=body, timeout=TIMEOUT_SECONDS)
            print(answer.json()["choices"][0]["message"]["content"])
            running.interrupt()
            sys.exit(running.wait())


if __name__ == "__main__":
    main()
