"""Fields of a request body that constrain the form of the answer."""

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import PrivateAttr
from pydantic_core import from_json

from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import StructuredOutputs, choice, json_schema
from penstock.common.value_text import value_text
from penstock.router.api.generation.strict_model import StrictModel, Texts
from penstock.router.api.openai.messages import OpenAiBody
from penstock.router.errors import invalid
from penstock.router.requests.json_text import dumps
from penstock.router.requests.structured_check import check_form

Schema: TypeAlias = dict[str, Any] | bool
Form: TypeAlias = StructuredOutputs | None
NamedForm: TypeAlias = tuple[str, StructuredOutputs]
"""A constraint, after the name of the field that sets it."""

FIELD = "structured_outputs"


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`, with vLLM's structural tags.

    The answer follows a schema even if `strict` is not set.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None

    def form(self) -> Form:
        """Return the form that this format demands; None for free text."""
        match self.type:
            case "json_object":
                return StructuredOutputs("json_object")
            case "json_schema":
                return self._schema()
            case "structural_tag":
                return StructuredOutputs("structural_tag", _dumped(self.model_extra or {}))
        return None

    def _schema(self) -> StructuredOutputs:
        name, given = "response_format", self.json_schema or {}
        if not isinstance(given.get("strict"), bool | None):
            strict = value_text(given["strict"])
            raise invalid(f"{name}.json_schema.strict must be true or false, not {strict}", name)
        schema = given.get("schema")
        if not isinstance(schema, dict | bool):
            raise invalid(
                f"{name}.json_schema.schema must be a JSON Schema (an object or a boolean), not "
                f"{value_text(schema)}",
                name,
            )
        return _schema(schema, name)


class StructuredFields(OpenAiBody):
    """The fields that constrain the form of an answer; a body may have at most one constraint.

    A helper process returns the result of `form` instead of these fields.
    """

    CONTENT: ClassVar[Mapping[str, Any]] = {
        **OpenAiBody.CONTENT,
        "response_format": None,
        "structured_outputs": None,
        "guided_json": None,
        "guided_regex": None,
        "guided_choice": None,
        "guided_grammar": None,
    }

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    # Older names in vLLM's API for the constraints of `structured_outputs`.
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    # The result of `form`, in a tuple; None if `form` was not called yet.
    _known_form: tuple[NamedForm | None] | None = PrivateAttr(None)

    def form(self) -> NamedForm | None:
        """Return the field that constrains the answer, and the constraint; None if no field does.

        Raises:
            ServingError: INVALID if several fields have a constraint, or a field is not complete.
        """
        if self._known_form is None:
            self._known_form = (self._read_form(),)
        return self._known_form[0]

    def check_form(self) -> None:
        """Refuse a constraint that is not complete or too large."""
        if (found := self.form()) is not None:
            name, wanted = found
            check_form(wanted, name)

    def encode_form(self) -> bytes:
        """Return the result of `form` as JSON, or empty bytes without a constraint."""
        if (found := self.form()) is None:
            return b""
        name, wanted = found
        return dumps([name, wanted.kind, wanted.text]).encode()

    def restore_form(self, data: bytes) -> None:
        """Make `form` return the result that `encode_form` has encoded."""
        if not data:
            self._known_form = (None,)
            return
        name, *wanted = from_json(data)
        self._known_form = ((name, StructuredOutputs(*wanted)),)

    def _read_form(self) -> NamedForm | None:
        given: dict[str, Form] = {}
        if self.response_format is not None:
            given["response_format"] = self.response_format.form()
        if self.structured_outputs is not None:
            given[FIELD] = _params(self.structured_outputs)
        if self.guided_json is not None:
            given["guided_json"] = _schema(self.guided_json, "guided_json")
        if self.guided_regex is not None:
            given["guided_regex"] = StructuredOutputs("regex", self.guided_regex)
        if self.guided_choice is not None:
            given["guided_choice"] = choice(self.guided_choice)
        if self.guided_grammar is not None:
            given["guided_grammar"] = StructuredOutputs("grammar", self.guided_grammar)
        found = [(name, wanted) for name, wanted in given.items() if wanted is not None]
        if len(found) > 1:
            (first, _), (second, _), *_ = found
            raise invalid(
                f"{first} and {second} both set the form of the answer: leave out one of them",
                second,
            )
        return found[0] if found else None


def _params(params: Mapping[str, Any]) -> StructuredOutputs:
    """Return the form that vLLM's `structured_outputs` demands."""
    found: list[StructuredOutputs] = []
    for name, value in params.items():
        if value is None or (value is False and name != "json"):
            continue
        if name not in _PARAMS:
            raise invalid(f"{FIELD}.{name[:80]} is not supported: leave it out", FIELD)
        types, make = _PARAMS[name]
        if not isinstance(value, types):
            expected = " or ".join(_TYPE_NAMES[each] for each in types)
            raise invalid(f"{FIELD}.{name} must be {expected}, not {value_text(value)}", FIELD)
        found.append(make(value))
    if len(found) != 1:
        raise invalid(
            f"{FIELD} must have exactly one of {', '.join(_PARAMS)}, but has {len(found)}", FIELD
        )
    return found[0]


def _schema(schema: Schema | str, field: str) -> StructuredOutputs:
    try:
        return json_schema(schema)
    except InvalidParameterError as error:
        problem = str(error).removeprefix(f"{error.param}: ")
        raise invalid(f"{field}: {problem}", field) from error


def _dumped(content: Mapping[str, Any]) -> str:
    try:
        return json.dumps(content, ensure_ascii=False)
    except RecursionError as error:
        raise invalid(
            "response_format is nested too deeply: send a flatter schema", "response_format"
        ) from error


_TYPE_NAMES = {bool: "a boolean", dict: "an object", list: "a list", str: "a string"}

_PARAMS: Mapping[str, tuple[tuple[type, ...], Callable[[Any], StructuredOutputs]]] = {
    "json": ((dict, bool, str), lambda value: _schema(value, FIELD)),
    "regex": ((str,), lambda value: StructuredOutputs("regex", value)),
    "choice": ((list,), choice),
    "grammar": ((str,), lambda value: StructuredOutputs("grammar", value)),
    "json_object": ((bool,), lambda value: StructuredOutputs("json_object")),
    "structural_tag": ((str,), lambda value: StructuredOutputs("structural_tag", value)),
}
"""For each field of vLLM's `structured_outputs`: its types, and a function that makes the form."""
