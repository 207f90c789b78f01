"""Faults are injected into real processes and connections."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from penstock.loadtests.chaos import fault_injection

CLIENT = """
import socket, sys
talk = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
talk.sendall(b"hello")
print(repr(talk.recv(9)), flush=True)
sys.stdin.read()
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_getfd exists only on Linux")
def test_only_the_chosen_connection_is_cut_at_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", CLIENT, port]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        clients = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
        try:
            ends = [server.accept()[0] for _ in clients]
            peers = {end.getpeername()[1]: end for end in ends}
            for end in ends:
                assert end.recv(5) == b"hello"
            (cut_port,) = [each.laddr.port for each in fault_injection._connections(clients[0].pid)]
            assert fault_injection.cut_connections(clients[0].pid, [clients[1].pid]) == 0, (
                "there is no connection between the two clients"
            )
            assert fault_injection.cut_connections(clients[0].pid, [os.getpid()]) == 1
            assert clients[0].stdout.readline() == "b''\n"
            assert peers.pop(cut_port).recv(1) == b""
            (other,) = peers.values()
            other.sendall(b"well")
            assert clients[1].stdout.readline() == "b'well'\n"
            assert fault_injection.send_signal(clients[1].pid, signal.SIGKILL)
            assert clients[1].wait() == -signal.SIGKILL
            assert not fault_injection.send_signal(clients[1].pid, signal.SIGKILL)
        finally:
            for each in clients:
                each.kill()
                each.wait()
