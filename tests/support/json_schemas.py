"""Random JSON Schemas over the supported keywords."""

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "id", "name", "tags", "über", "x y", 'q"t', "value", "kind", "list", "n", "deep")
WORDS = st.text(st.sampled_from('ab é"\\\n{}1'), max_size=6)

NUMBERS = st.integers(-50, 50).flatmap(
    lambda low: st.sampled_from(
        (
            {"type": "integer"},
            {"type": "integer", "minimum": low},
            {"type": "integer", "minimum": low, "maximum": low + 40},
            {"type": "integer", "exclusiveMaximum": low},
            {"type": "number", "minimum": low, "maximum": low + 3},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + 2},
        )
    )
)
STRINGS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "string", "maxLength": 8}),
    st.integers(0, 4).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}),
    st.sampled_from(("^[a-c]{2,4}$", "^(x|yz)[0-9]{1,3}$", r"^\d{2}-[A-F]+$")).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(("date", "uuid", "ipv4")).map(lambda f: {"type": "string", "format": f}),
)
VALUES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.lists(WORDS | st.integers(-9, 9) | st.booleans() | st.none(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    WORDS.map(lambda value: {"const": value}),
    st.sampled_from(({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]})),
    st.just({"$ref": "#/$defs/shared"}),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=10)
    return st.builds(
        lambda each, skipped: {
            "type": "object",
            "properties": each,
            "required": [name for name in each if name not in skipped],
            "additionalProperties": False,
        },
        properties,
        st.sets(st.sampled_from(NAMES), max_size=3),
    )


def _arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, low, more: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def _with_shared(schema: Any) -> dict[str, Any]:
    return {**schema, "$defs": {"shared": {"type": "string", "pattern": "^[k-m]{1,3}$"}}}


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    NUMBERS | STRINGS | VALUES,
    lambda inner: (
        _objects(inner)
        | _arrays(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    ),
    max_leaves=12,
).map(_with_shared)
