"""The command line: `penstock serve`, `chat`, `status`, `explain`, `role`, `bench` and others.

Each package is imported only when a command needs it, so that `penstock --help` is fast.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from penstock import __version__

COMMANDS = {
    "serve": ("penstock.cli.serve", "serve a model (by default the small bundled model)"),
    "chat": ("penstock.cli.chat", "chat with a server in the terminal"),
    "status": ("penstock.cli.status", "show the state of a server's pools and workers"),
    "explain": ("penstock.cli.explain", "explain where a request ran and where its time went"),
    "role": ("penstock.cli.role", "change a worker's role while it runs"),
    "bench": (
        "penstock.loadtests.bench.command",
        "send a load to a server and measure latency and throughput",
    ),
    "simulate": ("penstock.loadtests.simulator.command", "simulate a cluster in virtual time"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, which is 2 for invalid arguments.

    The reader of standard output may close the pipe early, as in `penstock chat | head -1`. In this
    case, return the exit code of a process that was killed by SIGPIPE. If Ctrl-C interrupts the
    command, even while its module is imported, return the exit code for SIGINT.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h", "help"):
        print(usage())
        return 0
    if name in ("--version", "-V"):
        print(f"penstock {__version__}")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"penstock: unknown command {name!r}; expected one of {known}", file=sys.stderr)
        return 2
    try:
        code: int = import_module(COMMANDS[name][0]).main(rest)
    except BrokenPipeError:
        if not _has_lost_reader():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _has_lost_reader() -> bool:
    """Return whether the reader of standard output has closed the pipe.

    If the result is True, further output of this process is discarded.
    """
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def usage() -> str:
    """Return the text of `penstock --help`."""
    commands = [f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: penstock COMMAND ...",
            "",
            *commands,
            "",
            "penstock COMMAND --help lists a command's options; --version prints the version.",
        ]
    )
