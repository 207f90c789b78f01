"""Appends several tokens of a sequence in one call, for simulations."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.router.routing.request_state import RequestState


class TokenRun(NamedTuple):
    """Tokens at consecutive positions of one choice, none of which ends it."""

    request: int
    attempt: int
    choice: int
    position: int  # position of the first token in the answer, from 0
    tokens: Sequence[int]


def append_runs(
    worker: str,
    runs: Sequence[TokenRun],
    states: Mapping[int, RequestState],
    charge_output: Callable[[str, int], None],
) -> bool:
    """Append all runs to the logs of their requests, or append none and return False.

    Args:
        worker: name of the worker that generated the tokens.
        runs: the tokens of each sequence.
        states: all requests.
        charge_output: called with each tenant and its number of tokens.
    """
    found = [states.get(run.request) for run in runs]
    known = [state for state in found if state is not None]
    if len(known) < len(runs) or not all(map(_is_next, known, [worker] * len(runs), runs)):
        return False
    counts = Counter[str]()
    for state, run in zip(known, runs, strict=True):
        state.token_log.answers[run.choice].extend(run.tokens)
        counts[state.request.tenant] += len(run.tokens)
    for tenant, count in counts.items():
        charge_output(tenant, count)
    return True


def _is_next(state: RequestState, worker: str, run: TokenRun) -> bool:
    """Return whether a run of tokens changes nothing but the token log."""
    here, log = state.running, state.token_log
    return (
        here is not None
        and here.started
        and (here.worker, here.attempt) == (worker, run.attempt)
        and run.choice < len(log.answers)
        and not log.finished[run.choice]
        and len(log.answers[run.choice]) == run.position
    )
