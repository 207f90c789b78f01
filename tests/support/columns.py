"""Single tokens as rows, for tests that build or read `TokenColumns` of a step."""

from collections.abc import Iterable
from typing import NamedTuple

from penstock.router.routing.events import Command, Deliver, Finish, TokenColumns


class NewToken(NamedTuple):
    """One token: a row of `TokenColumns`."""

    request: int
    attempt: int
    choice: int
    position: int
    token: int
    finish: int = Finish.NONE


def columns_of(tokens: Iterable[NewToken]) -> TokenColumns:
    """Return tokens without logprobs as columns."""
    rows = list(tokens)
    return TokenColumns(
        [row.request for row in rows],
        [row.attempt for row in rows],
        [row.choice for row in rows],
        [row.position for row in rows],
        [row.token for row in rows],
        [row.finish for row in rows],
    )


def tokens_of(columns: TokenColumns) -> list[NewToken]:
    """Return the tokens of columns as rows."""
    return [NewToken(*row) for row in columns.rows()]


def delivered(commands: Iterable[Command]) -> list[NewToken]:
    """Return the tokens that the `Deliver` commands contain."""
    return [
        token
        for command in commands
        if isinstance(command, Deliver)
        for token in tokens_of(command.tokens)
    ]
