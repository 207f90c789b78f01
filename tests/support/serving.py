"""Run `penstock serve` as a process with its own process group and temporary folder."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from penstock.loadtests.micro.server import free_ports

NO_VARIABLES: Mapping[str, str] = {}

TIMEOUT_SECONDS = 480.0  # seconds after which a wait fails; long, because machines may be busy


def wait_for(condition: Callable[[], bool], what: str, timeout: float = TIMEOUT_SECONDS) -> None:
    """Wait until `condition()` is true; after `timeout` seconds, fail with the message `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.05)


# This prefix resets SIGINT, because shells start background jobs with SIGINT ignored.
# A `preexec_fn` would need a fork, which can abort in a process with gRPC's threads.
INTERRUPTIBLE = ("env", "--default-signal=INT")
PENSTOCK = (sys.executable, "-m", "penstock.cli")


class Serving:
    """A running `penstock serve`.

    Args:
        arguments: arguments of the command, without ports.
        ports: HTTP and gRPC port.
        folder: folder for output and temporary files; its path must be short, because Unix sockets
            are created below it.
        environment: variables to add to those of this process.
        program: the command `penstock`.
    """

    def __init__(
        self,
        arguments: list[str],
        ports: Sequence[int],
        folder: Path,
        environment: Mapping[str, str],
        program: Sequence[str] = PENSTOCK,
    ) -> None:
        self.http, self.grpc = ports
        self.admin = _admin_port(ports)
        self.output = folder / "output"
        self.temp = folder / "t"
        self.temp.mkdir(exist_ok=True)
        command = [*INTERRUPTIBLE, *program, "serve", *arguments]
        command += ["--http-port", str(self.http), "--grpc-port", str(self.grpc)]
        command += ["--admin-port", str(self.admin)]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temp), **environment},
            )

    @property
    def output_text(self) -> str:
        return self.output.read_text()

    def wait_for_output(self, words: str, times: int = 1) -> None:
        def condition() -> bool:
            assert self.process.poll() is None, f"it ended:\n{self.output_text}"
            return self.output_text.count(words) >= times

        wait_for(condition, f"{words!r} ({times} times); it said:\n{self.output_text}")

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of this run, including orphans."""
        found = (each for each in psutil.process_iter() if self._owns(each))
        return [each for each in found if is_alive(each)]

    def _owns(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get("TMPDIR") == str(self.temp)
        return False

    def find(self, title: str) -> psutil.Process:
        """Wait for the process with this title and return it."""
        found: list[psutil.Process] = []

        def condition() -> bool:
            found[:] = [each for each in self.processes() if title in title_of(each)]
            return len(found) == 1

        wait_for(condition, f"one process named {title!r}")
        return found[0]

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send a signal to the whole process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """Wait until the command ends and return its exit code."""
        return self.process.wait(TIMEOUT_SECONDS)

    def left_behind(self) -> dict[str, list[object]]:
        """Return the processes, open ports and files that remain after the command has ended."""
        return {
            "processes": [title for each in self.processes() if (title := title_of(each))],
            "ports": [port for port in (self.http, self.grpc, self.admin) if is_open(port)],
            "files": [path.name for path in self.temp.iterdir() if not _is_probe(path)],
        }

    def end(self) -> None:
        """Kill all processes of this run."""
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait(TIMEOUT_SECONDS)


@contextmanager
def serving(
    arguments: list[str],
    ports: Sequence[int],
    folder: Path,
    environment: Mapping[str, str] = NO_VARIABLES,
    program: Sequence[str] = PENSTOCK,
) -> Iterator[Serving]:
    """Run `penstock serve`; kill it at the end of the block if it still runs."""
    running = Serving(arguments, ports, folder, environment, program)
    try:
        yield running
    finally:
        running.end()


def _admin_port(ports: Sequence[int]) -> int:
    """Return a port for operators that is free, also for a second router, and not among `ports`."""
    while True:
        (port,) = free_ports(1, run=2)
        if all(abs(port - other) > 1 for other in ports):
            return port


def is_open(port: int) -> bool:
    """Return True if a process listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A killed process is a zombie until its parent has noticed."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def title_of(process: psutil.Process) -> str:
    """Return the command line of a process, or "" if the process has ended."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


PROBE_NAME = re.compile("[a-z0-9_]{8}")
"""Names of the files with which Python tests a temporary folder, see `tempfile`."""


def _is_probe(path: Path) -> bool:
    """Return whether Python wrote this file only to find out if it can write to the folder.

    Python deletes such a file immediately, unless the process is killed at that moment.
    """
    with suppress(FileNotFoundError, IsADirectoryError):
        return PROBE_NAME.fullmatch(path.name) is not None and path.read_bytes() in (b"", b"blat")
    return False
