"""API keys, and the functions that read them from files and from the environment.

Keys are never read from command lines, because every user of a machine can list command lines.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["user", "operator", "metrics"]

VARIABLE = "PENSTOCK_API_KEY"
MIN_CHARACTERS = 16


class BadKey(ValueError):
    """An API key or the file with the key cannot be used. The message does not contain the key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key that a server accepts. Logs and metrics show its name and never the key.

    A key with the role `user` allows requests to the model. A key with the role `operator` also
    allows reading and changing the cluster's state. A key with the role `metrics` only allows
    reading this state.
    """

    name: str
    key: str = field(repr=False)
    role: Role = "user"


def checked_key(text: str, allow_weak: bool = False) -> str:
    """Return a key without the whitespace around it. Raise `BadKey` if the key is not valid."""
    key = text.strip()
    if not key:
        raise BadKey("is empty: give a key, such as the output of `openssl rand -hex 32`")
    if not all("!" <= character <= "~" for character in key):
        raise BadKey(
            "has spaces or characters that are not printable ASCII: create a key with "
            "`openssl rand -hex 32`"
        )
    if len(key) < MIN_CHARACTERS and not allow_weak:
        raise BadKey(
            f"has fewer than {MIN_CHARACTERS} characters, so it could be guessed: create a longer "
            "key with `openssl rand -hex 32`, or allow short keys with --allow-weak-keys"
        )
    return key


def read_key_lines(path: Path) -> list[tuple[int, str]]:
    """Return the number and the text of each non-empty line of a file with keys.

    Raises:
        BadKey: the file cannot be read, has no key, or can be read or written by other users.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except (OSError, ValueError) as error:
        raise BadKey(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadKey("can be read or written by other users: run `chmod o= FILE`")
    # Bytes that are not ASCII become characters that `checked_key` refuses.
    lines = content.decode("latin-1").split("\n")
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadKey("contains no key: write each key on its own line")
    return found


def client_key(path: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the API key that a client sends, or "" if the client has no key.

    Args:
        path: file with the key. If it is None, the key is read from the environment.
        environment: the environment variables.

    Raises:
        BadKey: the file or the variable has no valid key, or the file has several lines.
    """
    try:
        if path is None:
            text = environment.get(VARIABLE, "").strip()
            return checked_key(text, allow_weak=True) if text else ""
        lines = read_key_lines(path)
        if len(lines) > 1:
            raise BadKey("has several lines: give a file with one key")
        return checked_key(lines[0][1], allow_weak=True)
    except BadKey as error:
        source = VARIABLE if path is None else f"--api-key-file {path}: the file"
        raise BadKey(f"{source} {error}") from None
