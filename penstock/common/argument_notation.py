"""The notation in which a family of models writes the arguments of a tool call."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["json", "tagged", "bracketed", "keywords"]


@dataclass(frozen=True, slots=True)
class ArgumentNotation:
    """A notation for the arguments of tool calls, with the texts that delimit keys and values.

    A "Lark expression" is the right-hand side of a rule of a Lark grammar.

    Attributes:
        kind: `json` is a JSON object. `tagged` writes keys and values between tags, and strings
            without quotes. `bracketed` is like JSON, but keys have no quotes, and strings have
            other quotes. `keywords` are keyword arguments in Python's syntax.
        before_key: for `tagged`, the Lark expression before a key.
        before_value: for `tagged`, the Lark expression between a key and its value.
        end: for `tagged`, the text that ends a string. For `bracketed`, the text that quotes a
            string.
        end_token: Lark expression that matches `end` if `end` is a special token, or "" if `end` is
            ordinary text.
        markers: texts that no string may contain.
    """

    kind: Kind = "json"
    before_key: str = ""
    before_value: str = ""
    end: str = ""
    end_token: str = ""
    markers: tuple[str, ...] = ()


JSON = ArgumentNotation()
