"""The object `response`, as JSON in fragments."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.common.sampling_params import SamplingParams
from penstock.router.api.openai.json_fragments import dumps
from penstock.router.errors import Code, ServingError
from penstock.router.requests.json_text import CHARS_PER_FRAGMENT

ERROR_CODES: Mapping[Code, str] = {
    Code.OVERLOADED: "rate_limit_exceeded",
    Code.INVALID: "invalid_prompt",
}
"""OpenAI's error code for some of our codes; the other codes become `server_error`."""

EMPTY = ("[]",)
"""The output of a response without items."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a response.

    Attributes:
        status: `in_progress`, `completed`, `incomplete`, `failed`, ...
        usage: the field `usage`; None while it is unknown.
        completed_at: seconds since 1970; None unless the response is completed.
        error: the error of a failed response.
    """

    status: str
    usage: Mapping[str, Any] | None = None
    completed_at: int | None = None
    error: ServingError | None = None


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The members of a response that do not change while it is generated.

    Attributes:
        id: id of the response.
        created_at: seconds since 1970.
        model: name of the model.
        sampling: the sampling parameters.
        shown: the fields of the body that the response repeats, as members of a JSON object.
        is_background: whether the response is generated in the background.
        is_stored: whether the response is to be stored.
    """

    id: str
    created_at: int
    model: str
    sampling: SamplingParams
    shown: str
    is_background: bool = False
    is_stored: bool = True

    def json(
        self,
        outcome: Outcome,
        output: Iterable[str] = EMPTY,
        keeps: Callable[[int], bool] | None = None,
    ) -> Iterator[str]:
        """Yield the response as JSON, in fragments.

        Args:
            outcome: the state of the response.
            output: the JSON array of the response's output items, in fragments.
            keeps: called with the size of the output in bytes; returns whether the response will be
                stored. By default, `is_stored` decides.
        """
        error = outcome.error
        details = {"reason": "max_output_tokens"} if outcome.status == "incomplete" else None
        members = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": outcome.completed_at,
            "status": outcome.status,
            "background": self.is_background,
            "error": None if error is None else error_object(error),
            "incomplete_details": details,
            "model": self.model,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
        }
        yield dumps(members)[:-1] + ","
        for start in range(0, len(self.shown), CHARS_PER_FRAGMENT):
            yield self.shown[start : start + CHARS_PER_FRAGMENT]
        yield ',"output":'
        size = 0
        for fragment in output:
            size += len(fragment.encode())
            yield fragment
        is_stored = self.is_stored if keeps is None else keeps(size)
        yield f',"usage":{dumps(outcome.usage)},"store":{dumps(is_stored)}}}'


def error_object(error: ServingError) -> Mapping[str, Any]:
    """Return the field `error` of a failed response."""
    code = ERROR_CODES.get(error.code, "server_error")
    return {"code": code, "message": error.message}
