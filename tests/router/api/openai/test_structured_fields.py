"""Fields for structured outputs: their refusals, and their constraints after parsing."""

import json
from typing import Any

import pytest

from penstock.common.structured_outputs import StructuredOutputs
from penstock.router.api.generation.parsed_body import job_items, parse_job, read_parsed
from penstock.router.api.openai.structured_fields import StructuredFields
from penstock.router.config import RequestBounds
from penstock.router.errors import ServingError
from penstock.router.requests.request import ModelLimits


@pytest.mark.parametrize("field", ["guided_json", "structured_outputs"])
def test_deeply_nested_schema_is_refused_under_the_name_of_its_field(field: str) -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    body = StructuredFields()
    setattr(body, field, schema if field == "guided_json" else {"json": schema})
    with pytest.raises(ServingError, match=f"^{field}: the schema is nested too deeply") as error:
        body.form()
    assert error.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"enum": ["é", 1e3]}}},
            StructuredOutputs("json", '{"enum": ["é", 1000.0]}'),
        ),
        ("response_format", {"type": "json_object"}, StructuredOutputs("json_object")),
        ("response_format", {"type": "text"}, None),
        (
            "structured_outputs",
            {"grammar": 'start: "\n"'},
            StructuredOutputs("grammar", 'start: "\n"'),
        ),
        ("guided_json", True, StructuredOutputs("json", "true")),
        ("guided_choice", ["a", "ü"], StructuredOutputs("choice", '["a", "ü"]')),
        ("guided_regex", "a+", StructuredOutputs("regex", "a+")),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_router_gets_the_constraint_instead_of_its_field(
    kind: str, field: str, value: object, expected: StructuredOutputs | None
) -> None:
    messages = [{"role": "user", "content": "x"}]
    content: dict[str, Any] = {"messages": messages} if kind == "chat" else {"prompt": "x"}
    data = json.dumps({**content, field: value}).encode()
    items = parse_job(RequestBounds(), job_items(kind, data, ModelLimits("stub", 2048, 400)))
    body = (await read_parsed(items)).body
    assert getattr(body, field) is None
    assert body.form() == (None if expected is None else (field, expected))
    assert body.client_names().get("structured_outputs") == (field if expected else None)
