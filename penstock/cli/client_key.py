"""Adds the flags for API keys to commands that call a server."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.common.api_key import VARIABLE

ABOUT = f"file with the API key; by default the variable {VARIABLE}, if it is set"


def add_key_file(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--api-key-file`.

    Pass its value to `penstock.common.api_key.client_key` to read the key.
    """
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=ABOUT)


def refuse_key(parser: argparse.ArgumentParser) -> None:
    """Add a hidden flag `--api-key KEY` that always fails with an error.

    The error message does not contain the key.
    """
    hidden = argparse.SUPPRESS
    parser.add_argument("--api-key", nargs="?", action=_Refusal, default=hidden, help=hidden)


class _Refusal(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(
            "--api-key is not accepted, because every user of this machine can list command lines: "
            f"use --api-key-file FILE or the variable {VARIABLE}"
        )
