"""The command line: `penstock serve`, `chat`, `status`, `role`, `bench`, `simulate`.

A room is imported only when a command needs it, so that `--help` is quick.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from penstock import __version__

COMMANDS = {
    "serve": ("penstock.cli.serve", "serve a model (without one, the small model that ships)"),
    "chat": ("penstock.cli.chat", "talk with a server in the terminal"),
    "status": ("penstock.cli.status", "show what a server's pools and workers do"),
    "role": ("penstock.cli.role", "give a worker another role while it runs"),
    "bench": (
        "penstock.loadtests.bench.command",
        "send a load to a server and measure how it is served",
    ),
    "simulate": ("penstock.loadtests.simulator.command", "play a cluster in virtual time"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 for what the caller should have given otherwise."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h", "help"):
        print(usage())
        return 0
    if name in ("--version", "-V"):
        print(f"penstock {__version__}")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"penstock: there is no command {name!r}; known are {known}", file=sys.stderr)
        return 2
    code: int = import_module(COMMANDS[name][0]).main(rest)
    return code


def usage() -> str:
    """What `penstock --help` prints."""
    commands = [f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: penstock COMMAND ...",
            "",
            *commands,
            "",
            "penstock COMMAND --help tells a command's options; penstock --version the version.",
        ]
    )
