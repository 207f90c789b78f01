"""`ResumingClient`: if calls break, the answer is still complete and repeats no token."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtests.bench import resuming_client
from penstock.loadtests.bench.resuming_client import BadAnswer, Progress, ResumingClient
from penstock.protos import inference_pb2 as pb

ANSWERS = [[10, 11, 12, 13, 14], [20, 21, 22]]
PROMPT = [7, 8, 9]
SEED = 2**64 - 9


def broken(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")


def answer_to(request: pb.GenerateRequest) -> list[pb.GenerateReply]:
    """Return the replies of a router: one token per reply, with the choices interleaved."""
    known = {each.choice: each for each in request.resume_from}
    replies: list[pb.GenerateReply] = []
    left: list[list[pb.GenerateReply]] = []
    for choice, answer in enumerate(ANSWERS):
        past = known.get(choice, pb.ResumeState())
        assert list(past.tokens) == answer[: len(past.tokens)]
        if past.finish_reason:
            assert len(past.tokens) == len(answer)
            replies.append(
                pb.GenerateReply(choice=choice, position=len(answer), finish_reason="length")
            )
            continue
        rest = range(len(past.tokens), len(answer))
        left.append([reply_of(choice, position) for position in rest])
    for group in itertools.zip_longest(*left):
        replies += [reply for reply in group if reply is not None]
    replies[-1].usage.completion_tokens = sum(map(len, ANSWERS))
    if request.echo_prompt_tokens:
        replies[0].prompt_tokens.extend(PROMPT)
    for reply in replies:
        reply.seed = SEED
    return replies


def reply_of(choice: int, position: int) -> pb.GenerateReply:
    answer = ANSWERS[choice]
    reply = pb.GenerateReply(choice=choice, position=position, tokens=[answer[position]])
    reply.text = f"{answer[position]} "
    reply.finish_reason = "length" if position + 1 == len(answer) else ""
    return reply


class Call:
    """A call that yields `replies`, then raises `error` if there is one."""

    def __init__(self, replies: Sequence[pb.GenerateReply], error: Exception | None) -> None:
        self._replies = replies
        self._error = error

    async def __aiter__(self) -> AsyncIterator[pb.GenerateReply]:
        for reply in self._replies:
            yield reply
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        pass


class Router:
    """A stub router: call `i` breaks after `breaks[i]` replies; later calls do not break."""

    def __init__(self, breaks: list[int]) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self._breaks = breaks

    def Generate(self, request: pb.GenerateRequest, metadata: Any = None) -> Call:
        self.requests.append(request)
        replies = answer_to(request)
        if not self._breaks:
            return Call(replies, None)
        after = self._breaks.pop(0)
        return Call(replies[:after], broken() if after < len(replies) else None)


def make_request(**more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling=pb.Sampling(n=2, temperature=1.0), **more)


async def read(client: ResumingClient, request: pb.GenerateRequest) -> list[pb.GenerateReply]:
    return [reply async for reply in client.generate(request)]


@pytest.fixture(autouse=True, scope="module")
def no_pause() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming_client, "PAUSE_SECONDS", 0.0)
        yield


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3))
@settings(deadline=None)
def test_answer_is_complete_whichever_calls_break(breaks: list[list[int]]) -> None:
    routers = [Router(each) for each in breaks]
    replies = asyncio.run(read(ResumingClient(routers), make_request()))
    for choice, answer in enumerate(ANSWERS):
        own = [reply for reply in replies if reply.choice == choice]
        assert [token for reply in own for token in reply.tokens] == answer
        assert "".join(reply.text for reply in own) == "".join(f"{token} " for token in answer)
        assert [reply.finish_reason for reply in own if reply.finish_reason] == ["length"]
    assert [reply.usage.completion_tokens for reply in replies if reply.HasField("usage")] == [8]
    assert not any(reply.prompt_tokens for reply in replies), (
        "the request did not ask for prompt tokens"
    )
    for request in itertools.chain(*(router.requests for router in routers)):
        if request.resume_from:
            assert request.sampling.seed == SEED
            assert list(request.tokens.ids) == PROMPT


async def test_error_that_a_retry_cannot_fix_is_raised() -> None:
    class Refusing:
        def Generate(self, request: Any, metadata: Any = None) -> Call:
            return Call([], broken(grpc.StatusCode.INVALID_ARGUMENT))

    client = ResumingClient([Refusing(), Router([])])
    with pytest.raises(grpc.aio.AioRpcError):
        await read(client, make_request())
    assert client.num_broken == 0


async def test_error_is_raised_after_the_timeout() -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await read(ResumingClient([Router([0] * 1000)], timeout=0.0), make_request())


async def test_answer_with_missing_positions_raises_bad_answer() -> None:
    gap = [reply_of(0, 0), reply_of(0, 2)]
    for replies in (gap, gap[:1]):

        class Incomplete:
            def Generate(self, request: Any, metadata: Any = None) -> Call:
                return Call(replies, None)  # noqa: B023

        with pytest.raises(BadAnswer):
            await read(ResumingClient([Incomplete()]), make_request())


def test_best_of_request_is_repeated_with_its_seed() -> None:
    request = pb.GenerateRequest(text="hi", sampling=pb.Sampling(n=2, best_of=3))
    progress = Progress(request)
    reply = pb.GenerateReply(choice=0, tokens=[5, 6], seed=4, finish_reason="stop")
    progress.add_reply(reply)
    rest = progress.remaining_request()
    assert not rest.resume_from
    assert rest.sampling.seed == 4
    again = pb.GenerateReply(choice=0, tokens=[5, 6], seed=4, finish_reason="stop", text="x")
    progress.add_reply(again)
    assert (list(again.tokens), again.text, again.finish_reason) == ([], "", "")
