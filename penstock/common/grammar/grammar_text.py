"""Converts the text of a constraint to an llguidance grammar, or refuses it with a reason.

A router uses this module in a helper process to check constraints. A worker uses it to compile
them. Limits bound the time to compile a grammar and the time to compute a mask. Constraints that
exceed the limits are refused.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from penstock.common.argument_notation import ArgumentNotation
from penstock.common.grammar.argument_rules import SCHEMA_OPTIONS
from penstock.common.grammar.argument_writers import argument_rules
from penstock.common.grammar.schema_paths import first_path
from penstock.common.grammar.unsupported import UnsupportedSchemaError
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import (
    AFTER_REASONING,
    UNPAIRED,
    StructuredOutputs,
    form_after_reasoning,
    invalid,
)
from penstock.common.value_text import value_text

MAX_CHOICES = 4096

NAMES: Mapping[str, str] = {"json": "JSON Schema", "tool_calls": "schema of strict tools"}
"""Names of kinds of constraints in error messages. Other kinds appear as in the request."""

MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Exceptions that may occur if the keywords of a schema have values of wrong types."""


def parser_limits() -> LLParserLimits:
    """Return limits with which a compilation takes at most about 0.3 s, and a mask about 20 ms."""
    return LLParserLimits(
        initial_lexer_fuel=250_000,
        max_lexer_states=50_000,
        max_grammar_size=250_000,
        verbose_errors=False,
    )


def grammar_text(wanted: StructuredOutputs) -> str:
    """Return the text of a constraint as a grammar for `LLMatcher`.

    Raises:
        InvalidParameterError: the text is not valid for the kind of constraint.
    """
    wanted.validate()
    try:
        return _CONVERTERS[wanted.kind](wanted.text)
    except UnicodeEncodeError as error:  # the JSON text has an escape sequence of a lone surrogate
        raise invalid(UNPAIRED) from error


def check_structured_outputs(wanted: StructuredOutputs) -> None:
    """Check that a constraint is valid and supported.

    Raises:
        InvalidParameterError: the constraint is invalid or not supported. The message names the
            keyword of the schema with its path, or the line of the grammar.
    """
    form = form_after_reasoning(wanted)
    if form is not wanted and form.kind == "grammar":
        check_structured_outputs(form)  # alone, it cannot refer to the grammar around it
    grammar = grammar_text(wanted)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if is_error:
        raise refusal(wanted, messages[0])


def refusal(wanted: StructuredOutputs, message: str) -> InvalidParameterError:
    """Return the error for a constraint that llguidance refuses with `message`."""
    wanted = form_after_reasoning(wanted)
    problem = " ".join(message.split())[:300]
    where = _quoted_path(wanted, problem)
    what = NAMES.get(wanted.kind, wanted.kind)
    return invalid(f"cannot compile this {what}{where}: {problem}")


def _quoted_path(wanted: StructuredOutputs, problem: str) -> str:
    """Return the location in the schema of the keyword that an error message quotes.

    For tools, the location begins with the function. It is "" if no schema has this keyword.
    """
    if wanted.kind == "json":
        return first_path(wanted.text, problem)
    if wanted.kind == "tool_calls":
        content = json.loads(wanted.text)
        for name, schema in zip(content["names"], content["arguments"], strict=True):
            if schema is not None and (path := first_path(json.dumps(schema), problem)):
                return f": function {name},{path}"
    return ""


def _json_schema(text: str) -> str:
    schema = _parsed(text, (dict, bool), "a JSON Schema (an object or a boolean)")
    if schema is False:
        raise invalid("the schema is false, so no answer is valid: send another schema")
    try:
        return LLMatcher.grammar_from_json_schema(
            "{}" if schema is True else text, overrides=SCHEMA_OPTIONS
        )
    except ValueError as error:
        raise invalid(f"the schema cannot be read: {error}") from error


def _choice(text: str) -> str:
    options = _parsed(text, (list,), "a JSON list of strings")
    if not 0 < len(options) <= MAX_CHOICES:
        raise invalid(f"choice must have 1 to {MAX_CHOICES} strings, not {len(options)}")
    for i, option in enumerate(options):
        if not (isinstance(option, str) and option):
            raise invalid(f"choice[{i}] must be a non-empty string, not {value_text(option)}")
    rules = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return LLMatcher.grammar_from_lark(f"start: {rules}")


def _grammar(text: str) -> str:
    try:
        lark = any_to_lark(text)
    except Exception as error:  # the library raises no narrower type
        raise invalid(f"the grammar is valid neither as Lark nor as GBNF: {error}") from error
    return LLMatcher.grammar_from_lark(lark)


def _structural_tag(text: str) -> str:
    content = _parsed(text, (dict,), "a JSON object")
    structures, triggers = content.get("structures"), content.get("triggers")
    if not (isinstance(structures, list) and structures and isinstance(triggers, list)):
        raise invalid(
            f"structural_tag.structures is {value_text(structures)} and structural_tag.triggers is "
            f"{value_text(triggers)}: both must be lists, and structures must not be empty"
        )
    tags = [
        _tag(f"structural_tag.structures[{i}]", each, triggers) for i, each in enumerate(structures)
    ]
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def _tool_calls(text: str) -> str:
    """Return the grammar of an answer that may contain tool calls.

    The result consists of the grammar that the router has written, and of rules for the arguments
    of each function.
    """
    content = _parsed(text, (dict,), "a JSON object")
    given = content["notation"]
    notation = ArgumentNotation(**{**given, "markers": tuple(given["markers"])})
    rules = [content["grammar"]]
    for index, schema in enumerate(content["arguments"]):
        try:
            rules += argument_rules(notation, index, schema)
        except UnsupportedSchemaError as error:
            name = content["names"][index]
            raise invalid(
                f"cannot compile this {NAMES['tool_calls']}: function {name}, at {error.path}: "
                f"{error.problem}"
            ) from error
        except UnicodeEncodeError:
            raise
        except MALFORMED as error:
            raise invalid(
                f"cannot compile this {NAMES['tool_calls']}: the schema of "
                f"{content['names'][index]} is not a valid JSON Schema, or is nested too deeply"
            ) from error
    return LLMatcher.grammar_from_lark("\n".join(rules))


def _after_reasoning(text: str) -> str:
    """Return the grammar of the whole answer, which refers to the grammar of the form."""
    content = json.loads(text)
    form = grammar_text(StructuredOutputs(content["kind"], content["text"]))
    others: list[Any] = []
    if form.lstrip().startswith("{"):  # llguidance's own format, which may have several grammars
        try:
            first, *others = json.loads(form)["grammars"]
            named = {**first, "name": "form"}
        except MALFORMED as error:
            raise invalid(f"the grammar cannot be read: {error}") from error
    else:
        named = {"name": "form", "lark_grammar": form}
    return json.dumps({"grammars": [{"lark_grammar": content["grammar"]}, named, *others]})


def _tag(path: str, structure: Any, triggers: list[Any]) -> StructTag:
    if not isinstance(structure, dict):
        raise invalid(f"{path} must be a JSON object, not {value_text(structure)}")
    begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
    if not (isinstance(begin, str) and begin and isinstance(end, str)):
        raise invalid(
            f"{path}.begin is {value_text(begin)} and {path}.end is {value_text(end)}: expected a "
            "non-empty string and a string"
        )
    if not isinstance(schema, dict):
        raise invalid(f"{path}.schema must be a JSON Schema (an object), not {value_text(schema)}")
    found = [each for each in triggers if isinstance(each, str) and each and begin.startswith(each)]
    if not found:
        raise invalid(
            f"{path}.begin is {begin!r:.80}: expected a text that starts with an entry of "
            "structural_tag.triggers"
        )
    with_options = {**schema, "x-guidance": dict(SCHEMA_OPTIONS)}
    return StructTag(trigger=found[0], begin=begin, grammar=with_options, end=end)


def _parsed(text: str, types: tuple[type, ...], expected: str) -> Any:
    """Return the value of a JSON text. Raise an error if its type is not one of `types`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the value must be {expected}, but cannot be parsed: {error}") from error
    if not isinstance(value, types):
        raise invalid(f"the value must be {expected}, not {text[:40]!r}")
    return value


_CONVERTERS: Mapping[str, Callable[[str], str]] = {
    "json": _json_schema,
    "json_object": lambda text: _json_schema('{"type": "object"}'),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
    "tool_calls": _tool_calls,
    AFTER_REASONING: _after_reasoning,
}
