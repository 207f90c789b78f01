from dataclasses import replace

from penstock.common.sampling_params import SamplingParams
from penstock.router.routing.dispatcher import Dispatcher
from penstock.router.routing.events import (
    Finish,
    Rejected,
    Request,
    RequestArrived,
    Stepped,
    Submit,
    WorkerUp,
)
from penstock.router.routing.placement.prefix_knowledge import PrefixKnowledge
from penstock.router.routing.placement.recent_prompts import KEPT_SECONDS
from penstock.router.routing.placement.routing_strategies import policy_of
from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from tests.support.columns import NewToken, columns_of
from tests.support.router_world import info_of

BLOCK = info_of("a", "mixed").block_size
NUM_BLOCKS = 3


def request(number: int, *blocks: int) -> Request:
    prompt = [7] * (BLOCK * NUM_BLOCKS + 1)
    return Request(number, prompt, SamplingParams(), prompt_hashes={BLOCK: blocks})


def router() -> Dispatcher:
    dispatcher = Dispatcher(policy_of("cost"))
    for name in "ab":
        dispatcher.handle(WorkerUp(info_of(name, "mixed")), 0.0)
    # With one block in the index, the router knows that workers report their blocks.
    dispatcher.prefix_index.store("c", [99], START)
    return dispatcher


def placed(dispatcher: Dispatcher, arriving: Request, now: float = 0.0) -> str:
    (submit,) = dispatcher.handle(RequestArrived(arriving), now)
    assert isinstance(submit, Submit)
    return submit.worker


def test_request_goes_where_its_prefix_is_cached() -> None:
    dispatcher = router()
    dispatcher.prefix_index.store("b", [1, 2], START)
    assert placed(dispatcher, request(1, 1, 2, 3)) == "b"
    assert placed(dispatcher, request(2, 5, 6, 7)) == "a"


def test_equal_prompts_that_arrive_together_go_to_one_worker() -> None:
    dispatcher = router()
    first = placed(dispatcher, request(1, 1, 2, 3))
    assert placed(dispatcher, request(2, 1, 2, 3)) == first
    assert placed(dispatcher, request(3, 4, 5, 6)) != first


def test_placed_prompt_counts_until_its_worker_has_reported_the_blocks() -> None:
    dispatcher = router()
    assert placed(dispatcher, request(1, 1, 2, 3)) == "a"
    token = NewToken(1, 1, 0, 0, 50, Finish.LENGTH)
    dispatcher.handle(Stepped("a", columns_of([token])), 1.0)
    dispatcher.handle(Stepped("a", columns_of([])), 1.0)
    assert placed(dispatcher, request(2, 1, 2, 3), now=1.0 + KEPT_SECONDS / 2) == "a"
    # Until `late`, the worker reports no blocks, so the router assumes that they were dropped.
    late = 1.1 + KEPT_SECONDS
    knowledge = dispatcher._requests._prefixes
    dispatcher.handle(Stepped("a", columns_of([NewToken(2, 1, 0, 0, 50, Finish.LENGTH)])), 1.0)
    assert knowledge.cached_tokens(request(3, 1, 2, 3), late) == {}


def test_rejected_prompt_is_no_longer_expected_at_its_worker() -> None:
    dispatcher = router()
    assert placed(dispatcher, request(1, 1, 2, 3)) == "a"
    (submit,) = dispatcher.handle(Rejected("a", 1, 1, "full"), 0.0)
    assert isinstance(submit, Submit)
    assert submit.worker == "b"
    cached = dispatcher._requests._prefixes.cached_tokens(request(2, 1, 2, 3), 0.0)
    assert cached == {"b": NUM_BLOCKS * BLOCK}


def test_nothing_is_known_without_hashes_or_reports() -> None:
    knowledge = PrefixKnowledge(PrefixIndex())
    assert knowledge.cached_tokens(request(1, 1, 2, 3), 0.0) is None
    bare = Request(1, [7], SamplingParams())
    assert router()._requests._prefixes.cached_tokens(bare, 0.0) is None


def test_prompt_whose_logprobs_are_requested_is_computed_whole() -> None:
    dispatcher = router()
    dispatcher.prefix_index.store("b", [1, 2], START)
    scored = replace(request(1, 1, 2, 3), params=SamplingParams(prompt_logprobs=0))
    assert dispatcher._requests._prefixes.cached_tokens(scored, 0.0) == {}


def test_records_of_prompts_end_even_if_no_request_asks_for_cached_tokens() -> None:
    """A server may get only requests for the logprobs of prompts, which use no cached tokens."""
    knowledge = PrefixKnowledge(PrefixIndex())
    for number in range(1, 1001):
        now = 0.1 * number
        knowledge.placed(request(number, number), "a", BLOCK)
        knowledge.computed(number, now)
    assert len(knowledge._recent) <= KEPT_SECONDS / 0.1 + 2
