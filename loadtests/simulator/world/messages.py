"""Converts the outputs of a worker's steps into messages to routers."""

from collections.abc import Iterator, Mapping
from typing import cast

from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.simulator.model.timing import Floats
from penstock.loadtests.simulator.world.session import Key, Session
from penstock.router.routing.events import Finish, NewToken, Stepped
from penstock.workers.scheduling.sequence import Ints, StepOutput

_FINISHES = tuple(Finish)


def by_session(
    output: StepOutput, sessions: Mapping[int, Session]
) -> Iterator[tuple[Session, list[int]]]:
    """Yield each session that has tokens in `output`, with the row numbers of these tokens."""
    rows: dict[int, list[int]] = {}
    for row, name in enumerate(output.keys):
        key = cast(Key, name)
        session = sessions.get(key.session)
        if session is not None and key in session.held:
            rows.setdefault(key.session, []).append(row)
    return ((sessions[number], mine) for number, mine in rows.items())


def new_tokens(output: StepOutput, tokens: Ints, rows: list[int]) -> list[list[NewToken]]:
    """Return the new tokens of the given rows: one list per step.

    `tokens` is [n, S], as in `StepListener.on_steps`.
    """
    choices, indices = output.choices.tolist(), output.indices.tolist()
    finishes, keys = output.finishes.tolist(), cast(list[Key], output.keys)
    about = [
        (
            row,
            keys[row].request,
            keys[row].attempt,
            choices[row],
            indices[row],
            _FINISHES[finishes[row]],
        )
        for row in rows
    ]
    return [
        [
            NewToken(request, attempt, choice, index + later, step[row], finish)
            for row, request, attempt, choice, index, finish in about
        ]
        for later, step in enumerate(tokens.tolist())
    ]


def send_steps(
    worker: str,
    session: Session,
    tokens: list[list[NewToken]],
    ends: Floats,
    load: WorkerLoad,
    now: float,
    passed: bool,
) -> None:
    """Send the tokens of steps that ended at `ends`; `load` is the load after the last step.

    Messages that should already have arrived are merged into the next message. This only changes
    the time at which the router receives their tokens. If a message to the worker has `passed`
    these tokens, they are sent without the load, because the router would assume that the load
    already includes that message.
    """
    up = session.stream.up
    on_way = len(tokens) - 1
    while on_way and up.arrival(float(ends[on_way - 1])) >= now:
        on_way -= 1
    late = [token for step in tokens[:on_way] for token in step]
    session.load = load
    for step, end in zip(tokens[on_way:], ends[on_way:].tolist(), strict=True):
        without = passed and up.arrival(end) < now
        session.send(Stepped(worker, late + step, None if without else load), end)
        session.load_sent_at = session.load_sent_at if without else now
        late = []
