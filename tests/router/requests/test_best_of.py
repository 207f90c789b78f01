"""Memory of ranked choices: what a ranker keeps, and when it is freed."""

import weakref
from typing import Any

from penstock.common.sampling_params import SamplingParams
from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes
from penstock.router.observability.explanations import Explanations
from penstock.router.observability.request_metrics import RequestMetrics
from penstock.router.requests.best_of import BestOfRanker
from penstock.router.requests.open_requests import OpenRequests
from penstock.router.requests.request_output import RequestOutput
from penstock.router.requests.response_stream import Delta, ResponseStream
from penstock.router.routing import events as ev
from tests.support.served_router import until
from tests.support.tokenizers import byte_level


class Entry:
    """Stands for a message with the log probability of one token."""

    def __init__(self, chosen: float) -> None:
        self.chosen = chosen


Entries = weakref.WeakSet[Entry]


def add(ranker: BestOfRanker, entries: Entries, num_tokens: int, num_choices: int) -> list[Delta]:
    """Add tokens of all choices; the last choice is the likeliest. Return the ranker's answers."""
    found: list[Delta] = []
    for position in range(num_tokens):
        finish = "length" if position == num_tokens - 1 else ""
        for choice in range(num_choices):
            entry: Any = Entry(choice - 10.0)
            entries.add(entry)
            found += ranker.add(Delta(0, choice, position, (5,), "x", (entry,), finish))
    return found


def test_ranker_keeps_no_logprobs_that_are_not_returned() -> None:
    entries: Entries = weakref.WeakSet()
    ranker = BestOfRanker(3, 2, with_logprobs=False)
    best, second = add(ranker, entries, 4, 3)
    assert len(entries) == 0
    assert (best.choice, second.choice) == (0, 1)
    assert list(best.logprobs) == [None] * 4


def test_ranker_frees_the_answers_that_it_has_not_returned_in_parts() -> None:
    entries: Entries = weakref.WeakSet()
    ranker = BestOfRanker(3, 1, with_logprobs=True)
    (best,) = add(ranker, entries, 4, 3)
    left = [len(entries)]
    while ranker.free(3):
        left.append(len(entries))
    assert left == [12, 9, 8, 5]
    assert len(entries) == 4
    assert [entry.chosen for entry in best.logprobs if entry is not None] == [-8.0] * 4


async def test_choices_of_a_cancelled_request_are_freed_in_later_callbacks() -> None:
    entries: Entries = weakref.WeakSet()
    requests = OpenRequests(RequestMetrics({}), Explanations({}, "cost"))
    ranker = BestOfRanker(2, 1, with_logprobs=True)
    pieces = TokenBytes(byte_level())
    texts = [IncrementalDetokenizer(pieces, StopOptions()) for _ in range(2)]
    stream = ResponseStream(100, lambda numbers: None)
    output = RequestOutput(stream, 0, texts, frozenset(), lambda *cut: None, ranker)
    requests.open(ev.Request(1, [7], SamplingParams()), output, 0.0)
    add(ranker, entries, 1000, 1)
    del ranker, output
    assert requests.cancel(1, 0.0)
    assert len(entries) == 1000
    await until(lambda: len(entries) == 0)
