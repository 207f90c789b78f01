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


async def test_what_waits_is_joined() -> None:
    gone: list[int] = []
    answers = ResponseStream(100, gone.extend)
    answers.add_request(1, seed=3)
    answers.add_request(2, seed=4)
    for position in range(3):
        answers.push(delta(position))
    answers.push(delta(0, index=1))
    answers.push(delta(3, finish="stop"))
    answers.request_ended(1, None)
    answers.request_ended(2, None)
    taken = [each async for each in answers]
    assert [(each.index, each.position, list(each.tokens), each.text) for each in taken] == [
        (0, 0, [0, 1, 2], "012"),
        (1, 0, [0], "0"),
        (0, 3, [3], "3"),
    ]
    assert taken[-1].finish == "stop"
    assert answers.seeds == [3, 4]
    answers.close()
    assert gone == []


async def test_the_reader_gets_what_is_there_before_an_error() -> None:
    gone: list[int] = []
    answers = ResponseStream(100, gone.extend)
    answers.add_request(1, 0)
    answers.add_request(2, 0)
    answers.push(delta(0))
    answers.request_ended(1, ServingError(Code.INTERNAL, "broken"))
    assert gone == [2]  # one of them fails: the call is over
    assert (await anext(answers)).position == 0
    with pytest.raises(ServingError, match="broken"):
        await anext(answers)


async def test_too_much_unread_ends_the_call() -> None:
    gone: list[int] = []
    answers = ResponseStream(10, gone.extend)
    answers.add_request(1, 0)
    answers.push(delta(0, size=10))
    await anext(answers)
    for position in range(10):
        answers.push(delta(position))
    assert gone == []
    answers.push(delta(10))
    assert gone == [1]
    await anext(answers)
    with pytest.raises(ServingError, match="too slowly"):
        await anext(answers)


async def test_closing_lets_go_once() -> None:
    gone: list[int] = []
    answers = ResponseStream(10, gone.extend)
    answers.add_request(1, 0)
    answers.close()
    answers.close()
    assert gone == [1]
    with pytest.raises(ClientDisconnectedError):
        await anext(answers)


async def test_after_a_stop_string_nothing_is_delivered() -> None:
    cuts: list[tuple[int, int]] = []
    answers = ResponseStream(100, lambda requests: None)
    answers.add_request(1, 0)
    text = IncrementalDetokenizer(PIECES, StopOptions(stop=("b",)))
    track = RequestOutput(answers, 0, [text], frozenset(), lambda *cut: cuts.append(cut))
    tokens = TOKENIZER.encode("a b c d", add_special_tokens=False).ids
    track.deliver(Deliver(1, 0, 0, tokens[:1], [None], Finish.NONE))
    track.deliver(Deliver(1, 0, 1, tokens[1:], [None] * (len(tokens) - 1), Finish.LENGTH))
    track.deliver(Deliver(1, 0, len(tokens), [5], [None], Finish.NONE))
    answers.request_ended(1, None)
    (whole,) = [each async for each in answers]
    assert whole.text == "a "
    assert (whole.finish, whole.stop) == ("stop", "b")
    assert cuts == [(0, len(whole.tokens))]
    assert len(whole.tokens) == len(whole.logprobs) < len(tokens)


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_the_likeliest_choices_are_given_when_all_have_ended(with_logprobs: bool) -> None:
    answers = ResponseStream(2, lambda requests: None)
    answers.add_request(1, 0)
    texts = [IncrementalDetokenizer(PIECES, StopOptions()) for _ in range(4)]
    ranking = BestOfRanker(4, 2, with_logprobs)
    track = RequestOutput(answers, 0, texts, frozenset(), lambda *cut: None, ranking)
    chances = {0: [-3.0, -1.0], 1: [-1.0, -0.5, -0.6], 2: [-5.0], 3: [-1.9, -1.9]}
    for choice, values in chances.items():
        assert not answers._unread
        for position, value in enumerate(values):
            finish = Finish.LENGTH if position == len(values) - 1 else Finish.NONE
            logprobs = [TokenLogprobs(chosen=value)]
            track.deliver(Deliver(1, choice, position, [choice], logprobs, finish))
    answers.request_ended(1, None)
    best, second = [each async for each in answers]
    # By their means: the sums would put the third, which is short, before the first.
    assert (best.choice, list(best.tokens), best.finish) == (0, [1, 1, 1], "length")
    assert (second.choice, list(second.tokens)) == (1, [3, 3])
    assert [entry is not None for entry in best.logprobs] == [with_logprobs] * 3
