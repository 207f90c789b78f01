"""Checks the syntax of node labels, builds the label selectors of pools, and matches labels.

Labels have the syntax of Kubernetes and Ray. A selector is a mapping in the format that Ray
expects.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

ACCELERATOR = "ray.io/accelerator-type"
"""Key of the label in which Ray stores the type of a node's GPUs."""
ZONE = "ray.io/availability-zone"

_NAME = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?")
_PREFIX_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_PREFIX = re.compile(rf"{_PREFIX_LABEL}(\.{_PREFIX_LABEL})*")
_LONGEST_PREFIX = 253


class BadLabel(ValueError):
    """A label is invalid. The message names the label and the reason, in one line."""


def parse(text: str) -> tuple[str, str]:
    """Split `KEY=VALUE` into key and value. Raise `BadLabel` if one of them is invalid."""
    key, equals, value = text.partition("=")
    if not equals:
        raise BadLabel(f"invalid label {text!r}: expected KEY=VALUE")
    check_key(key)
    check_value(key, value)
    return key, value


def check_key(key: str) -> None:
    """Raise `BadLabel` if `key` is not a valid label key."""
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name):
        raise BadLabel(
            f"invalid label key {key!r}: expected [DOMAIN/]NAME, where NAME is 1 to 63 letters, "
            "digits, '-', '_' and '.', and begins and ends with a letter or digit"
        )
    if slash and (len(prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(prefix)):
        raise BadLabel(
            f"invalid label key {key!r}: the part before '/' must be a lower-case domain name of "
            f"at most {_LONGEST_PREFIX} characters, not {prefix!r}"
        )


def check_value(key: str, value: str) -> None:
    """Raise `BadLabel` if `value` is invalid as the required value of a node's label `key`.

    Empty values are invalid here. Nodes may have them, but requiring one is probably a mistake.
    """
    if not _NAME.fullmatch(value):
        raise BadLabel(
            f"invalid value {value!r} of label {key}: expected 1 to 63 letters, digits, '-', '_' "
            "and '.', the first and the last a letter or digit"
        )


def required_labels(labels: Sequence[str], accelerator: str | None) -> dict[str, str]:
    """Return the labels that the nodes of a pool must have.

    Args:
        labels: the labels of the pool's specification, as `KEY=VALUE`.
        accelerator: Ray's name of the required GPU type, or None.

    Raises:
        BadLabel: a label is invalid, or two labels have the same key.
    """
    pairs = [parse(text) for text in labels]
    for key, number in Counter(key for key, _ in pairs).items():
        if number > 1:
            raise BadLabel(
                f"label {key} is given {number} times: give it once, because a node has only one "
                "value of a label"
            )
    found = dict(pairs)
    if accelerator is not None:
        check_value(ACCELERATOR, accelerator)
        if ACCELERATOR in found:
            raise BadLabel(f"label {ACCELERATOR} is also in 'labels': leave out one of them")
        found[ACCELERATOR] = accelerator
    return found


def match(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return True if `labels` contains all labels of `wanted`."""
    return all(labels.get(key) == value for key, value in wanted.items())


def any_of(key: str, values: Iterable[str]) -> dict[str, str]:
    """Return the selector of the nodes whose label `key` has one of `values`."""
    several = sorted(values)
    return {key: several[0] if len(several) == 1 else f"in({','.join(several)})"}


def describe(selector: Mapping[str, str], joint: str = ", ") -> str:
    """Return a selector as text, for example `a=b, c=in(d,e)`."""
    return joint.join(f"{key}={value}" for key, value in selector.items())
