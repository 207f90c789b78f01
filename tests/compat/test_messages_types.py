"""A test fails if a type of Anthropic's client has a field that is not listed in this file."""

import typing
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic import types
from anthropic.types.message_create_params import MessageCreateParamsBase

from tests.compat.test_messages_fields import (
    ACCEPTED,
    HEADERS,
    OLDER,
    ONLY_MESSAGES,
    REFUSED,
    types_in,
)


def fields_of(params: Any) -> set[str]:
    return set(typing.get_type_hints(params))


def test_every_field_of_the_clients_types_is_in_the_tables() -> None:
    known = {name for name, _ in ACCEPTED} & {name for name, _ in REFUSED}
    assert known == (fields_of(MessageCreateParamsBase) | {"stream"} | OLDER) - HEADERS
    assert known - ONLY_MESSAGES == fields_of(types.MessageCountTokensParams) - HEADERS


FIELDS: Mapping[Any, set[str]] = {
    types.TextBlockParam: {"type", "text", "cache_control", "citations"},
    types.ThinkingBlockParam: {"type", "thinking", "signature"},
    types.RedactedThinkingBlockParam: {"type", "data"},
    types.ToolUseBlockParam: {
        *("type", "id", "name", "input", "cache_control", "caller", "toolset_name"),
    },
    types.ToolResultBlockParam: {
        *("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"),
    },
    types.ToolParam: {
        *("type", "name", "description", "input_schema", "cache_control", "strict"),
        *("eager_input_streaming", "input_examples", "defer_loading", "allowed_callers"),
    },
    types.ToolChoiceAutoParam: {"type", "disable_parallel_tool_use"},
    types.ToolChoiceAnyParam: {"type", "disable_parallel_tool_use"},
    types.ToolChoiceToolParam: {"type", "name", "disable_parallel_tool_use"},
    types.ToolChoiceNoneParam: {"type"},
    types.ThinkingConfigEnabledParam: {"type", "budget_tokens", "display"},
    types.ThinkingConfigAdaptiveParam: {"type", "display"},
    types.ThinkingConfigDisabledParam: {"type"},
    types.OutputConfigParam: {"effort", "format"},
    types.JSONOutputFormatParam: {"type", "schema"},
    types.MetadataParam: {"user_id"},
    types.CacheControlEphemeralParam: {"type", "ttl"},
}
"""The expected fields of each of the client's types."""


@pytest.mark.parametrize("params", FIELDS, ids=lambda params: params.__name__)
def test_fields_of_the_clients_type_are_known(params: Any) -> None:
    assert fields_of(params) == FIELDS[params]


def test_variants_of_the_clients_unions_are_known() -> None:
    assert types_in(types.ThinkingConfigParam) == {
        *("enabled", "disabled", "adaptive", "between_tools")
    }
    assert types_in(types.ToolChoiceParam) == {"auto", "any", "tool", "none"}
