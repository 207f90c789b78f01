"""Grammar rules for the arguments of tool calls, in the notation of a family of models.

If a notation cannot express all values that a schema allows, the grammar allows a subset of them.
If the schema of an object lists properties, the grammar allows no other properties.
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
    # Allow one space after a comma or a colon, because most models write one.
    # If a grammar allowed any white space, a model could generate spaces forever.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,  # refuse schemas with keywords that are not supported
}

MAX_RULE_CHARS = 1 << 20  # limit of the total length of the rules of one function, in characters

ANY_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": True},
}
"""Schema for the arguments of a function that is not strict. It allows any JSON object."""


class ArgumentRules:
    """Collects the grammar rules for the arguments of one function.

    Args:
        notation: the notation of the model's tool calls.
        index: number of the function, which is part of the names of all its rules.
        schema: schema of the arguments, or None for any arguments.
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
        """Add a rule or a terminal, and return its name."""
        name = self.new_name()
        name = name.upper() if is_terminal else name
        self.define(name, expansion)
        return name

    def define(self, name: str, expansion: str) -> None:
        """Add a rule with a given name.

        Raises:
            UnsupportedSchemaError: the rules are too long. This may happen because each JSON value
                contains a copy of all schemas to which it may refer.
        """
        self._num_chars += len(expansion)
        if self._num_chars > MAX_RULE_CHARS:
            raise UnsupportedSchemaError(
                "/",
                "the grammar made from the schema of the arguments has more than "
                f"{MAX_RULE_CHARS} characters: send a smaller schema",
            )
        self.lines.append(f"{name}: {expansion}")

    def new_name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}_{self._num_names}"

    def json_value(self, schema: Any) -> str:
        """Add the rule of a value that is written as JSON, and return its name.

        Args:
            schema: schema of the value, which is a part of the schema of the arguments.
        """
        own = part(self.schema, schema)
        own = {} if own is True else own
        return self.rule(f"%json {json.dumps({**own, 'x-guidance': dict(SCHEMA_OPTIONS)})}")

    def string(self, terminal: str) -> str:
        """Return the Lark expression for a string that is followed by the text `notation.end`.

        Args:
            terminal: Lark expression for the string.
        """
        notation = self.notation
        if notation.end_token:
            return f"{self.rule(terminal, is_terminal=True)} {notation.end_token}"
        return self.rule(f"{terminal} {quoted(notation.end)}", is_terminal=True)

    def members(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the Lark expression for the members of an object, in a fixed order.

        Args:
            members: for each member, its Lark expression and whether the member is required.
            separator: Lark expression between two members.
        """
        # Both rules match the members that follow in the list. `rest` is used after another member
        # and `first` if no member precedes.
        rest, first = "", ""
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
    """Yield the name and the schema of each listed property, and whether the property is required.

    Raises:
        UnsupportedSchemaError: a required property is not listed, or a property allows no value.
    """
    listed = properties_of(schema)
    required = schema.get("required", ())
    for name in required:
        if name not in listed:
            raise UnsupportedSchemaError(
                f"{path}/required",
                f"the required property {name[:80]!r} is not in 'properties': add it there",
            )
    for name, value in listed.items():
        if value is False:
            raise UnsupportedSchemaError(
                f"{path}/properties/{escaped(name)}",
                "the schema is false, so no value is valid: leave out the property",
            )
        yield name, value, name in required


def checked_root(schema: Any) -> tuple[Mapping[str, Any], str]:
    """Return the schema of the arguments, and its path.

    If the schema is a `$ref`, the target of the reference is returned.

    Raises:
        UnsupportedSchemaError: the schema does not describe an object, or has a keyword that is
            supported only for JSON.
    """
    path = ""
    found = target(schema, schema)
    if not isinstance(found, dict):
        name = schema.get("$ref") if isinstance(schema, dict) else schema
        raise UnsupportedSchemaError(
            "/$ref", f"the reference {name!r:.80} does not point to an object in this schema"
        )
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
                f"{key[:80]} is not supported at the top level of a tool's parameters schema: "
                "remove it",
            )
    if "type" in known and (kind := schema.get("type", "object")) not in ("object", ["object"]):
        raise UnsupportedSchemaError(
            f"{path}/type",
            f"type is {kind!r:.80}, but a tool's arguments are an object: set type to 'object'",
        )


def check_key(key: str, allowed: re.Pattern[str], path: str) -> None:
    """Raise `UnsupportedSchemaError` if the notation cannot write the name of a property."""
    if not allowed.fullmatch(key):
        raise UnsupportedSchemaError(
            f"{path}/properties/{escaped(key)}",
            f"this model's tool call format cannot express the name {key[:80]!r}: rename the "
            "property",
        )


def _choice(expansions: Sequence[str]) -> str:
    """Return the Lark expression that matches any of `expansions`. One expansion may be empty."""
    texts = [each.strip() for each in expansions if each.strip()]
    found = f"( {' | '.join(texts)} )"
    return found if len(texts) == len(expansions) else f"{found}?"
