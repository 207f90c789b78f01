import asyncio

import pytest

from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes
from penstock.protos.worker_pb2 import TokenLogprobs
from penstock.router.requests.best_of import BestOfRanker
from penstock.router.requests.request_output import RequestOutput
from penstock.router.requests.response_stream import ResponseStream
from penstock.router.routing.events import Finish
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
PIECES = TokenBytes(TOKENIZER)


async def test_nothing_is_delivered_after_a_stop_string() -> None:
    cuts: list[tuple[int, int]] = []
    stream = ResponseStream(100, lambda requests: None)
    stream.add_request(1, 0)
    text = IncrementalDetokenizer(PIECES, StopOptions(stop=("b",)))
    output = RequestOutput(stream, 0, [text], frozenset(), lambda *cut: cuts.append(cut))
    tokens = TOKENIZER.encode("a b c d", add_special_tokens=False).ids
    for position, token in enumerate([*tokens, 5]):
        output.deliver(0, position, token, Finish.NONE, None)
    stream.request_ended(1, None)
    (whole,) = [each async for each in stream]
    assert whole.text == "a "
    assert (whole.finish, whole.stop) == ("stop", "b")
    assert cuts == [(0, len(whole.tokens))]
    assert len(whole.tokens) == len(whole.logprobs) < len(tokens)


async def test_plain_tokens_go_to_the_writer_and_others_to_the_queue() -> None:
    stream = ResponseStream(100, lambda requests: None)
    stream.add_request(1, 0)
    written: list[tuple[object, ...]] = []
    can_write = True

    def write(index: int, choice: int, position: int, token: int, text: str) -> bool:
        if can_write:
            written.append((index, choice, position, token, text))
        return can_write

    stream.writer = write
    text = IncrementalDetokenizer(PIECES, StopOptions())
    output = RequestOutput(stream, 0, [text], frozenset(), lambda *cut: None)
    tokens = TOKENIZER.encode("a b c d e", add_special_tokens=False).ids[:5]
    pieces = [PIECES.text_of(token) for token in tokens]
    # No reader waits yet, so the token is queued.
    output.deliver(0, 0, tokens[0], Finish.NONE, None)
    assert (await anext(stream)).position == 0
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    output.deliver(0, 1, tokens[1], Finish.NONE, None)
    assert written == [(0, 0, 1, tokens[1], pieces[1])]
    assert not reader.done()
    can_write = False
    output.deliver(0, 2, tokens[2], Finish.NONE, None)
    can_write = True
    # Token 2 is still unread, so token 3 is merged with it.
    output.deliver(0, 3, tokens[3], Finish.NONE, None)
    merged = await reader
    assert (merged.position, list(merged.tokens)) == (2, tokens[2:4])
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    output.deliver(0, 4, tokens[4], Finish.LENGTH, None)
    assert (await reader).finish == "length"
    assert len(written) == 1


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
            output.deliver(choice, position, choice, finish, TokenLogprobs(chosen=value))
    stream.request_ended(1, None)
    best, second = [each async for each in stream]
    # The choices are ranked by mean logprob: choice 1 (-0.7), then choice 3 (-1.9).
    assert (best.choice, list(best.tokens), best.finish) == (0, [1, 1, 1], "length")
    assert (second.choice, list(second.tokens)) == (1, [3, 3])
    assert [entry is not None for entry in best.logprobs] == [with_logprobs] * 3
