"""What a worker's steps gave, as messages to the routers."""

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
    """Each router's stream that is to hear of it, and which of the tokens are for it."""
    rows: dict[int, list[int]] = {}
    for row, name in enumerate(output.keys):
        key = cast(Key, name)
        session = sessions.get(key.session)
        if session is not None and key in session.held:
            rows.setdefault(key.session, []).append(row)
    return ((sessions[number], mine) for number, mine in rows.items())


def new_tokens(output: StepOutput, tokens: Ints, rows: list[int]) -> list[list[NewToken]]:
    """What steps drew, a list each, of these places: `tokens` [n, S], as `Steps` tells them."""
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
    """Say what steps drew that ended then; `load`: how full the worker is after the last.

    What would have been said and heard by now is told late, with the next message. That changes
    nothing at the router but how many tokens it knows of. Where a message to the worker has
    `passed` it, it comes without the load: the router would take it to count that message.
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
