"""Notation in which a model family writes the arguments of a tool call."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["json", "tagged", "bracketed", "keywords"]


@dataclass(frozen=True, slots=True)
class ArgumentNotation:
    """A notation of arguments, with the texts that delimit keys and values.

    An "expansion" is the right-hand side of a Lark grammar rule.

    Attributes:
        kind: `json`: a JSON object. `tagged`: keys and values between tags; strings have no quotes.
            `bracketed`: like JSON, but keys have no quotes and strings have other quotes.
            `keywords`: Python keyword arguments.
        before_key: for `tagged`, the expansion before a key.
        before_value: for `tagged`, the expansion between a key and its value.
        end: for `tagged`, the text that ends a string; for `bracketed`, the quote.
        end_token: expansion that matches `end` if it is a special token; empty if `end` is ordinary
            text.
        markers: texts that no string may contain.
    """

    kind: Kind = "json"
    before_key: str = ""
    before_value: str = ""
    end: str = ""
    end_token: str = ""
    markers: tuple[str, ...] = ()


JSON = ArgumentNotation()
