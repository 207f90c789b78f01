"""A client that goes on: whatever breaks, its reader sees one undisturbed answer."""

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
    """As a router answers: a token a reply, the choices in turn."""
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
    for turn in itertools.zip_longest(*left):
        replies += [reply for reply in turn if reply is not None]
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
    """A call that breaks after so many replies."""

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
    """A stub of a router whose calls break as told, one after the other; the last ones do not."""

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


def asked(**more: Any) -> pb.GenerateRequest:
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
def test_whatever_breaks_the_answer_is_whole(breaks: list[list[int]]) -> None:
    routers = [Router(each) for each in breaks]
    replies = asyncio.run(read(ResumingClient(routers), asked()))
    for choice, answer in enumerate(ANSWERS):
        own = [reply for reply in replies if reply.choice == choice]
        assert [token for reply in own for token in reply.tokens] == answer
        assert "".join(reply.text for reply in own) == "".join(f"{token} " for token in answer)
        assert [reply.finish_reason for reply in own if reply.finish_reason] == ["length"]
    assert [reply.usage.completion_tokens for reply in replies if reply.HasField("usage")] == [8]
    assert not any(reply.prompt_tokens for reply in replies), "nobody asked for them"
    for request in itertools.chain(*(router.requests for router in routers)):
        if request.resume_from:
            assert request.sampling.seed == SEED
            assert list(request.tokens.ids) == PROMPT


async def test_what_another_router_would_not_mend_is_told() -> None:
    class Refusing:
        def Generate(self, request: Any, metadata: Any = None) -> Call:
            return Call([], broken(grpc.StatusCode.INVALID_ARGUMENT))

    client = ResumingClient([Refusing(), Router([])])
    with pytest.raises(grpc.aio.AioRpcError):
        await read(client, asked())
    assert client.num_broken == 0


async def test_its_patience_ends() -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await read(ResumingClient([Router([0] * 1000)], timeout=0.0), asked())


async def test_answers_that_make_no_sense_are_told() -> None:
    gap = [reply_of(0, 0), reply_of(0, 2)]
    for replies in (gap, gap[:1]):

        class Odd:
            def Generate(self, request: Any, metadata: Any = None) -> Call:
                return Call(replies, None)  # noqa: B023

        with pytest.raises(BadAnswer):
            await read(ResumingClient([Odd()]), asked())


def test_what_comes_whole_is_asked_for_again() -> None:
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
