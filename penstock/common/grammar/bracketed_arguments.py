"""Grammar rules for arguments that are like JSON, except for the keys and the strings.

For example, FunctionGemma writes `{name:<escape>Ada<escape>,born:1815}`. Numbers, `true`, `false`
and `null` are written as in JSON.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.grammar.argument_rules import ArgumentRules, checked_root, object_members
from penstock.common.grammar.raw_strings import (
    ANNOTATIONS,
    NUMBERS,
    RawStrings,
    check_keywords,
    quoted,
    resolved,
)
from penstock.common.grammar.unsupported import UnsupportedSchemaError, escaped
from penstock.common.schema_types import (
    named_types,
    types_of,
    types_of_value,
)

BARE_KEY = re.compile(r"[^\s{}\[\],:<>|\"]+")
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def write_bracketed(rules: ArgumentRules) -> None:
    """Add the rules for arguments that are written as an object in braces."""
    values = _Values(rules)
    if rules.schema is None:
        rules.define(rules.start, values.any_object())
        return
    root, path = checked_root(rules.schema)
    rules.define(rules.start, values.object(root, path))


class _Values:
    """Writes the grammar rules of values.

    Args:
        rules: collects the rules.
    """

    def __init__(self, rules: ArgumentRules) -> None:
        self._rules = rules
        self._root = rules.schema
        self._quote = rules.notation.end_token or quoted(rules.notation.end)
        self._strings = RawStrings(rules.schema, rules.notation.markers)
        self._referred: dict[str, str] = {}
        self._any = ""

    def value(self, schema: Any, path: str) -> str:
        """Return the Lark expression for a value that matches `schema`."""
        if schema is True or schema == {}:
            return self.any()
        found = self._others(schema, path)
        if text := self._strings.terminal(schema, path):
            found.insert(0, f"{self._quote} {self._rules.string(text)}")
        if not found:
            raise UnsupportedSchemaError(path, "the schema allows no value: correct the schema")
        return f"( {' | '.join(found)} )"

    def any(self) -> str:
        """Return the name of the rule that matches any value."""
        if not self._any:
            self._any = self._rules.new_name()
            text = f"{self._quote} {self._rules.string(f'( {self._strings.any} )')}"
            number = "/-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?/"
            items = f'"[" ( {self._any} ( "," {self._any} )* )? "]"'
            choices = (text, number, '"true"', '"false"', '"null"', items, self.any_object())
            self._rules.define(self._any, " | ".join(choices))
        return self._any

    def any_object(self) -> str:
        """Return the Lark expression for any object."""
        return self._open_object(self.any())

    def _open_object(self, value: str) -> str:
        member = f'{ANY_KEY} ":" {value}'
        return f'"{{" ( {member} ( "," {member} )* )? "}}"'

    def object(self, schema: Mapping[str, Any], path: str) -> str:
        """Return the Lark expression for an object that matches `schema`."""
        members = [
            (f"{self._key(name, path)} {self.value(below, _below(path, name))}", is_required)
            for name, below, is_required in object_members(schema, path)
        ]
        if members:
            return f'"{{" {self._rules.members(members, quoted(","))} "}}"'
        more = schema.get("additionalProperties", True)
        if more is False:
            return '"{" "}"'
        return self._open_object(self._rules.rule(self.value(more, f"{path}/additionalProperties")))

    def _key(self, name: str, path: str) -> str:
        if BARE_KEY.fullmatch(name):
            return quoted(f"{name}:")
        self._strings.check_text(name, _below(path, name))
        if not name:
            raise UnsupportedSchemaError(
                _below(path, name), "the name of the property is empty: give it a name"
            )
        return f'{self._quote} {quoted(name)} {self._quote} ":"'

    def _others(self, schema: Any, path: str) -> list[str]:
        """Return Lark expressions for the values that `schema` allows, without strings."""
        if schema is False:
            return []
        if schema is True:
            schema = {}
        check_keywords(schema, path)
        types = types_of(self._root, schema) - {"string"}
        if not types:
            return []
        for key in ("$ref", "anyOf", "oneOf", "allOf"):
            if key in schema:
                self._check_siblings(schema, key, path)
                return self._combined(schema, key, path)
        for key in ("enum", "const"):
            if key in schema:
                self._check_siblings(schema, key, path, "type")
                values = schema["enum"] if key == "enum" else [schema["const"]]
                allowed = named_types(schema.get("type"))
                return [
                    self._literal(each, f"{path}/{key}")
                    for each in values
                    if types_of_value(each) & allowed and not isinstance(each, str)
                ]
        return [self._typed(schema, each, path) for each in sorted(types)]

    def _check_siblings(self, schema: Mapping[str, Any], key: str, path: str, *others: str) -> None:
        """Raise `UnsupportedSchemaError` if `schema` has keywords besides `key` and `others`.

        Keywords that do not restrict values are allowed.
        """
        for other in schema:
            if other not in ANNOTATIONS and other not in (key, *others):
                raise UnsupportedSchemaError(
                    f"{path}/{escaped(other)}",
                    f"one schema cannot have both {other[:80]} and {key}: remove one of the two",
                )

    def _combined(self, schema: Mapping[str, Any], key: str, path: str) -> list[str]:
        if key == "$ref":
            reference = schema["$ref"]
            if reference not in self._referred:
                name = self._referred[reference] = self._rules.new_name()
                texts = self._others(resolved(self._root, reference, path), reference[1:])
                if not texts:
                    raise UnsupportedSchemaError(
                        f"{path}/$ref", f"the schema {reference[:80]!r} allows no value: correct it"
                    )
                self._rules.define(name, " | ".join(texts))
            return [self._referred[reference]]
        branches = schema[key]
        if key == "allOf" and len(branches) > 1:
            raise UnsupportedSchemaError(
                f"{path}/allOf", f"allOf has {len(branches)} schemas; only one is supported"
            )
        if key == "oneOf":
            self._check_disjoint(branches, path)
        found = [self._others(each, f"{path}/{key}/{i}") for i, each in enumerate(branches)]
        return [text for texts in found for text in texts]

    def _check_disjoint(self, branches: Sequence[Any], path: str) -> None:
        seen: set[str] = set()
        for branch in branches:
            types = types_of(self._root, branch)
            types |= {"integer"} if "number" in types else set()
            if types & seen:
                raise UnsupportedSchemaError(
                    f"{path}/oneOf",
                    f"several branches of oneOf allow values of the type {min(types & seen)}: use "
                    "anyOf instead",
                )
            seen |= types

    def _typed(self, schema: Mapping[str, Any], kind: str, path: str) -> str:
        match kind:
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "integer" | "number":
                bounds = {key: schema[key] for key in NUMBERS & schema.keys()}
                return self._rules.json_value({"type": kind, **bounds})
            case "array":
                return self._array(schema, path)
            case _:
                return self._rules.rule(self.object(schema, path))

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        item = self._rules.rule(self.value(schema.get("items", True), f"{path}/items"))
        following = item
        if most != 1:
            upper = "" if most is None else most - 1
            following += f' ( "," {item} ){{{max(least - 1, 0)},{upper}}}'
        return f'"[" ( {following} ){"" if least else "?"} "]"'

    def _literal(self, value: Any, path: str) -> str:
        """Return the Lark expression that matches only `value`."""
        match value:
            case bool() | None:
                return quoted({True: "true", False: "false", None: "null"}[value])
            case str():
                self._strings.check_text(value, path)
                return f"{self._quote} {quoted(value)} {self._quote}"
            case list():
                texts = [self._literal(each, path) for each in value]
                return f'"[" {" ".join(_joined(texts))} "]"'
            case dict():
                keys = [
                    f"{self._key(name, path)} {self._literal(each, path)}"
                    for name, each in value.items()
                ]
                return f'"{{" {" ".join(_joined(keys))} "}}"'
            case _:
                return quoted(str(value))


def _joined(texts: Sequence[str]) -> list[str]:
    """Return a list of Lark expressions with commas between them."""
    found = list(texts[:1])
    for text in texts[1:]:
        found += ['","', text]
    return found


def _below(path: str, name: str) -> str:
    return f"{path}/properties/{escaped(name)}"
