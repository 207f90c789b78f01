"""Sends the results of a worker's steps to routers."""

from collections.abc import Mapping

from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.simulator.model.timing import Floats
from penstock.loadtests.simulator.world.messages import NewTokens
from penstock.loadtests.simulator.world.session import Key, Session
from penstock.loadtests.simulator.world.token_runs import SteppedRuns
from penstock.router.routing.events import Yielded


def send_steps(
    worker: str,
    session: Session,
    tokens: NewTokens,
    ends: Floats,
    load: WorkerLoad,
    now: float,
    passed: bool,
) -> None:
    """Send the tokens of steps that ended at `ends`; `load` is the load after the last step.

    The tokens of messages that should already have arrived are merged into the next message. This
    only changes the time at which the router receives these tokens. If that message should have
    arrived already as well, and `passed` is True, the message is sent without the load. With the
    load, the router would assume that the load includes a command that the worker has not processed
    yet.
    """
    up = session.stream.up
    on_way = len(tokens) - 1
    while on_way and up.arrival(float(ends[on_way - 1])) >= now:
        on_way -= 1
    session.load = load
    first = 0
    for step, end in enumerate(ends[on_way:].tolist(), start=on_way):
        without = passed and up.arrival(end) < now
        runs = SteppedRuns(
            worker, tokens, first, step + 1, None if without else load, session.take_cached()
        )
        session.send(runs if step > first else runs.whole(), end)
        session.load_sent_at = session.load_sent_at if without else now
        first = step + 1


def send_yielded(
    worker: str, sessions: Mapping[int, Session], key: Key, kv_len: int, now: float
) -> None:
    """Report that a sequence has yielded. The session keeps a sequence that has KV."""
    session = sessions.get(key.session)
    if session is None or key not in session.held:
        return
    if kv_len:
        session.held[key].kv_len = kv_len
    else:
        del session.held[key]
    session.send(Yielded(worker, key.request, key.attempt, kv_len), now)
