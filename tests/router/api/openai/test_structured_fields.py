"""Refusals of invalid fields for structured outputs."""

from typing import Any

import pytest

from penstock.router.api.openai.structured_fields import StructuredFields
from penstock.router.errors import ServingError


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
