"""Structured outputs: the constraint that the answers of a request must satisfy, as text.

`penstock.common.grammar` converts the text to a grammar. The names of the kinds of constraints are
those of vLLM's `StructuredOutputsParams`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.common.invalid_parameter import InvalidParameterError

NAME = "structured_outputs"
"""Name of the parameter in errors, as in vLLM's API."""

MAX_BYTES = 128 << 10
"""Maximum size of a constraint's text, in UTF-8."""

AFTER_REASONING = "after_reasoning"
"""Kind of the constraints that `after_reasoning` returns."""

MAX_ESCAPED = 6
"""Maximum length of a character in JSON text."""

UNPAIRED = "the text contains an unpaired surrogate, which is not a character: remove it"

KINDS: Mapping[str, str] = {
    "json": "a JSON Schema",
    "json_object": "an empty text",
    "regex": "a regular expression, which the whole answer matches",
    "choice": "a JSON list of strings, of which the answer is one",
    "grammar": "a context-free grammar, in the syntax of Lark or of llama.cpp (GBNF)",
    "structural_tag": "a JSON object with structures and triggers",
    "tool_calls": "a JSON object with a grammar for tool calls and the schemas of arguments",
    AFTER_REASONING: "a JSON object with a grammar for reasoning and another constraint",
}
"""For each kind of constraint, a description of its text."""


def invalid(problem: str) -> InvalidParameterError:
    """Return the error for an invalid constraint. `problem` becomes a part of the message."""
    return InvalidParameterError(f"{NAME}: {problem}", NAME)


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the text of an answer.

    Attributes:
        kind: a key of `KINDS`.
        text: the schema, expression, list or grammar. It is "" for the kind `json_object`.
    """

    kind: str
    text: str = ""

    def validate(self) -> None:
        """Check the kind and the size of the constraint.

        `penstock.common.grammar.grammar_text` checks the text itself.

        Raises:
            InvalidParameterError: the kind is unknown, or the text is empty or too long.
        """
        if self.kind not in KINDS:
            raise invalid(f"unknown kind {self.kind[:40]!r}: expected one of {', '.join(KINDS)}")
        if bool(self.text) != (self.kind != "json_object"):
            raise invalid(f"{self.kind} is {self.text[:40]!r}: expected {KINDS[self.kind]}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise invalid(UNPAIRED) from error
        # The size of the constraint in the JSON object is checked when the object is read.
        most = MAX_BYTES * (1 + MAX_ESCAPED) if self.kind == AFTER_REASONING else MAX_BYTES
        if size > most:
            raise invalid(f"the text has {size} bytes; at most {MAX_BYTES} are allowed")


def json_schema(schema: Mapping[str, Any] | bool | str) -> StructuredOutputs:
    """Return a constraint that requires answers to match a JSON Schema.

    The properties of an object are generated in the order in which the schema lists them.

    Args:
        schema: the schema, as a value or as JSON text.

    Raises:
        InvalidParameterError: the schema is nested too deeply.
    """
    if isinstance(schema, str):
        return StructuredOutputs("json", schema)
    try:
        return StructuredOutputs("json", json.dumps(schema, ensure_ascii=False))
    except RecursionError as error:
        raise invalid("the schema is nested too deeply: send a flatter schema") from error


def choice(options: Sequence[str]) -> StructuredOutputs:
    """Return the constraint that an answer is one of several strings."""
    return StructuredOutputs("choice", json.dumps(list(options), ensure_ascii=False))


def after_reasoning(grammar: str, form: StructuredOutputs) -> StructuredOutputs:
    """Return the constraint that an answer is free reasoning and then a text of a given form.

    Args:
        grammar: the grammar of the whole answer, in llguidance's variant of Lark's syntax. `@form`
            stands for the text that satisfies `form`.
        form: the constraint on this text.
    """
    content = {"grammar": grammar, "kind": form.kind, "text": form.text}
    return StructuredOutputs(AFTER_REASONING, json.dumps(content, ensure_ascii=False))


def form_after_reasoning(wanted: StructuredOutputs) -> StructuredOutputs:
    """Return the constraint on the text after the reasoning, or `wanted` if it has no reasoning."""
    if wanted.kind != AFTER_REASONING:
        return wanted
    content = json.loads(wanted.text)
    return StructuredOutputs(content["kind"], content["text"])
