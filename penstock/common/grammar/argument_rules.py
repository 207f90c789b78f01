"""Rules of a grammar for the arguments of calls, in the notation of a family of models.

Where a notation cannot write all values of a schema, the grammar allows a part of them. Properties
that an object's schema does not list are written only if it lists none.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.common.argument_notation import ArgumentNotation
from penstock.common.grammar.raw_strings import ANNOTATIONS, OBJECTS, quoted
from penstock.common.grammar.schema_refs import part
from penstock.common.grammar.unsupported import UnsupportedSchemaError, escaped
from penstock.common.schema_types import properties_of, target

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SCHEMA_OPTIONS: "JsonCompileOptions" = {
    # Allow one space after a comma or colon, as most models write. If all white space were
    # allowed, a model could write spaces without end.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,  # refuse keywords that are not supported
}

MAX_RULE_CHARS = 1 << 20  # of one function

ANY_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": True},
}
"""The schema of the arguments of a function that is not strict."""


class ArgumentRules:
    """Collects the rules for the arguments of one function.

    Args:
        notation: the notation.
        index: number of the function, which is part of all names.
        schema: schema of the arguments; None: any arguments.
    """

    def __init__(self, notation: ArgumentNotation, index: int, schema: Any) -> None:
        self.notation = notation
        self.schema = schema
        self.lines: list[str] = []
        self.start = f"arguments_{index}"
        self._prefix = f"a{index}"
        self._num_names = 0
        self._num_chars = 0

    def rule(self, expansion: str, is_terminal: bool = False) -> str:
        """Add a rule or a terminal; return its name."""
        name = self.new_name()
        name = name.upper() if is_terminal else name
        self.define(name, expansion)
        return name

    def define(self, name: str, expansion: str) -> None:
        """Add a rule of a given name.

        Raises:
            UnsupportedSchemaError: the rules are too long, as each value in JSON has a copy of the
                schemas that it can refer to.
        """
        self._num_chars += len(expansion)
        if self._num_chars > MAX_RULE_CHARS:
            raise UnsupportedSchemaError("/", "the grammar of the arguments is too long")
        self.lines.append(f"{name}: {expansion}")

    def new_name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}_{self._num_names}"

    def json_value(self, schema: Any) -> str:
        """Return the rule of a value in JSON.

        Args:
            schema: a schema below that of the arguments.
        """
        own = part(self.schema, schema)
        own = {} if own is True else own
        return self.rule(f"%json {json.dumps({**own, 'x-guidance': dict(SCHEMA_OPTIONS)})}")

    def string(self, terminal: str) -> str:
        """Return the expansion for a string with the marker at its end."""
        notation = self.notation
        if notation.end_token:
            return f"{self.rule(terminal, is_terminal=True)} {notation.end_token}"
        return self.rule(f"{terminal} {quoted(notation.end)}", is_terminal=True)

    def members(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the expansion for members in a fixed order.

        Args:
            members: expansions, and whether each is required.
            separator: expansion between two members.
        """
        rest, first = "", ""  # after another member, and at the start
        for expansion, is_required in reversed(members):
            member = self.rule(expansion)
            starts = [f"{member} {rest}"]
            if not is_required:
                starts.append(first)
            first = self.rule(_choice(starts))
            following = f"{separator} {member}"
            rest = self.rule(f"{following if is_required else f'( {following} )?'} {rest}")
        return first


def object_members(schema: Any, path: str) -> Iterable[tuple[str, Any, bool]]:
    """Yield the name and schema of each listed property, and whether it is required.

    Raises:
        UnsupportedSchemaError: a required property is not listed.
    """
    listed = properties_of(schema)
    required = schema.get("required", ())
    for name in required:
        if name not in listed:
            raise UnsupportedSchemaError(f"{path}/required", f"no property {name} is listed")
    for name, value in listed.items():
        if value is False:
            raise UnsupportedSchemaError(f"{path}/properties/{escaped(name)}", "no value is valid")
        yield name, value, name in required


def checked_root(schema: Any) -> tuple[Mapping[str, Any], str]:
    """Return the schema of all arguments behind its references, and its path.

    Raises:
        UnsupportedSchemaError: it is not the schema of an object, or has keywords that only an
            object in JSON can have.
    """
    path = ""
    found = target(schema, schema)
    if not isinstance(found, dict):
        raise UnsupportedSchemaError("/$ref", "the reference does not exist in the schema")
    if found is not schema:
        path = str(schema["$ref"])[1:]
        _check_root(schema, "", {"$ref"})
    _check_root(found, path, {"type", *OBJECTS})
    return found, path


def _check_root(schema: Mapping[str, Any], path: str, known: set[str]) -> None:
    for key in schema:
        if key not in known | ANNOTATIONS:
            raise UnsupportedSchemaError(
                f"{path}/{escaped(key)}",
                f"{key} is not supported for all arguments of a call in this format",
            )
    if "type" in known and schema.get("type", "object") not in ("object", ["object"]):
        raise UnsupportedSchemaError(f"{path}/type", "the arguments of a call are an object")


def check_key(key: str, allowed: re.Pattern[str], path: str) -> None:
    """Refuse a name of a property that a notation cannot write."""
    if not allowed.fullmatch(key):
        raise UnsupportedSchemaError(
            f"{path}/properties/{escaped(key)}", "this format of calls cannot write the name"
        )


def _choice(expansions: Sequence[str]) -> str:
    """Return an expansion with alternatives, of which one may be empty."""
    texts = [each.strip() for each in expansions if each.strip()]
    found = f"( {' | '.join(texts)} )"
    return found if len(texts) == len(expansions) else f"{found}?"
