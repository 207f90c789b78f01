"""Processes and connections of others are struck for real."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from penstock.loadtests.chaos import fault_injection

TALK = """
import socket, sys
talk = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
talk.sendall(b"hello")
print(repr(talk.recv(9)), flush=True)
sys.stdin.read()
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_getfd is Linux's")
def test_a_connection_is_cut_for_both_sides_and_no_other_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", TALK, port]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
        try:
            ends = [server.accept()[0] for _ in both]
            peers = {end.getpeername()[1]: end for end in ends}
            for end in ends:
                assert end.recv(5) == b"hello"
            (mine,) = [each.laddr.port for each in fault_injection._connections(both[0].pid)]
            assert fault_injection.cut_connections(both[0].pid, [both[1].pid]) == 0, (
                "these two do not talk"
            )
            assert fault_injection.cut_connections(both[0].pid, [os.getpid()]) == 1
            assert both[0].stdout.readline() == "b''\n"
            assert peers.pop(mine).recv(1) == b""
            (other,) = peers.values()
            other.sendall(b"well")
            assert both[1].stdout.readline() == "b'well'\n"
            assert fault_injection.send_signal(both[1].pid, signal.SIGKILL)
            assert both[1].wait() == -signal.SIGKILL
            assert not fault_injection.send_signal(both[1].pid, signal.SIGKILL)
        finally:
            for each in both:
                each.kill()
                each.wait()
