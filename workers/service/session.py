"""One router's stream at the worker: sequences held for the router, and messages to be sent."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from penstock.protos import worker_pb2 as wire
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.service.codec import SequenceKey, merge_steps

MAX_TOKENS_WAITING = 1 << 15  # maximum number of tokens in a Step that waits for a slow reader
MAX_MESSAGES_WAITING = 1 << 12
MAX_CACHE_BYTES_WAITING = 1 << 20  # larger cache events of a waiting Step are dropped


@dataclass(slots=True)
class HeldSequence:
    """A sequence, or its lease, that this worker holds for a router."""

    source: tuple[str, str] | None = None  # (worker, incarnation) that sends the KV
    epoch: int = 0  # epoch of the incoming KV transfer, once blocks are reserved
    kv_len: int = 0  # number of positions in the lease, once the sequence has yielded
    sends: list[OutgoingTransfer] = field(default_factory=list)  # KV transfers that read the lease


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Reason why a stream ends, as status code and text."""

    code: grpc.StatusCode
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.code.name})"


class Session:
    """State of one router's stream. Only the event loop may use it."""

    def __init__(self, session_id: int, hello: wire.Hello) -> None:
        self.session_id = session_id
        self.router = hello.router
        self.wants_cache_events = hello.cache_events
        self.held: dict[SequenceKey, HeldSequence] = {}
        self.stream_end: StreamEnd | None = None
        self.last_load: wire.Load | None = None  # the last load sent to the router
        # An iterator makes the chunks of a snapshot when they are sent.
        self._waiting: deque[wire.ToRouter | Iterator[wire.CacheSnapshot]] = deque()
        self._no_merge = False  # True: merge no Step into the newest waiting message
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._num_sent = 0

    def key(self, request: int, attempt: int) -> SequenceKey:
        return SequenceKey(self.session_id, request, attempt)

    @property
    def has_waiting_snapshot(self) -> bool:
        """True if a snapshot of the cached blocks waits for the router to read it."""
        return any(not isinstance(message, wire.ToRouter) for message in self._waiting)

    def put_snapshot(self, chunks: Iterator[wire.CacheSnapshot]) -> None:
        """Queue the chunks of a snapshot; the last one has `last`.

        Each chunk is made when it is sent, because making all of them takes long.
        """
        if self.stream_end is None:
            self._waiting.append(chunks)
            self._no_merge = False
            self._changed.set()

    def put(self, message: wire.ToRouter, no_merge: bool = False) -> None:
        """Queue a message. Waiting Steps are merged; too large a backlog ends the stream.

        Args:
            message: message to send.
            no_merge: do not merge this Step with other Steps, and do not apply the limit of tokens.
                Used for a Step with many tokens that become available at the same time.
        """
        if self.stream_end is not None:
            return
        last = self._waiting[-1] if self._waiting else None
        if (
            isinstance(last, wire.ToRouter)
            and last.HasField("step")
            and message.HasField("step")
            and not (no_merge or self._no_merge)
        ):
            merge_steps(last.step, message.step)
            _drop_excess_cache_events(last.step)
            message = last
        else:
            self._waiting.append(message)
        self._no_merge = no_merge
        newest = wire.Step() if no_merge else message.step
        num_tokens = len(newest.token) + sum(len(prompt.entries) for prompt in newest.prompts)
        if num_tokens > MAX_TOKENS_WAITING or len(self._waiting) > MAX_MESSAGES_WAITING:
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router reads too slowly")
        self._changed.set()

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream; later calls have no effect."""
        if self.stream_end is None:
            self.stream_end = StreamEnd(code, reason)
            self._ended.set()
        self._changed.set()

    async def ended(self) -> StreamEnd:
        """Wait until the stream has ended, even if a message is still being written."""
        await self._ended.wait()
        assert self.stream_end is not None
        return self.stream_end

    async def next(self, seconds: float) -> wire.ToRouter | None:
        """Return the next message to send, numbered in the order of sending.

        Return None after `seconds` without a message, or if the stream has ended.
        """
        if not self._waiting and self.stream_end is None:
            await self._wait(seconds)
        if self.stream_end is not None or not self._waiting:
            return None
        message = self._pop()
        self._num_sent += 1
        message.number = self._num_sent
        return message

    def _pop(self) -> wire.ToRouter:
        first = self._waiting[0]
        if isinstance(first, wire.ToRouter):
            self._waiting.popleft()
            return first
        chunk = next(first)
        if chunk.last:
            self._waiting.popleft()
        return wire.ToRouter(cache_snapshot=chunk)

    async def _wait(self, seconds: float) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


def _drop_excess_cache_events(step: wire.Step) -> None:
    """Drop the cache events of a Step if they are too large.

    The Step keeps the number of the next change. From this number, the router detects that changes
    are missing, even if no other change follows, and requests a snapshot.
    """
    cache = step.cache
    if cache.ByteSize() > MAX_CACHE_BYTES_WAITING:
        cache.first += len(cache.changes)
        cache.ClearField("changes")
