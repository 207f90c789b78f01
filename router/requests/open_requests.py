"""The requests that have not ended, with their outputs and metrics."""

from collections.abc import Mapping

from penstock.router.errors import Code, ServingError
from penstock.router.observability.event_log import client_safe_message, log_ended, log_submit
from penstock.router.observability.explanations import Explanations
from penstock.router.observability.request_metrics import FinishedRequest, RequestMetrics
from penstock.router.requests.best_of import RankerReleaser
from penstock.router.requests.request_output import RequestOutput
from penstock.router.routing import events as ev

CODES: Mapping[ev.Status, Code] = {
    ev.Status.DEADLINE: Code.DEADLINE,
    ev.Status.INVALID: Code.INVALID,
    ev.Status.OVERLOADED: Code.OVERLOADED,
    ev.Status.UNAVAILABLE: Code.UNAVAILABLE,
    ev.Status.INTERNAL: Code.INTERNAL,
}


class OpenRequests:
    """Delivers tokens, and the end of each choice, to the outputs of open requests.

    It also records the events of the requests.

    Args:
        metrics: totals of the router.
        explanations: the events of each request.
    """

    def __init__(self, metrics: RequestMetrics, explanations: Explanations) -> None:
        self._metrics = metrics
        self._explanations = explanations
        self._outputs: dict[int, RequestOutput] = {}
        self._releaser = RankerReleaser()

    def __len__(self) -> int:
        return len(self._outputs)

    def open(self, request: ev.Request, output: RequestOutput, now: float) -> None:
        """Add a request that was accepted."""
        self._outputs[request.id] = output
        self._metrics.opened(request, output.choices, now)
        self._explanations.opened(request, now)

    def observe(self, event: ev.Event, now: float) -> None:
        """Record an event before the dispatcher handles it."""
        self._explanations.observe(event, now)
        if type(event) is ev.Received:
            self._metrics.received(event, now)
        elif type(event) is ev.Stepped and event.preempted:
            self._metrics.preempted(event.preempted)

    def record(self, command: ev.WorkerCommand, now: float) -> None:
        """Record a command that is sent to a worker."""
        match command:
            case ev.Submit():
                self._metrics.submitted(command, now)
                self._explanations.submitted(command, now)
                log_submit(command)
            case ev.Send():
                self._metrics.sent(command, now)
                self._explanations.sent(command, now)

    def deliver(self, tokens: ev.TokenColumns, now: float) -> None:
        """Deliver the tokens of a step. This runs for every token: keep it fast."""
        outputs, logprobs = self._outputs, tokens.logprobs
        # Number of tokens by the delivery time of the previous token of the same choice.
        counts: dict[float, int] = {}
        for row, (request, _, choice, position, token, finish) in enumerate(tokens.rows()):
            output = outputs.get(request)
            if output is None:
                continue
            one = output.choices[choice]
            last, one.last = one.last, now
            one.position, one.finish = position, finish
            if last is None:
                one.first, one.first_position = now, position
                self._metrics.first_token_delivered(request, now)
            else:
                counts[last] = counts.get(last, 0) + 1
            output.deliver(choice, position, token, finish, logprobs.get(row))
        self._metrics.later_tokens_delivered(counts, now)

    def deliver_end(self, command: ev.DeliverEnd) -> None:
        """Deliver the end of a choice."""
        output = self._outputs.get(command.request)
        if output is not None:
            output.deliver_end(command)

    def deliver_prompt(self, command: ev.DeliverPrompt) -> None:
        """Deliver the prompt's data, such as its log probabilities."""
        output = self._outputs.get(command.request)
        if output is not None:
            output.deliver_prompt(command)

    def end(self, command: ev.EndRequest, now: float) -> None:
        """End a request. If the end is an error, the whole call of the request ends."""
        self._record_end(self._metrics.ended(command.request, command.status, now), now)
        output = self._remove(command.request)
        if output is None:
            return
        code, error = CODES.get(command.status), None
        if code is not None:
            message = client_safe_message(command.message)
            error = ServingError(code, message, None, command.retry_after)
        output.stream.request_ended(command.request, error)

    def cancel(self, request: int, now: float) -> bool:
        """Forget a request whose client has disconnected; return False if the request had ended."""
        if self._remove(request) is None:
            return False
        self._record_end(self._metrics.ended(request, ev.Status.CANCELLED, now), now)
        return True

    def _remove(self, request: int) -> RequestOutput | None:
        output = self._outputs.pop(request, None)
        if output is not None and output.ranker is not None:
            self._releaser.release(output.ranker)
        return output

    def _record_end(self, ended: FinishedRequest | None, now: float) -> None:
        self._explanations.ended(ended, now)
        log_ended(ended)

    def fail_all(self, error: ServingError) -> None:
        """End the calls of all requests with an error."""
        for output in list(self._outputs.values()):
            output.stream.fail(error)
