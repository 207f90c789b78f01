"""A request output that discards its tokens; `OpenRequests` counts the tokens in `choices`."""

from typing import cast

from penstock.router.errors import ServingError
from penstock.router.observability.request_metrics import DeliveredTokens
from penstock.router.requests.request_output import RequestOutput


class SilentOutput:
    """A stand-in for a `RequestOutput` and its stream."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [DeliveredTokens() for _ in range(num_choices)]
        self.stream = self
        self.ranker = None

    def deliver(
        self, choice: int, position: int, token: int, finish: int, logprobs: object
    ) -> None:
        pass

    def request_ended(self, request: int, error: ServingError | None) -> None:
        pass


def silent_output(num_choices: int = 1) -> RequestOutput:
    return cast(RequestOutput, SilentOutput(num_choices))
