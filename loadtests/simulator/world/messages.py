"""Converts the results of a worker's steps into tokens for routers."""

from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np

from penstock.loadtests.simulator.world.session import Key, Session
from penstock.router.routing.events import TokenColumns
from penstock.workers.scheduling.sequence import Ints, StepOutput


def by_session(
    output: StepOutput, sessions: Mapping[int, Session]
) -> Iterator[tuple[Session, list[int]]]:
    """Yield each session that has tokens in `output`, with the indices of these tokens."""
    rows: dict[int, list[int]] = {}
    for row, name in enumerate(output.keys):
        key = cast(Key, name)
        session = sessions.get(key.session)
        if session is not None and key in session.held:
            rows.setdefault(key.session, []).append(row)
    return ((sessions[number], mine) for number, mine in rows.items())


def record_cached(sessions: Mapping[int, Session], key: Key, num_cached: int) -> None:
    """Record the cached tokens of an admitted sequence, for the next step message."""
    session = sessions.get(key.session)
    if session is not None and key in session.held:
        session.num_cached.setdefault(key, num_cached)


class NewTokens:
    """The new tokens of one or several steps for one router.

    Args:
        output: output of the first step.
        tokens: [n, S] tokens of the n steps, as in `StepListener.on_steps`.
        rows: the columns of `tokens` that belong to the router.
    """

    def __init__(self, output: StepOutput, tokens: Ints, rows: list[int]) -> None:
        keys = [cast(Key, output.keys[row]) for row in rows]
        self._requests, self._attempts = (
            [key.request for key in keys],
            [key.attempt for key in keys],
        )
        choices, finishes, indices = output.choices, output.finishes, output.indices
        if len(rows) < len(output.keys):
            tokens, choices = tokens[:, rows], choices[rows]
            finishes, indices = finishes[rows], indices[rows]
        self.tokens, self._indices = tokens, indices
        self._choices, self._finishes = choices.tolist(), finishes.tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def sequences(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (request, attempt, choice, position of the first step's token) of each column."""
        indices = self._indices.tolist()
        return zip(self._requests, self._attempts, self._choices, indices, strict=True)

    def columns(self, first: int, end: int) -> TokenColumns:
        """Return the tokens of steps `first` to `end - 1` as one set of columns."""
        num = end - first
        if num == 1:
            positions = (self._indices + first).tolist()
            tokens = self.tokens[first].tolist()
            return TokenColumns(
                self._requests, self._attempts, self._choices, positions, tokens, self._finishes
            )
        positions = self._indices + np.arange(first, end, dtype=np.int32)[:, None]
        return TokenColumns(
            self._requests * num,
            self._attempts * num,
            self._choices * num,
            positions.ravel().tolist(),
            self.tokens[first:end].ravel().tolist(),
            self._finishes * num,
        )
