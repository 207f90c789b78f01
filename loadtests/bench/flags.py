"""Generates command-line flags from dataclasses: one flag per field."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from penstock.cli.client_key import refuse_key
from penstock.common.number_text import number_text


def option(default: Any, about: str, positional: bool = False, also: Sequence[str] = ()) -> Any:
    """Return a dataclass field that becomes a flag or a positional argument.

    Args:
        about: help text.
        also: alternative names of the flag.
    """
    metadata = {"about": about, "positional": positional, "also": also}
    return field(default=default, metadata=metadata)


def check_least(
    options: object, least: int, names: Sequence[str], kind: type[ValueError] = ValueError
) -> None:
    """Raise an error of type `kind` if one of the options `names` is below `least`."""
    for name in names:
        if (value := getattr(options, name)) < least:
            flag = f"--{name.replace('_', '-')}"
            raise kind(f"{flag} must be at least {least}, not {number_text(value)}")


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def read_flags(
    program: str, about: str, records: Sequence[type], arguments: Sequence[str] | None
) -> list[Any]:
    """Parse `arguments` (None: sys.argv) into one instance of each dataclass in `records`.

    The docstring of each dataclass is the title of its group in --help. If the arguments are
    invalid, the process prints a one-line message and exits with 2. After --help it exits with 0.
    """
    parser = _Parser(prog=program, description=about, allow_abbrev=False)
    refuse_key(parser)
    for record in records:
        _add(parser.add_argument_group(str(record.__doc__).lower().rstrip(".")), record)
    given = vars(parser.parse_args(arguments))
    return [
        record(**{each.name: _value(each.default, given[each.name]) for each in fields(record)})
        for record in records
    ]


def _value(default: Any, given: Any) -> Any:
    """Return the value of a field: `given`, or `default` if a flag that may repeat is missing.

    The list of values of a flag that may repeat is converted to a tuple.
    """
    if not isinstance(default, tuple):
        return given
    return default if given is None else tuple(given)


def _add(group: Any, record: type) -> None:
    hints = get_type_hints(record)
    for each in fields(record):
        shown = f" ({each.default})" if each.default or type(each.default) in (int, float) else ""
        about = each.metadata["about"] + shown
        if each.metadata["positional"]:
            group.add_argument(each.name, nargs="?", default=each.default, help=about)
        else:
            flag = f"--{each.name.replace('_', '-')}"
            argument_options = _argument_options(hints[each.name])
            names = (flag, *each.metadata["also"])
            # The action "extend" appends to a default, so flags that may repeat have no default.
            default = None if isinstance(each.default, tuple) else each.default
            group.add_argument(
                *names, dest=each.name, default=default, help=about, **argument_options
            )


def _argument_options(kind: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a field of type `kind`."""
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "metavar": "TEXT", "action": "extend"}
    first = next((member for member in get_args(kind) if member is not type(None)), kind)
    if get_origin(kind) is Literal or get_origin(first) is Literal:
        return {"choices": get_args(kind if get_origin(kind) is Literal else first)}
    return {"type": first, "metavar": {int: "N", float: "X", str: "TEXT", Path: "FILE"}[first]}
