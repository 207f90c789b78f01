"""Appends the tokens of many quiet steps to the logs of their requests at once.

The dispatcher appends token by token, which would take a third of the time of a large simulation.
Tokens in the middle of an answer change nothing but the log, the tenant's charge and the client.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.simulator.world.messages import NewTokens
from penstock.router.routing.dispatcher import Dispatcher
from penstock.router.routing.events import Stepped
from penstock.router.routing.request_state import RequestState


class RunClient(Protocol):
    """A client that can take several tokens of one choice at once."""

    def deliver_run(self, position: int, num: int) -> None:
        """Take `num` tokens from the answer's position `position` on."""
        ...


class SteppedRuns(NamedTuple):
    """A worker's message about the quiet steps from `first` to before `end`."""

    worker: str
    news: NewTokens
    first: int
    end: int
    load: WorkerLoad | None
    cached: Sequence[tuple[int, int, int]] = ()  # as in `Stepped`

    def whole(self) -> Stepped:
        """Return the message with all tokens."""
        tokens = self.news.columns(self.first, self.end)
        return Stepped(self.worker, tokens, self.load, cached=self.cached)

    def last(self) -> Stepped:
        """Return the message with the tokens of the last step only."""
        return Stepped(self.worker, self.news.columns(self.end - 1, self.end), self.load)


def append_runs(
    runs: SteppedRuns, dispatcher: Dispatcher, clients: Mapping[int, RunClient]
) -> Stepped:
    """Append all steps but the last one; return the message that the dispatcher must still handle.

    If a token might change more than the log, append nothing and return the whole message.
    """
    if runs.cached:
        return runs.whole()
    placer, news, num = dispatcher._placer, runs.news, runs.end - runs.first - 1
    rows: list[tuple[RequestState, int, int]] = []  # state, choice and position of each row
    for request, attempt, choice, index in news.sequences():
        state = placer.states.get(request)
        if state is None or not _continues(state, runs.worker, attempt, choice, index + runs.first):
            return runs.whole()
        rows.append((state, choice, index + runs.first))
    charges = Counter[str]()
    columns = news.tokens[runs.first : runs.end - 1].T.tolist()
    for (state, choice, position), tokens in zip(rows, columns, strict=True):
        state.token_log.answers[choice].extend(tokens)
        charges[state.request.tenant] += num
        client = clients.get(state.request.id)
        if client is not None:
            client.deliver_run(position, num)
    for tenant, count in charges.items():
        placer._queue.charge_output(tenant, count)
    return runs.last()


def _continues(state: RequestState, worker: str, attempt: int, choice: int, position: int) -> bool:
    """Return whether a token at `position` only extends the log."""
    here, log = state.running, state.token_log
    return (
        here is not None
        and here.started
        and (here.worker, here.attempt) == (worker, attempt)
        and choice < len(log.answers)
        and not log.finished[choice]
        and len(log.answers[choice]) == position
    )
