"""How a family of models writes the arguments of a call."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["json", "tagged", "bracketed", "keywords"]


@dataclass(frozen=True, slots=True)
class ArgumentNotation:
    """The notation of arguments, with the markers that it needs.

    Expansions are those of a Lark rule.

    Attributes:
        kind: `json`: an object. `tagged`: keys and values between tags, strings without quotes.
            `bracketed`: as JSON, but keys without quotes and strings in other quotes. `keywords`:
            keyword arguments of Python.
        before_key: expansion before a key of `tagged`.
        before_value: expansion between a key and its value.
        end: text that ends a string without quotes, or the quote of `bracketed`.
        end_token: expansion of the special token `end`; empty: `end` is ordinary text.
        markers: texts that no string may contain.
    """

    kind: Kind = "json"
    before_key: str = ""
    before_value: str = ""
    end: str = ""
    end_token: str = ""
    markers: tuple[str, ...] = ()


JSON = ArgumentNotation()
