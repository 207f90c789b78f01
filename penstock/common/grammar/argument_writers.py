"""Writes the grammar rules of arguments, with one function for each kind of `ArgumentNotation`."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.common.argument_notation import ArgumentNotation, Kind
from penstock.common.grammar.argument_rules import (
    ANY_ARGUMENTS,
    SCHEMA_OPTIONS,
    ArgumentRules,
    check_key,
    checked_root,
    object_members,
)
from penstock.common.grammar.bracketed_arguments import write_bracketed
from penstock.common.grammar.raw_strings import ANNOTATIONS, RawStrings, quoted
from penstock.common.grammar.unsupported import escaped
from penstock.common.schema_types import TEXT_OR_NULL, parameter_types

TAGGED_KEY = re.compile(r"(?! )[^<>\n]{1,256}(?<! )")
PYTHON_KEY = re.compile(r"[A-Za-z_][\w.-]{0,255}", re.ASCII)

PYTHON_STRING = r"/'[^'\\\x00-\x1F\x7F]*'/"
SAFE_TEXT = re.compile(r"[^'\\\x00-\x1f\x7f]*")
PYTHON_ANY = """\
{0}: /'([^'\\\\\\n]|\\\\.)*'/ | /"([^"\\\\\\n]|\\\\.)*"/ | /[A-Za-z0-9_.+-]+/ | {0}_list | {0}_dict
{0}_list: "[" ( {0} ( /, ?/ {0} )* )? "]"
{0}_dict: "{{" ( {0} /: ?/ {0} ( /, ?/ {0} /: ?/ {0} )* )? "}}\""""
"""Rules for any value in Python's syntax. `{0}` stands for the name of the first rule."""


def argument_rules(notation: ArgumentNotation, index: int, schema: Any) -> list[str]:
    """Return the grammar rules for the arguments of a function.

    The start rule is `arguments_INDEX`. It uses the other rules.

    Args:
        notation: the notation of the model's tool calls.
        index: number of the function.
        schema: schema of the arguments, or None for any arguments.

    Raises:
        UnsupportedSchemaError: the notation cannot express the schema.
    """
    rules = ArgumentRules(notation, index, schema)
    _WRITERS[notation.kind](rules)
    return rules.lines


def _write_json(rules: ArgumentRules) -> None:
    schema = rules.schema
    strict = {} if schema is None else {**schema, "x-guidance": dict(SCHEMA_OPTIONS)}
    rules.define(rules.start, f"%json {json.dumps(strict or ANY_ARGUMENTS)}")


def _write_tagged(rules: ArgumentRules) -> None:
    notation = rules.notation

    def parameter(key: str, value: str) -> str:
        return f"{notation.before_key} {key} {notation.before_value} {value}"

    any_key = "/[^<>\\n ]([^<>\\n]{0,254}[^<>\\n ])?/"
    if rules.schema is None:
        text = rules.string(f"( {RawStrings({}, notation.markers).any} )")
        rules.define(rules.start, f"( {parameter(any_key, text)} )*")
        return
    root, path = checked_root(rules.schema)
    members = list(object_members(root, path))
    if not members:
        below = root.get("additionalProperties", True)
        any_member = parameter(any_key, _json_text(rules, below)) if below is not False else ""
        rules.define(rules.start, f"( {any_member} )*" if any_member else '""')
        return
    written = []
    for key, schema, is_required in members:
        check_key(key, TAGGED_KEY, path)
        value = _tagged_value(rules, key, schema, f"{path}/properties/{escaped(key)}")
        member = parameter(quoted(key), value)
        written.append(member if is_required else f"( {member} )?")
    rules.define(rules.start, " ".join(written))


def _tagged_value(rules: ArgumentRules, key: str, schema: Any, path: str) -> str:
    """Return the Lark expression for a parameter's value, followed by the end tag.

    A parameter that may only be a string or null is written as plain text. Other parameters are
    written as JSON. The parser of tool calls uses the same rule to distinguish text from JSON.
    """
    types = parameter_types(rules.schema, key)
    if "string" not in types or not types <= TEXT_OR_NULL:
        return _json_text(rules, schema)
    text = RawStrings(rules.schema, rules.notation.markers).terminal(schema, path)
    if "null" in types:
        text = f'( {text} & ~"null" | "null" )' if text else '"null"'
    return rules.string(text)


def _json_text(rules: ArgumentRules, schema: Any) -> str:
    """Return the Lark expression for a JSON value, followed by the end tag."""
    end = rules.notation.end_token or quoted(rules.notation.end)
    return f"{rules.json_value(schema)} {end}"


def _write_keywords(rules: ArgumentRules) -> None:
    separator = "/, ?/"
    if rules.schema is None:
        value = rules.new_name()
        rules.lines += PYTHON_ANY.format(value).splitlines()
        member = rules.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {value}')
        rules.define(rules.start, f"( {member} ( {separator} {member} )* )?")
        return
    root, path = checked_root(rules.schema)
    members = []
    for key, schema, is_required in object_members(root, path):
        check_key(key, PYTHON_KEY, path)
        texts = [rules.json_value(schema), *python_texts(schema)]
        members.append((f"{quoted(key + '=')} ( {' | '.join(texts)} )", is_required))
    below = root.get("additionalProperties", True)
    if members or below is False:
        rules.define(rules.start, rules.members(members, separator) if members else '""')
        return
    member = rules.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {rules.json_value(below)}')
    rules.define(rules.start, f"( {member} ( {separator} {member} )* )?")


def python_texts(schema: Any) -> list[str]:
    """Return Lark expressions for Python literals of the values that `schema` allows.

    Only values whose Python literal differs from their JSON text are included.
    """
    if not isinstance(schema, dict):
        return []
    keys = schema.keys() - ANNOTATIONS
    if keys == {"anyOf"}:
        return [text for each in schema["anyOf"] for text in python_texts(each)]
    if keys == {"type"}:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        known = {"string": PYTHON_STRING, "boolean": '"True" | "False"', "null": '"None"'}
        return [known[each] for each in types if each in known]
    if keys in ({"enum"}, {"const"}):
        values = schema.get("enum", [schema.get("const")])
        return [quoted(repr(each)) for each in values if _differs(each)]
    return []


def _differs(value: Any) -> bool:
    """Return whether the Python literal of a value differs from its JSON text.

    The result is False for strings whose Python literal would need escape sequences.
    """
    if isinstance(value, str):
        return SAFE_TEXT.fullmatch(value) is not None
    return value is None or isinstance(value, bool)


_WRITERS: Mapping[Kind, Callable[[ArgumentRules], None]] = {
    "json": _write_json,
    "tagged": _write_tagged,
    "bracketed": write_bracketed,
    "keywords": _write_keywords,
}
