"""Session: waiting Steps for a slow router are merged; too large a backlog ends the stream."""

from collections.abc import Iterator

import grpc

from penstock.protos import worker_pb2 as wire
from penstock.workers.service.session import (
    MAX_CACHE_BYTES_WAITING,
    MAX_MESSAGES_WAITING,
    MAX_TOKENS_WAITING,
    Session,
)


def make_session() -> Session:
    return Session(3, wire.Hello(router="r"))


def step(*tokens: int, queued: int = 0, logprobs: bool = False) -> wire.ToRouter:
    made = wire.Step(token=tokens, request=[1] * len(tokens), load=wire.Load(queued=queued))
    if logprobs:
        for row in range(len(tokens)):
            made.logprobs.add(row=row, chosen=-1.0)
    return wire.ToRouter(step=made)


async def read_all(session: Session) -> list[wire.ToRouter]:
    messages = []
    while (message := await session.next(0.001)) is not None:
        messages.append(message)
    return messages


async def test_messages_are_numbered_in_order() -> None:
    session = make_session()
    session.put(wire.ToRouter(welcome=wire.Welcome()))
    session.put(wire.ToRouter(heartbeat=wire.Heartbeat()))
    first = await read_all(session)
    session.put(wire.ToRouter(heartbeat=wire.Heartbeat()))
    assert [message.number for message in first + await read_all(session)] == [1, 2, 3]


async def test_waiting_steps_are_merged_without_reordering_messages() -> None:
    session = make_session()
    session.put(step(5, 6, queued=9, logprobs=True))
    session.put(step(7, queued=4))
    session.put(step(8, queued=0, logprobs=True))
    session.put(wire.ToRouter(yielded=wire.Yielded(request=1)))
    session.put(step(9))
    merged, yielded, last = await read_all(session)
    assert list(merged.step.token) == [5, 6, 7, 8]
    assert [entry.row for entry in merged.step.logprobs] == [0, 1, 3]
    assert merged.step.load.queued == 0
    assert yielded.HasField("yielded")
    assert list(last.step.token) == [9]


async def test_merged_steps_keep_all_preemptions() -> None:
    session = make_session()
    for request in (1, 2, 1):
        message = step(7)
        message.step.preempted.append(request)
        session.put(message)
    (merged,) = await read_all(session)
    assert list(merged.step.preempted) == [1, 2, 1]


async def test_merged_steps_keep_all_numbers_of_cached_tokens() -> None:
    session = make_session()
    for request in (1, 2):
        message = step(7)
        message.step.cached.add(request=request, attempt=1, tokens=16 * request)
        session.put(message)
    (merged,) = await read_all(session)
    assert [(each.request, each.tokens) for each in merged.step.cached] == [(1, 16), (2, 32)]


async def test_step_of_a_beam_search_is_not_merged_and_not_limited() -> None:
    session = make_session()
    session.put(step(1))
    session.put(step(*range(MAX_TOKENS_WAITING + 1)), no_merge=True)
    session.put(step(*range(MAX_TOKENS_WAITING + 1)), no_merge=True)
    session.put(step(2))
    session.put(step(3))
    assert session.stream_end is None
    lengths = [len(message.step.token) for message in await read_all(session)]
    assert lengths == [1, MAX_TOKENS_WAITING + 1, MAX_TOKENS_WAITING + 1, 2]


async def test_router_that_keeps_up_gets_every_step_separately() -> None:
    session = make_session()
    for token in range(3):
        session.put(step(token))
        assert [list(message.step.token) for message in await read_all(session)] == [[token]]


async def test_too_many_waiting_tokens_end_the_stream() -> None:
    session = make_session()
    session.put(step(*[1] * MAX_TOKENS_WAITING))
    assert session.stream_end is None
    session.put(step(1))
    assert session.stream_end is not None
    assert session.stream_end.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await read_all(session) == []


async def test_too_many_waiting_messages_end_the_stream() -> None:
    session = make_session()
    for _ in range(MAX_MESSAGES_WAITING):
        session.put(wire.ToRouter(rejected=wire.Rejected()))
    assert session.stream_end is None
    session.put(wire.ToRouter(rejected=wire.Rejected()))
    assert session.stream_end is not None


async def test_first_reason_for_the_end_of_a_stream_is_kept() -> None:
    session = make_session()
    session.end(grpc.StatusCode.ABORTED, "first")
    session.end(grpc.StatusCode.INTERNAL, "second")
    assert session.stream_end is not None
    assert session.stream_end.reason == "first"


def cached(first: int, *changes: list[int]) -> wire.ToRouter:
    """Return a Step with changes that store these blocks."""
    events = wire.CacheEvents(incarnation="i", first=first)
    for blocks in changes:
        events.changes.add(stored=blocks)
    return wire.ToRouter(step=wire.Step(cache=events))


async def test_cache_events_of_merged_steps_follow_each_other() -> None:
    session = make_session()
    session.put(step(5))
    session.put(cached(3, [1, 2]))
    session.put(step(6, queued=2))
    session.put(cached(4, [3], [4]))
    (merged,) = await read_all(session)
    assert merged.step.load.queued == 2
    assert list(merged.step.token) == [5, 6]
    assert merged.step.cache.first == 3
    assert merged.step.cache.incarnation == "i"
    assert [list(each.stored) for each in merged.step.cache.changes] == [[1, 2], [3], [4]]


async def test_steps_without_cache_events_have_none_after_a_merge() -> None:
    session = make_session()
    session.put(step(5))
    session.put(step(6))
    (merged,) = await read_all(session)
    assert not merged.step.HasField("cache")


async def test_cache_events_for_a_slow_router_are_bounded_and_leave_a_gap() -> None:
    session = make_session()
    many = list(range(1 << 12))
    for number in range(1000):
        session.put(cached(number, many))
    (merged,) = await read_all(session)
    assert session.stream_end is None
    cache = merged.step.cache
    assert cache.ByteSize() <= MAX_CACHE_BYTES_WAITING
    assert cache.first > 0  # the router expects number 0, so the router detects the gap
    assert cache.first + len(cache.changes) == 1000


async def test_snapshot_that_waits_is_known_until_it_is_read() -> None:
    session = make_session()
    session.put(step(1))
    session.put_snapshot(iter([wire.CacheSnapshot(last=True)]))
    assert session.has_waiting_snapshot
    assert len(await read_all(session)) == 2
    assert not session.has_waiting_snapshot


async def test_chunks_of_a_snapshot_are_made_when_they_are_read_and_stay_together() -> None:
    made: list[int] = []

    def chunks() -> Iterator[wire.CacheSnapshot]:
        for number in range(3):
            made.append(number)
            yield wire.CacheSnapshot(chunk=number, last=number == 2)

    session = make_session()
    session.put(step(1))
    session.put_snapshot(chunks())
    session.put(step(2))
    assert not made
    found = []
    for count in (0, 1, 2, 3, 3):
        message = await session.next(0.001)
        assert message is not None
        found.append((message.number, message.WhichOneof("body"), message.cache_snapshot.chunk))
        assert len(made) == count
        session.put(step(3))  # merged into the Step after the snapshot
    chunk = "cache_snapshot"
    assert found == [(1, "step", 0), (2, chunk, 0), (3, chunk, 1), (4, chunk, 2), (5, "step", 0)]
