import pytest

from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes
from penstock.protos.worker_pb2 import TokenLogprobs
from penstock.router.errors import Code, ServingError
from penstock.router.requests.response_stream import (
    BestOfRanker,
    ClientDisconnectedError,
    Delta,
    RequestOutput,
    ResponseStream,
)
from penstock.router.routing.events import Deliver, Finish
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
PIECES = TokenBytes(TOKENIZER)


def delta(position: int, size: int = 1, index: int = 0, finish: str = "") -> Delta:
    tokens = list(range(position, position + size))
    text = "".join(map(str, tokens))
    return Delta(index, 0, position, tokens, text, [None] * size, finish)


async def test_unread_deltas_are_merged() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(100, cancelled.extend)
    stream.add_request(1, seed=3)
    stream.add_request(2, seed=4)
    for position in range(3):
        stream.push(delta(position))
    stream.push(delta(0, index=1))
    stream.push(delta(3, finish="stop"))
    stream.request_ended(1, None)
    stream.request_ended(2, None)
    deltas = [each async for each in stream]
    assert [(each.index, each.position, list(each.tokens), each.text) for each in deltas] == [
        (0, 0, [0, 1, 2], "012"),
        (1, 0, [0], "0"),
        (0, 3, [3], "3"),
    ]
    assert deltas[-1].finish == "stop"
    assert stream.seeds == [3, 4]
    stream.close()
    assert cancelled == []


async def test_unread_deltas_are_delivered_before_an_error() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(100, cancelled.extend)
    stream.add_request(1, 0)
    stream.add_request(2, 0)
    stream.push(delta(0))
    stream.request_ended(1, ServingError(Code.INTERNAL, "broken"))
    assert cancelled == [2]  # one failed request ends the whole call: request 2 is cancelled
    assert (await anext(stream)).position == 0
    with pytest.raises(ServingError, match="broken"):
        await anext(stream)


async def test_call_ends_if_too_many_tokens_are_unread() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(10, cancelled.extend)
    stream.add_request(1, 0)
    stream.push(delta(0, size=10))
    await anext(stream)
    for position in range(10):
        stream.push(delta(position))
    assert cancelled == []
    stream.push(delta(10))
    assert cancelled == [1]
    await anext(stream)
    with pytest.raises(ServingError, match="too slowly"):
        await anext(stream)


async def test_closing_cancels_the_requests_once() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(10, cancelled.extend)
    stream.add_request(1, 0)
    stream.close()
    stream.close()
    assert cancelled == [1]
    with pytest.raises(ClientDisconnectedError):
        await anext(stream)


async def test_nothing_is_delivered_after_a_stop_string() -> None:
    cuts: list[tuple[int, int]] = []
    stream = ResponseStream(100, lambda requests: None)
    stream.add_request(1, 0)
    text = IncrementalDetokenizer(PIECES, StopOptions(stop=("b",)))
    output = RequestOutput(stream, 0, [text], frozenset(), lambda *cut: cuts.append(cut))
    tokens = TOKENIZER.encode("a b c d", add_special_tokens=False).ids
    output.deliver(Deliver(1, 0, 0, tokens[:1], [None], Finish.NONE))
    output.deliver(Deliver(1, 0, 1, tokens[1:], [None] * (len(tokens) - 1), Finish.LENGTH))
    output.deliver(Deliver(1, 0, len(tokens), [5], [None], Finish.NONE))
    stream.request_ended(1, None)
    (whole,) = [each async for each in stream]
    assert whole.text == "a "
    assert (whole.finish, whole.stop) == ("stop", "b")
    assert cuts == [(0, len(whole.tokens))]
    assert len(whole.tokens) == len(whole.logprobs) < len(tokens)


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_likeliest_choices_are_delivered_once_all_have_ended(with_logprobs: bool) -> None:
    stream = ResponseStream(2, lambda requests: None)
    stream.add_request(1, 0)
    texts = [IncrementalDetokenizer(PIECES, StopOptions()) for _ in range(4)]
    ranking = BestOfRanker(4, 2, with_logprobs)
    output = RequestOutput(stream, 0, texts, frozenset(), lambda *cut: None, ranking)
    chosen_logprobs = {0: [-3.0, -1.0], 1: [-1.0, -0.5, -0.6], 2: [-5.0], 3: [-1.9, -1.9]}
    for choice, values in chosen_logprobs.items():
        assert not stream._unread
        for position, value in enumerate(values):
            finish = Finish.LENGTH if position == len(values) - 1 else Finish.NONE
            logprobs = [TokenLogprobs(chosen=value)]
            output.deliver(Deliver(1, choice, position, [choice], logprobs, finish))
    stream.request_ended(1, None)
    best, second = [each async for each in stream]
    # Ranked by mean logprob: -0.7 for choice 1, then -1.9 for choice 3.
    assert (best.choice, list(best.tokens), best.finish) == (0, [1, 1, 1], "length")
    assert (second.choice, list(second.tokens)) == (1, [3, 3])
    assert [entry is not None for entry in best.logprobs] == [with_logprobs] * 3
