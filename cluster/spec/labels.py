"""Labels of nodes: what may be one, what a pool asks for, who has it, who is near whom. Pure.

Grammar and words are Kubernetes', which Ray took over; a selector is a mapping as Ray takes it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

ACCELERATOR = "ray.io/accelerator-type"
"""Ray labels a node with the kind of its GPUs so."""
ZONE = "ray.io/availability-zone"

_NAME = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?")
_PREFIX_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_PREFIX = re.compile(rf"{_PREFIX_LABEL}(\.{_PREFIX_LABEL})*")
_LONGEST_PREFIX = 253


class BadLabel(ValueError):
    """A label is none; the message says which and why, in one line."""


def parse(text: str) -> tuple[str, str]:
    """Key and value of `KEY=VALUE`. `BadLabel`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise BadLabel(f"{text!r} is no KEY=VALUE")
    check_key(key)
    check_value(key, value)
    return key, value


def check_key(key: str) -> None:
    """`BadLabel` where no node can have that key."""
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name):
        raise BadLabel(
            f"{key!r} is no key of a label: up to 63 letters, digits, - _ and ., the first and the "
            "last a letter or digit; before it perhaps a domain and /"
        )
    if slash and (len(prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(prefix)):
        raise BadLabel(f"{key!r} is no key of a label: {prefix!r} before / is no domain")


def check_value(key: str, value: str) -> None:
    """`BadLabel` where nothing can be asked of that key with it.

    A node's value may be empty, but who asks for that has more likely lost a word.
    """
    if not _NAME.fullmatch(value):
        raise BadLabel(
            f"{value!r} is no value of a label ({key}): up to 63 letters, digits, - _ and ., the "
            "first and the last a letter or digit"
        )


def required_labels(labels: Sequence[str], accelerator: str | None) -> dict[str, str]:
    """What a pool's nodes must have: its `KEY=VALUE`s, and its kind of GPU. `BadLabel`."""
    pairs = [parse(text) for text in labels]
    if accelerator is not None:
        check_value(ACCELERATOR, accelerator)
        pairs.append((ACCELERATOR, accelerator))
    twice = [key for key, number in Counter(key for key, _ in pairs).items() if number > 1]
    if twice:
        raise BadLabel(f"{twice[0]} is asked for twice, and a node has one value of it")
    return dict(pairs)


def match(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with `labels` is what is `wanted`."""
    return all(labels.get(key) == value for key, value in wanted.items())


def any_of(key: str, values: Iterable[str]) -> dict[str, str]:
    """The selector of nodes that have one of these values."""
    several = sorted(values)
    return {key: several[0] if len(several) == 1 else f"in({','.join(several)})"}


def describe(selector: Mapping[str, str], joint: str = ", ") -> str:
    """A selector in words: `a=b, c=in(d,e)`."""
    return joint.join(f"{key}={value}" for key, value in selector.items())
