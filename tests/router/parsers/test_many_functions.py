"""Strict calls of many functions: the grammar grows with their number, and compiles."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from penstock.common.grammar.grammar_text import check_structured_outputs
from penstock.common.structured_outputs import StructuredOutputs
from penstock.router.parsers.parser_names import TOOL_PARSERS
from penstock.router.requests.strict_calls import strict_calls
from tests.support.strict_model import Model

MOST = 128
MAX_CPU_SECONDS = 1.0
"""Limit of the CPU time of the helper process that checks a constraint."""


def function(index: int) -> Mapping[str, Any]:
    """Return a strict function with ten parameters."""
    properties: dict[str, Any] = {
        f"field_{number}_{index}": {"type": "string", "description": "A free text for the field."}
        for number in range(4)
    }
    properties |= {
        "kind": {"enum": ["order", "offer", "return"]},
        "score": {"type": "number", "minimum": 0, "maximum": 5},
        "count": {"type": "integer", "minimum": 1},
        "when": {"type": "string", "format": "date"},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    return {"name": f"function_{index}", "strict": True, "parameters": parameters}


@pytest.fixture(scope="module")
def form_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], StructuredOutputs]:
    def found(name: str, count: int) -> StructuredOutputs:
        model = Model(tmp_path_factory.mktemp(name), name, True)
        prompt = "<|start|>assistant" if name == "openai" else "hello"
        tokens = model.tokenizer.encode(prompt, add_special_tokens=False)
        return model.parsers.strict_form(tokens, strict_calls([*map(function, range(count))]))

    return found


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_grammar_of_many_functions_is_as_long_as_the_functions(
    form_of: Callable[[str, int], StructuredOutputs], name: str
) -> None:
    half, whole = form_of(name, MOST // 2), form_of(name, MOST)
    assert len(whole.text) < 2.1 * len(half.text)
    began = time.thread_time()
    check_structured_outputs(whole)
    assert time.thread_time() - began < MAX_CPU_SECONDS
