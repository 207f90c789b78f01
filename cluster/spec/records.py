"""Parses nested plain values strictly into frozen dataclasses, which are called records here.

An unknown key, a wrong type or a value out of range raises `SpecError`. The message has the dotted
path of the value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

NO_MOVES: Mapping[str, str] = {}


class SpecError(ValueError):
    """The specification is invalid. The message names the setting and what to change."""


def knob(
    default: Any,
    about: str,
    least: float | None = None,
    most: float | None = None,
    is_secret: bool = False,
) -> Any:
    """Return the dataclass field of a setting.

    Args:
        default: value of the setting if it is not given.
        about: help text of the setting.
        least: smallest allowed value, or None.
        most: largest allowed value, or None.
        is_secret: whether error messages and `repr` must not contain the value.
    """
    metadata = {"about": about, "least": least, "most": most, "is_secret": is_secret}
    return field(default=default, metadata=metadata, repr=not is_secret)


def records_of(kind: type) -> Iterator[type]:
    """Yield a record type and, recursively, the record types that its fields contain."""
    yield kind
    for hint in get_type_hints(kind).values():
        below = get_args(hint)[1] if get_origin(hint) is Mapping else hint
        if _is_record(below):
            yield from records_of(below)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings. The values of `over` replace those of `base`."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def knobs(record: type) -> dict[str, tuple[Field[Any], Any]]:
    """Return the field and the type of each setting of a record, by name.

    Fields that are records themselves are left out.
    """
    hints = get_type_hints(record)
    return {f.name: (f, hints[f.name]) for f in fields(record) if "about" in f.metadata}


def record(kind: type[T], content: Any, where: str = "", moved: Mapping[str, str] = NO_MOVES) -> T:
    """Build a record from a mapping of plain values.

    Args:
        kind: the dataclass. Its fields are settings (`knob`), records, or mappings from names to
            records.
        content: values by field name. A missing field keeps its default.
        where: dotted path of `content` for error messages, or "" at the top.
        moved: for each setting that only older files have, by dotted path, the text for the error
            message that says what to write instead.

    Raises:
        SpecError: a value is wrong. The message is one line with the path of the first wrong value.
    """
    metadata = {f.name: f.metadata for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(content, Mapping):
        wrong = _not(content, _has_secrets(kind))
        raise SpecError(f"{where or 'the file'}: expected a mapping of keys to values{wrong}")
    hints = get_type_hints(kind)
    for key in content:
        name = _below(where, key)
        if name in moved:
            raise SpecError(f"{name}: this key has moved: write {moved[name]} instead")
        if key not in hints:
            raise SpecError(f"{name}: unknown key: expected one of {', '.join(hints)}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        hint, path = hints[key], _below(where, key)
        if _is_record(hint):
            values[key] = record(hint, value, path, moved)
        elif get_origin(hint) is Mapping:
            values[key] = _named(get_args(hint)[1], value, path, moved)
        else:
            values[key] = _checked(value, hint, metadata[key], path)
    try:
        return kind(**values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}" if where else str(error)) from None


def _named(kind: type[T], content: Any, where: str, moved: Mapping[str, str]) -> dict[str, T]:
    """Parse a mapping whose keys are names chosen by the user and whose values are records."""
    if not isinstance(content, Mapping):
        wrong = _not(content, _has_secrets(kind))
        raise SpecError(f"{where}: expected a mapping of names to mappings{wrong}")
    for name in content:
        if not isinstance(name, str):
            raise SpecError(
                f"{where}: expected a string as name, not {name!r}: put the name in quotes"
            )
        if not name.isprintable() or name != name.strip() or not name:
            raise SpecError(
                f"{where}: {name!r} cannot be a name: expected at least one character, only "
                "printable characters, and no spaces at the ends"
            )
    return {name: record(kind, each, _below(where, name), moved) for name, each in content.items()}


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _below(where: str, key: object) -> str:
    """Return the dotted path of `key` below `where`, without line breaks."""
    name = key if isinstance(key, str) and key.isprintable() else repr(key)
    return f"{where}.{name}" if where else name


def _checked(value: Any, kind: Any, metadata: Mapping[str, Any], where: str) -> Any:
    result = _typed(value, kind)
    if result is _WRONG:
        wrong = _not(value, metadata["is_secret"])
        raise SpecError(f"{where}: expected {_spelled(kind)}{wrong}")
    least, most = metadata["least"], metadata["most"]
    numbers = isinstance(result, (int, float))
    if numbers and not ((least is None or result >= least) and (most is None or result <= most)):
        bounds = f"{least} or more" if most is None else f"from {least} to {most}"
        raise SpecError(f"{where}: expected {bounds}, not {value!r}")
    return result


def _has_secrets(kind: type) -> bool:
    return any(each.metadata.get("is_secret") for each in fields(kind))


def _not(value: Any, is_secret: bool) -> str:
    """Return the last words of an error message: the wrong value, or that it is not shown.

    Args:
        is_secret: whether the message must not contain the value.
    """
    return "; the value is not shown, because it may be secret" if is_secret else f", not {value!r}"


_WRONG = object()


def _typed(value: Any, kind: Any) -> Any:
    """Return `value` with the type `kind`, or `_WRONG` if its type is wrong.

    The only conversions are from int to float and from list to tuple.
    """
    if get_origin(kind) is UnionType:
        return next((r for k in get_args(kind) if (r := _typed(value, k)) is not _WRONG), _WRONG)
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _WRONG
    if get_origin(kind) is tuple:
        fits = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return tuple(value) if fits else _WRONG
    if kind is float and type(value) is int:
        return float(value)
    # `isinstance` would accept a bool as an int, because bool is a subclass of int.
    return value if type(value) is kind else _WRONG


def _spelled(kind: Any) -> str:
    """Return the name of a type for error messages."""
    if get_origin(kind) is UnionType:
        return " or ".join(_spelled(option) for option in get_args(kind) if option is not NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of strings"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]


def one_line(error: Exception) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())
