"""A client of `penstock.v1.Inference` that resumes its answers on another router.

    client = ResumingClient(stubs, metadata)
    async for reply in client.generate(request): ...

The replies are those of one uninterrupted call, even if several routers sent them.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from penstock.protos import inference_pb2 as pb

PAUSE_SECONDS = 0.2  # delay before each further attempt after all routers have failed


class BadAnswer(Exception):
    """Raised if a position was repeated or skipped, or if the call ended too early."""


class Progress:
    """The part of an answer that was received so far. Builds the request for the rest.

    If the request does not contain the prompt's token ids, the request asks the router to send the
    token ids with the first reply. A resumed request then has exactly the same prompt.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        sampling = request.sampling
        num_choices = sampling.n or 1
        self.tokens: list[list[int]] = [[] for _ in range(num_choices)]
        self.finishes = [""] * num_choices
        # Finish reason of each choice in the caller's `resume_from`; "" if the choice has none.
        self._past = [""] * num_choices
        for known in request.resume_from:
            self.tokens[known.choice] = list(known.tokens)
            self._past[known.choice] = known.finish_reason
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._wants_prompt = request.echo_prompt_tokens
        self._request.echo_prompt_tokens |= request.WhichOneof("prompt") != "tokens"
        # Beam search and best_of return the answer only at its end, so such requests start over.
        self._comes_whole = sampling.use_beam_search or sampling.best_of > num_choices
        self._has_begun = bool(request.resume_from)

    @property
    def is_over(self) -> bool:
        """True if every choice has received its finish reason."""
        return all(self.finishes)

    def add_reply(self, reply: pb.GenerateReply) -> None:
        """Record a reply, and clear the fields that the caller has already received.

        Raises BadAnswer.
        """
        answer = self.tokens[reply.choice]
        if self.finishes[reply.choice]:
            for name in ("tokens", "text", "logprobs", "finish_reason", "stop_reason"):
                reply.ClearField(name)
        elif reply.tokens and reply.position != len(answer):
            raise BadAnswer(
                f"expected the token at position {len(answer)}, received the token at position "
                f"{reply.position}"
            )
        answer.extend(reply.tokens)
        self.finishes[reply.choice] = self.finishes[reply.choice] or reply.finish_reason
        self._has_begun |= bool(reply.tokens)
        self._request.sampling.seed = reply.seed
        if reply.prompt_tokens:
            self._request.tokens.ids[:] = reply.prompt_tokens
            self._request.echo_prompt_tokens = False
            if not self._wants_prompt:
                reply.ClearField("prompt_tokens")

    def remaining_request(self) -> pb.GenerateRequest:
        """Return the request for the rest of the answer.

        The request is for the complete answer if no token was received, and always with beam search
        or `best_of`.
        """
        rest = pb.GenerateRequest()
        rest.CopyFrom(self._request)
        if not self._has_begun or self._comes_whole:
            return rest
        # Do not request the prompt logprobs again, because they arrived with the first token.
        rest.sampling.ClearField("prompt_logprobs")
        del rest.resume_from[:]
        for choice, tokens in enumerate(self.tokens):
            finish = self.finishes[choice] or self._past[choice]
            rest.resume_from.add(choice=choice, tokens=tokens, finish_reason=finish)
        return rest


class ResumingClient:
    """A client that sends a request to one of several routers and fails over to the next.

    Args:
        stubs: gRPC stubs of the routers. If there is only one router, it is retried.
        metadata: gRPC metadata of every call.
        timeout: a call fails after this many seconds without a reply from any router.
    """

    def __init__(
        self,
        stubs: Sequence[Any],
        metadata: Sequence[tuple[str, str]] = (),
        timeout: float = 30.0,
    ) -> None:
        self.num_broken = 0  # number of calls that broke and were retried
        self._stubs = stubs
        self._metadata = metadata
        self._timeout = timeout
        self._at = 0

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateReply]:
        """Yield the replies of one answer.

        Raises:
            grpc.RpcError: an error other than UNAVAILABLE, or `timeout` seconds without a reply.
            BadAnswer: the replies do not form one complete answer.
        """
        progress = Progress(request)
        num_misses, received_at = 0, time.monotonic()
        while not progress.is_over:
            call = self._stubs[self._at].Generate(
                progress.remaining_request(), metadata=self._metadata
            )
            try:
                async for reply in call:
                    num_misses, received_at = 0, time.monotonic()
                    progress.add_reply(reply)
                    yield reply
                if not progress.is_over:
                    raise BadAnswer("the server ended the call before the answer was complete")
            except grpc.RpcError as error:
                is_final = error.code() is not grpc.StatusCode.UNAVAILABLE
                if is_final or time.monotonic() - received_at > self._timeout:
                    raise
            finally:
                call.cancel()
            if not progress.is_over:
                self.num_broken += not num_misses
                num_misses += 1
                self._at = (self._at + 1) % len(self._stubs)
                if num_misses >= len(self._stubs):
                    await asyncio.sleep(PAUSE_SECONDS)
