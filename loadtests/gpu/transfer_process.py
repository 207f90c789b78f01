"""Child processes of the transfer tests, and the relay of their rendezvous stores.

The processes exchange values of their rendezvous stores. A process writes its values to stdout as
JSON lines, and the parent forwards each line to the peer's stdin. A line without "key" is a report
to the parent.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from penstock.workers.kv_transfer.transport import SOURCE, MirrorStore, Operation, RankPair
from penstock.workers.rank.process_tuning import NCCL_VARIABLES

DONE_KEY = "the destination has received everything"
RELEASE_SECONDS = 8.0
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}

_output_lock = threading.Lock()


def write_line(message: Mapping[str, Any]) -> None:
    """Send a message to the parent process. May be called from any thread."""
    with _output_lock:
        print(json.dumps(message), flush=True)


def connected_stores(pairs: Sequence[int], seconds: float) -> dict[int, MirrorStore]:
    """Return the stores of this process by pair number. A thread fills them from stdin.

    A wait for a value takes at most `seconds`.
    """

    def publish_of(pair: int) -> Callable[[str, bytes], None]:
        return lambda key, value: write_line({"pair": pair, "key": key, "value": value.hex()})

    stores = {pair: MirrorStore(publish_of(pair), seconds) for pair in pairs}
    threading.Thread(target=_listen, args=(sys.stdin, stores), daemon=True).start()
    return stores


def _listen(lines: IO[str], stores: Mapping[int, MirrorStore]) -> None:
    for line in lines:
        message = json.loads(line)
        stores[message["pair"]].receive(message["key"], bytes.fromhex(message["value"]))


def finish(operation: Operation) -> None:
    """Wait until an operation ends. The operation fails at the timeout of its rank pair."""
    while not operation.ready():
        time.sleep(1e-4)
    operation.check()


def release(pair: RankPair, rank: int) -> None:
    """Close a pair once the destination has received everything.

    The data of a completed send may still be in a buffer of NCCL. It is lost if the source exits.
    """
    if rank == SOURCE:
        pair.store.wait([DONE_KEY])
    else:
        pair.store.set(DONE_KEY, b"1")
    pair.close().result(RELEASE_SECONDS)


class Child:
    """A child process of a transfer test, with the NCCL settings of a worker.

    Args:
        module: the module to run.
        arguments: its command-line arguments.
        environment: additional environment variables.

    Attributes:
        figures: the last report that the process sent.
        reported: set when a report has arrived or the process has ended.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.figures: dict[str, Any] = {}
        self.reported = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**NCCL_VARIABLES, **os.environ, **LOOPBACK, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def relay(self, peers: Mapping[int, "Child"]) -> threading.Thread:
        """Start a thread that forwards store values to the peer of their pair."""
        thread = threading.Thread(target=self._relay, args=(peers,), daemon=True)
        thread.start()
        return thread

    def end(self, ends: float) -> int | str:
        """Wait until the process ends, or until time `ends`. Return the exit code or an error.

        `ends` is a time of `time.monotonic`, at which the process is killed.
        """
        began = time.monotonic()
        try:
            return self.process.wait(max(0.0, ends - began))
        except subprocess.TimeoutExpired:
            return f"a timeout after {time.monotonic() - began:.0f} s"
        finally:
            self.process.kill()

    def _relay(self, peers: Mapping[int, "Child"]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue  # the line is a log message of NCCL
            message = json.loads(line)
            if "key" in message:
                peers[message["pair"]].forward(line)
            else:
                self.figures = message
                self.reported.set()
        self.reported.set()  # no report follows, so a wait for one must end

    def forward(self, line: str) -> None:
        """Write a line to the process, unless it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except OSError:
            return
