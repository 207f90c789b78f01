"""The replies of one call to `Generate`, written to the call's gRPC stream."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

import grpc.aio

from penstock.protos import inference_pb2 as pb
from penstock.router.api.grpc_codec import prompt_replies, to_reply
from penstock.router.errors import Code, ServingError
from penstock.router.requests.request import GenerationRequest
from penstock.router.requests.response_stream import (
    MAX_MERGED_TOKENS,
    Delta,
    ResponseStream,
    slices_of,
)
from penstock.router.requests.slices import Slices


class ReplyStream:
    """Writes the deltas of a call as replies.

    A token that only adds text is written without a task switch: the first part of gRPC's `write`
    runs immediately, and the rest runs when gRPC is ready for the next message. gRPC allows one
    write at a time. Before each of its own writes, the task that reads the deltas therefore waits
    until such a write has ended.

    If the client reads nothing for too long, the call fails and its unread tokens are dropped. gRPC
    cannot reset a single call of a connection. The task therefore waits for its last write, and
    sends the status when the client reads again.

    Args:
        deltas: the answers of the call, which has one request.
        generation: the request.
        echo_prompt: whether to send the prompt's tokens with the first reply.
        context: the call.
        write_seconds: longest time of one write.
    """

    def __init__(
        self,
        deltas: ResponseStream,
        generation: GenerationRequest,
        echo_prompt: bool,
        context: grpc.aio.ServicerContext,
        write_seconds: float,
    ) -> None:
        self._write_seconds = write_seconds
        self._deltas = deltas
        self._generation = generation
        self._context = context
        self._echo = generation.prompt if echo_prompt else ()
        self._num_tokens = sum(len(known.tokens) for known in generation.resume_from.values())
        self._num_open = generation.sampling.n
        (self._seed,) = deltas.seeds
        self._slices = Slices()
        # One message is reused for all tokens: creating a message takes twice as long.
        self._token_reply = pb.GenerateReply(
            request_id=generation.request_id, seed=self._seed, tokens=(0,)
        )
        self._reply_tokens = self._token_reply.tokens
        # The write of a token that is in progress, if any.
        self._write: Coroutine[asyncio.Future[None], None, None] | None = None
        self._unread_error: ServingError | None = None  # set if the client has read nothing
        # Future for which this write waits.
        self._written: asyncio.Future[None] | None = None

    async def send(self) -> None:
        """Write replies until all choices have ended."""
        has_begun = False
        try:
            async for delta in self._deltas:
                await self._finish_write()
                if delta.tokens and not has_begun:
                    has_begun = True
                    await self._send_prompt_logprobs()
                for each in slices_of(delta, MAX_MERGED_TOKENS):
                    await self._write_reply(self._reply(each))
                    await self._slices.pause()
                if has_begun:
                    self._deltas.writer = self._write_token
        finally:
            self._deltas.writer = None
            await self._finish_write()

    async def _send_prompt_logprobs(self) -> None:
        for reply in prompt_replies(self._deltas.prompt_logprobs.get(0, ())):
            reply.request_id = self._generation.request_id
            await self._write_reply(reply)
            await self._slices.pause()

    async def _write_reply(self, reply: pb.GenerateReply) -> None:
        with self._time_limit():
            await self._context.write(reply)

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Fail the call if the body of this context takes longer than `write_seconds`.

        Raises:
            ServingError: the body took longer.
        """
        timer = asyncio.get_running_loop().call_later(self._write_seconds, self._fail_unread)
        try:
            yield
        finally:
            timer.cancel()
        if self._unread_error is not None:
            raise self._unread_error

    def _fail_unread(self) -> None:
        reason = f"the answer was read too slowly: nothing was read for {self._write_seconds:g} s"
        self._unread_error = ServingError(Code.OVERLOADED, reason)
        self._deltas.fail(self._unread_error)
        self._deltas.drop_unread()

    def _reply(self, delta: Delta) -> pb.GenerateReply:
        self._num_tokens += len(delta.tokens)
        reply = to_reply(delta)
        reply.request_id = self._generation.request_id
        reply.seed = self._seed
        if self._echo:
            reply.prompt_tokens.extend(self._echo)
            self._echo = ()
        self._num_open -= bool(delta.finish)
        if not self._num_open:
            reply.usage.prompt_tokens = len(self._generation.prompt)
            reply.usage.completion_tokens = self._num_tokens
            reply.usage.cached_prompt_tokens = self._deltas.num_cached.get(0, 0)
        return reply

    def _write_token(self, index: int, choice: int, position: int, token: int, text: str) -> bool:
        """Write a token immediately, unless a write is in progress (a `TokenWriter`)."""
        if self._write is not None:
            return False
        self._num_tokens += 1
        reply = self._token_reply
        reply.choice = choice
        reply.position = position
        self._reply_tokens[0] = token
        reply.text = text
        self._write = self._context.write(reply)
        self._continue_write()
        return True

    def _continue_write(self, _: asyncio.Future[None] | None = None) -> None:
        """Run the write until it waits for a future, or until it ends."""
        assert self._write is not None
        try:
            self._written = self._write.send(None)
            self._written.add_done_callback(self._continue_write)
            return
        except StopIteration:
            pass
        except asyncio.CancelledError:  # gRPC cancels the write if the client has disconnected
            self._deltas.close()
        # An error of one call must not end the worker's stream, which serves all calls.
        except Exception as error:
            self._deltas.fail(error)
        self._write = self._written = None

    async def _finish_write(self) -> None:
        if self._written is None:
            return
        with self._time_limit():
            while self._written is not None:
                await asyncio.wait((self._written,))
