"""Replies of one call: order, flow control and errors of the writes."""

import asyncio
from collections import deque

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.protos import inference_pb2 as pb
from penstock.router.api.grpc_replies import ReplyStream
from penstock.router.errors import ServingError
from penstock.router.requests.request import GenerationRequest
from penstock.router.requests.response_stream import (
    ClientDisconnectedError,
    Delta,
    ResponseStream,
)
from tests.support.served_router import until


class Context:
    """A fake gRPC call, whose writes complete when the test decides."""

    def __init__(self) -> None:
        self.replies: list[pb.GenerateReply] = []
        self.is_slow = False
        self.blocked: deque[asyncio.Future[None]] = deque()
        self.num_in_progress = 0

    async def write(self, reply: pb.GenerateReply) -> None:
        assert not self.num_in_progress, "gRPC allows one write at a time"
        self.replies.append(pb.GenerateReply.FromString(reply.SerializeToString()))
        if self.is_slow:
            self.num_in_progress += 1
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.blocked.append(future)
            try:
                await future
            finally:
                self.num_in_progress -= 1

    def tokens(self) -> list[int]:
        return [token for reply in self.replies for token in reply.tokens]


class Call:
    """A call with one request, and the task that writes its replies."""

    def __init__(self, write_seconds: float = 600.0) -> None:
        self.context = Context()
        self.cancelled: list[int] = []
        self.stream = ResponseStream(100, self.cancelled.extend)
        self.stream.add_request(1, seed=3)
        request = GenerationRequest([1, 2], SamplingParams(n=1), request_id="abc")
        replies = ReplyStream(self.stream, request, False, self.context, write_seconds)
        self.task = asyncio.create_task(replies.send())

    async def deliver(self, position: int) -> bool:
        """Deliver a token as `RequestOutput` does; return whether it was written immediately."""
        write, text = self.stream.idle_writer, f" {position}"
        at_once = write is not None and write(0, 0, position, position, text)
        if not at_once:
            self.stream.push(Delta(0, 0, position, (position,), text, (None,)))
        await settle()
        return at_once

    async def end(self, position: int) -> None:
        self.stream.push(Delta(0, 0, position, (position,), "", (None,), "length"))
        self.stream.request_ended(1, None)
        await settle()


async def settle() -> None:
    """Run all tasks and callbacks until each of them waits or has ended."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tokens_after_the_first_are_written_at_once_and_in_order() -> None:
    call = Call()
    await settle()
    assert [await call.deliver(position) for position in range(4)] == [False, True, True, True]
    await call.end(4)
    await call.task
    assert call.context.tokens() == [0, 1, 2, 3, 4]
    for position, reply in enumerate(call.context.replies):
        assert (reply.position, reply.request_id, reply.seed) == (position, "abc", 3)
        assert reply.text == ("" if position == 4 else f" {position}")
    assert call.context.replies[-1].finish_reason == "length"
    assert call.context.replies[-1].usage.completion_tokens == 5


async def test_tokens_queue_and_merge_while_a_write_is_in_progress() -> None:
    call = Call()
    await settle()
    await call.deliver(0)
    call.context.is_slow = True
    assert await call.deliver(1)
    for position in (2, 3, 4):
        assert not await call.deliver(position)
    assert call.context.tokens() == [0, 1]
    call.context.is_slow = False
    call.context.blocked.popleft().set_result(None)
    await settle()
    assert call.context.tokens() == [0, 1, 2, 3, 4]
    assert len(call.context.replies) < 5
    assert await call.deliver(5)
    await call.end(6)
    await call.task
    assert call.context.tokens() == list(range(7))


async def test_failed_write_ends_the_call_and_cancels_the_request() -> None:
    call = Call()
    await settle()
    await call.deliver(0)
    call.context.is_slow = True
    await call.deliver(1)
    call.context.blocked.popleft().set_exception(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await call.task
    assert call.cancelled == [1]


async def test_write_to_a_client_that_left_closes_the_stream() -> None:
    call = Call()
    await settle()
    await call.deliver(0)
    call.context.is_slow = True
    await call.deliver(1)
    call.context.blocked.popleft().cancel()
    with pytest.raises(ClientDisconnectedError):
        await call.task
    assert call.cancelled == [1]


async def test_task_ends_only_after_the_write_in_progress() -> None:
    call = Call()
    await settle()
    await call.deliver(0)
    call.context.is_slow = True
    await call.deliver(1)
    call.stream.fail(RuntimeError("deadline"))
    await settle()
    assert not call.task.done()
    call.context.blocked.popleft().set_result(None)
    with pytest.raises(RuntimeError, match="deadline"):
        await call.task


@pytest.mark.parametrize("num_later", [0, 5])
async def test_client_that_reads_nothing_loses_its_unread_tokens(num_later: int) -> None:
    """The write that blocks is that of a token if more tokens follow, else that of the end."""
    call = Call(write_seconds=0.01)
    await settle()
    await call.deliver(0)
    call.context.is_slow = True
    await call.deliver(1)
    for position in range(2, 2 + num_later):
        await call.deliver(position)
    if not num_later:
        await call.end(2)
    await until(lambda: call.stream.has_failed)
    assert call.cancelled == [1] * bool(num_later)
    assert not call.task.done()  # gRPC needs the status after the write in progress
    call.context.blocked.popleft().set_result(None)
    with pytest.raises(ServingError, match=r"nothing was read for 0\.01 s"):
        await call.task
    assert call.context.tokens() == [0, 1]
