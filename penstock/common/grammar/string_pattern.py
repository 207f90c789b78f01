"""Converts regular expressions of JSON Schema (ECMAScript) to terminals for llguidance."""

import re

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
_NOT_REGULAR = re.compile(r"\(\?(?!:)|\\[bBkpP1-9<>]")
_LINE_ENDS = r"\n\r\u2028\u2029"


def terminal(pattern: str) -> str:
    """Convert the `pattern` of a JSON Schema to a Lark terminal that matches the same strings.

    Raises:
        ValueError: the pattern has look-around, a back reference, an inner anchor, or another
            construct that terminals do not have.
    """
    if found := _NOT_REGULAR.search(pattern.replace("\\\\", "")):
        raise ValueError(
            f"{found[0]} is not supported in a pattern: leave out look-around, back references, "
            "word boundaries, Unicode classes, flags and named groups"
        )
    has_start = pattern.startswith("^")
    is_escaped = (len(pattern) - len(pattern.rstrip("$").rstrip("\\"))) % 2 == 0
    has_end = pattern.endswith("$") and not (pattern.endswith("\\$") and is_escaped)
    inner = pattern[has_start : len(pattern) - has_end]
    converted, has_choice = _converted(inner)
    if has_choice and (has_start or has_end):
        raise ValueError(
            f"the pattern {pattern[:80]!r} has alternatives (|) outside of parentheses, and "
            "begins with ^ or ends with $: put the alternatives in parentheses, as in ^(a|b)$"
        )
    begin, end = ("" if has_start else "(?s:.*)"), ("" if has_end else "(?s:.*)")
    return f"/{begin}(?:{converted}){end}/"


def _converted(pattern: str) -> tuple[str, bool]:
    """Convert a pattern without anchors.

    The second result is True if the pattern has a `|` outside of parentheses.
    """
    found: list[str] = []
    depth, in_class, has_choice, at = 0, False, False, 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == "\\":
            found.append(_escape(pattern[at : at + 1], in_class))
            at += 1
        elif in_class:
            in_class = character != "]"
            found.append(f"\\{character}" if character in "[&~/" else _plain(character))
        elif character in "^$":
            raise ValueError(
                f"{character} is inside the pattern: ^ is supported only as the first character of "
                "a pattern, and $ only as the last one"
            )
        else:
            in_class = character == "["
            depth += (character == "(") - (character == ")")
            has_choice |= character == "|" and depth == 0
            found.append(f"[^{_LINE_ENDS}]" if character == "." else _plain(character))
            if in_class and pattern[at : at + 1] == "^":
                found.append("^")
                at += 1
    return "".join(found), has_choice


def _plain(character: str) -> str:
    return {"\n": r"\n", "\r": r"\r", "/": r"\/"}.get(character, character)


def _escape(letter: str, in_class: bool) -> str:
    if letter in _CLASSES:
        return _CLASSES[letter] if in_class else f"[{_CLASSES[letter]}]"
    if letter.lower() in _CLASSES:
        if in_class:
            raise ValueError(
                f"\\{letter} is not supported in a character class: list the characters"
            )
        return f"[^{_CLASSES[letter.lower()]}]"
    return f"\\{letter}"
