"""The field `text` of the Responses API: the form of the answer's text."""

from collections.abc import Mapping
from typing import Any

from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import StructuredOutputs, json_schema
from penstock.common.value_text import value_text
from penstock.router.api.generation.strict_model import StrictModel
from penstock.router.api.responses.permitted import TEXT_VALUES, check_extra
from penstock.router.errors import invalid

FIELD = "text"
PLAIN: Mapping[str, Any] = {"type": "text"}
MEMBERS: Mapping[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "description": (str, "a string"),
    "strict": (bool, "true or false"),
}


class TextConfig(StrictModel):
    """The field `text`. The answer follows a schema even if `strict` is not set."""

    format: dict[str, Any] | None = None

    def check(self) -> None:
        check_extra(self.model_extra or {}, TEXT_VALUES, FIELD)
        self.form()

    def form(self) -> StructuredOutputs | None:
        """Return the form that the format demands, or None for free text.

        Raises:
            ServingError: INVALID if the format is not valid.
        """
        given = self.format or PLAIN
        match given.get("type"):
            case "text":
                _check_members(given, ())
                return None
            case "json_object":
                _check_members(given, ())
                return StructuredOutputs("json_object")
            case "json_schema":
                return _schema(given)
        raise invalid(
            "text.format.type must be 'text', 'json_object' or 'json_schema', not "
            f"{value_text(given.get('type'))}",
            FIELD,
        )

    def shown(self) -> Mapping[str, Any]:
        """Return the field as a response shows it."""
        return {"format": self.format or PLAIN, "verbosity": "medium"}


def _check_members(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in given.items():
        if name == "type" or value is None:
            continue
        if name not in known:
            raise invalid(f"text.format.{name[:80]} is not supported: leave it out", FIELD)
        kind, what = MEMBERS.get(name, (object, ""))
        if not isinstance(value, kind):
            raise invalid(f"text.format.{name} must be {what}, not {value_text(value)}", FIELD)


def _schema(given: Mapping[str, Any]) -> StructuredOutputs:
    _check_members(given, ("schema", *MEMBERS))
    schema = given.get("schema")
    if not isinstance(schema, dict | bool):
        raise invalid(
            "text.format.schema must be a JSON Schema (an object or a boolean), not "
            f"{value_text(schema)}",
            FIELD,
        )
    if not given.get("name"):
        raise invalid("text.format has no name: set text.format.name", FIELD)
    try:
        return json_schema(schema)
    except InvalidParameterError as error:
        problem = str(error).removeprefix(f"{error.param}: ")
        raise invalid(f"text.format: {problem}", FIELD) from error
