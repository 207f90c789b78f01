"""Strategies for values of pydantic fields and of protobuf messages, from their schemas.

A new field is fuzzed as soon as it is in the schema.
"""

import struct
import types
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from pydantic import BaseModel

Values: TypeAlias = st.SearchStrategy[Any]

WORDS = ("stub", "other", "user", "assistant", "system", "developer", "text", "hi", "</s>", "1")
TEXTS = st.one_of(
    st.sampled_from(WORDS),
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.builds(
        lambda word, count: word * count, st.sampled_from(["a", " ", "\n"]), st.integers(0, 3000)
    ),
)
SMALL = st.integers(0, 8)
EDGES = st.sampled_from(
    [
        -1,
        16,
        63,
        64,
        65,
        128,
        1023,
        1024,
        *(
            sign * (1 << bits) + off
            for bits in (31, 32, 63, 64)
            for sign in (1, -1)
            for off in (-1, 0, 1)
        ),
        10**30,
    ]
)
FLOATS = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e-9, 1e38, 1e308, -0.0, 5e-324]),
    st.floats(0, 2),
    st.floats(allow_nan=True, allow_infinity=True),
)
JUNK = st.recursive(
    st.none() | st.booleans() | SMALL | EDGES | FLOATS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)
    ),
    max_leaves=4,
)
SIMPLE: Mapping[Any, Values] = {
    bool: st.booleans(),
    int: st.one_of(SMALL, SMALL, SMALL, SMALL, EDGES),
    float: st.one_of(SMALL, st.floats(0, 2), FLOATS),
    str: TEXTS,
    type(None): st.none(),
    Any: st.one_of(
        TEXTS, st.lists(TEXTS, max_size=3), st.lists(st.integers(0, 500), max_size=9), JUNK
    ),
}


@cache
def values_of(annotation: Hashable) -> Values:
    """Return a strategy for plain JSON values of a field with this annotation."""
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(arguments[0])
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(each) for each in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=4)
    if origin is dict:
        keys = st.one_of(st.integers(0, 500).map(str), st.sampled_from(WORDS))
        return st.dictionaries(keys, values_of(arguments[1]), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return objects_of(annotation)
    raise TypeError(f"no values for {annotation}: add them to {__name__}")


@cache
def objects_of(model: type[BaseModel]) -> Values:
    """Return a strategy for JSON objects with all required and some other fields of a model."""
    known = model.model_fields
    annotations: dict[str, Any] = {name: field.annotation for name, field in known.items()}
    fields = {name: values_of(annotation) for name, annotation in annotations.items()}
    required = [name for name, field in known.items() if field.is_required()]
    return some_of(fields, required)


def one_in(count: int) -> st.SearchStrategy[bool]:
    """Return a strategy that is true about once in `count` draws."""
    # Hypothesis draws the bounds 0 and `count` more often than other numbers, so compare with 1.
    return st.integers(0, count).map(lambda drawn: drawn == 1)


@st.composite
def some_of(draw: st.DrawFn, fields: Mapping[str, Values], required: list[str]) -> dict[str, Any]:
    """Draw the required fields and a few others, mostly with values of their types."""
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), max_size=8)) if fields else []
    drawn = {}
    for name in dict.fromkeys((*required, *chosen)):
        drawn[name] = draw(JUNK if draw(one_in(30)) else fields[name])
    return drawn


NUMBERS: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""Bounds of the integer types of protobuf."""


def _single(field: FieldDescriptor) -> Values:
    """Return a strategy for one value of a field."""
    kind = field.cpp_type
    if kind in NUMBERS:
        low, high = NUMBERS[kind]
        edges = st.sampled_from([low, high, *(each for each in (-1, 64, 1024) if low <= each)])
        return st.one_of(SMALL, SMALL, SMALL, SMALL, edges)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.one_of(SMALL.map(float), st.floats(0, 2), FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        known = [value.number for value in field.enum_type.values]
        return st.sampled_from([*known, max(known) + 1])
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return TEXTS if field.type == FieldDescriptor.TYPE_STRING else TEXTS.map(str.encode)
    assert kind == FieldDescriptor.CPPTYPE_MESSAGE, field.full_name
    return messages_of(field.message_type)


@cache
def messages_of(descriptor: Descriptor) -> Values:
    """Return a strategy for protobuf messages in which a few fields are set."""
    return _messages(descriptor)


@st.composite
def _messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    message = message_factory.GetMessageClass(descriptor)()
    fields = list(descriptor.fields)
    chosen = draw(st.lists(st.sampled_from(fields), max_size=5)) if fields else []
    # Most messages with a oneof are invalid if no field of the oneof is set.
    for oneof in descriptor.oneofs:
        chosen.append(draw(st.sampled_from(list(oneof.fields))))
    for field in chosen:
        _set(draw, message, field)
    return message


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        getattr(message, field.name)[draw(_single(key))] = draw(_single(value))
    elif field.is_repeated:
        values = draw(st.lists(_single(field), max_size=4))
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend(values)
    elif entry is not None:
        getattr(message, field.name).CopyFrom(draw(_single(field)))
    else:
        setattr(message, field.name, draw(_single(field)))


@st.composite
def malformed(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """Draw the bytes of a message with wrong wire types, or of a valid message that was damaged."""
    if draw(st.booleans()):
        return draw(damaged(draw(messages_of(descriptor)).SerializeToString()))
    data = bytearray()
    numbers = [field.number for field in descriptor.fields] or [1]
    for _ in range(draw(st.integers(1, 4))):
        number, wire = draw(st.sampled_from([*numbers, 999])), draw(st.integers(0, 7))
        data += _varint(number << 3 | wire)
        if wire == 0:
            data += _varint(draw(st.integers(0, 2**64 - 1)))
        elif wire == 1:
            data += struct.pack("<d", draw(st.floats()))
        elif wire == 2:
            content = draw(st.binary(max_size=12))
            data += _varint(draw(st.one_of(st.just(len(content)), st.integers(0, 2**35)))) + content
        else:
            data += draw(st.binary(max_size=6))
    return bytes(data)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw `data` with a few bytes changed, inserted, removed or cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(changed)))
        match draw(st.integers(0, 3)):
            case 0:
                changed[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                changed[at:at] = draw(st.one_of(st.binary(max_size=8), st.sampled_from(INSERTED)))
            case 2:
                del changed[at : at + draw(st.integers(1, 9))]
            case 3:
                del changed[at:]
    return bytes(changed)


INSERTED = (
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b": ",
    b"\xff\xff",
    b" ",
    b"0\r\n\r\n",
    b"GET / HTTP/1.1\r\n",
)
"""Byte strings that have a meaning in the syntax of HTTP."""
