"""Broadcast of step plans: encoding, the shared-memory ring, gloo, and their failures."""

import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.protos import ranks_pb2
from penstock.workers.parallel import step_broadcast
from penstock.workers.parallel.collectives import RankLost
from penstock.workers.parallel.rendezvous import LocalStore
from penstock.workers.parallel.shm_ring import ShmRingReader, ShmRingWriter
from penstock.workers.parallel.step_broadcast import connect_plan_reader, connect_plan_writer
from penstock.workers.parallel.step_codec import (
    CAPTURE_GRAPHS,
    decode,
    encode,
    max_plan_bytes,
)
from penstock.workers.scheduling.sequence import Ints, StepPlan

NUMBERS = st.integers(-1, 2**31 - 1)


def ints(*shape: int) -> st.SearchStrategy[Ints]:
    return arrays.arrays(np.int32, shape, elements=NUMBERS)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    num, tokens, columns = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return StepPlan(
        number=draw(st.integers(1, 2**40)),
        rows=draw(ints(num)),
        tokens=draw(ints(tokens)),
        positions=draw(ints(tokens)),
        query_starts=draw(ints(num + 1)),
        context_lens=draw(ints(num)),
        # Not contiguous, like the block tables of a real plan.
        block_tables=draw(ints(num, columns + 2))[:, :columns],
        slots=draw(ints(tokens)),
        samples=draw(arrays.arrays(np.bool_, num)),
        copies=draw(ints(draw(st.integers(0, 3)), 2)),
        forks=draw(ints(draw(st.integers(0, 3)), 2)),
        scored=draw(ints(draw(st.integers(0, 3)))),
    )


@given(plans(), st.booleans())
def test_decoded_plan_equals_the_encoded_plan(plan: StepPlan, ahead: bool) -> None:
    found = decode(encode(plan, ahead))
    assert isinstance(found, StepPlan)
    assert (found.number, found.ahead) == (plan.number, ahead)
    for name in StepPlan.__slots__:
        if name not in ("number", "ahead"):
            np.testing.assert_array_equal(getattr(found, name), getattr(plan, name))
            assert getattr(found, name).dtype == getattr(plan, name).dtype
            assert getattr(found, name).flags.writeable, "compiled kernels require it"


def test_order_to_capture_graphs_is_one_constant_message() -> None:
    assert ranks_pb2.Order(capture=ranks_pb2.Capture()).SerializeToString() == CAPTURE_GRAPHS
    assert isinstance(decode(CAPTURE_GRAPHS), ranks_pb2.Capture)


def test_largest_plan_fits_into_max_plan_bytes() -> None:
    sequences, tokens, columns = 7, 20, 11
    pairs = np.full((sequences, 2), -1, np.int32)
    full = np.full(tokens, -1, np.int32)
    plan = StepPlan(
        number=2**62,
        rows=full[:sequences],
        tokens=full,
        positions=full,
        query_starts=np.full(sequences + 1, -1, np.int32),
        context_lens=full[:sequences],
        block_tables=np.full((sequences, columns), -1, np.int32),
        slots=full,
        samples=np.ones(sequences, np.bool_),
        copies=pairs,
        forks=pairs,
        scored=full,
    )
    assert len(encode(plan)) <= max_plan_bytes(sequences, tokens, columns)


def make_ring(num_readers: int, seconds: float = 20.0) -> tuple[ShmRingWriter, list[ShmRingReader]]:
    writer = ShmRingWriter(num_readers, 4, 64, seconds)
    readers = [
        ShmRingReader(writer.path, writer.shape, reader, lambda: True)
        for reader in range(num_readers)
    ]
    writer.close()
    return writer, readers


def test_every_reader_receives_all_messages_in_order() -> None:
    writer, readers = make_ring(3)
    messages = [os.urandom(n % 65) for n in range(200)]
    with ThreadPoolExecutor(3) as threads:
        reading = [threads.submit(lambda one: [one.read() for _ in messages], r) for r in readers]
        for message in messages:
            writer.write(message)
        for found in reading:
            assert found.result() == messages


def test_ring_counters_wrap_around() -> None:
    writer, readers = make_ring(2)
    start = (1 << 32) - 3
    writer._number = start
    writer._ring.count_written(start)
    for reader in readers:
        reader._number = start
        writer._ring.count_read(reader._reader, start)
    for number in range(8):
        writer.write(bytes([number]))
        assert [reader.read() for reader in readers] == [bytes([number])] * 2


def test_writer_raises_if_a_reader_falls_behind() -> None:
    writer, (reader, _) = make_ring(2, seconds=0.05)
    for number in range(4):
        writer.write(bytes([number]))
        reader.read()
    with pytest.raises(RankLost, match="has not read its next step plan"):
        writer.write(b"one too many")


def test_oversized_message_is_refused() -> None:
    writer, _ = make_ring(1)
    with pytest.raises(ValueError, match=r"65 bytes, but .* at most 64"):
        writer.write(bytes(65))


@pytest.mark.process
def test_reader_raises_after_the_writer_process_is_killed() -> None:
    code = (
        "import sys\n"
        "from penstock.workers.parallel.shm_ring import ShmRingWriter\n"
        "writer = ShmRingWriter(1, 4, 64, 20.0)\n"
        "print(writer.path, flush=True)\n"
        "sys.stdin.readline()\n"
        "writer.write(b'a plan')\n"
        "sys.stdin.readline()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    path = writer.stdout.readline().decode().strip()
    reader = ShmRingReader(path, (1, 4, 64), 0, step_broadcast._liveness_check(writer.pid))
    writer.stdin.write(b"\n")
    writer.stdin.flush()
    assert reader.read() == b"a plan"
    writer.kill()
    with pytest.raises(RankLost, match="rank 0 has exited"):
        reader.read()
    writer.communicate()


@pytest.mark.parametrize("remote", [(), (2,), (1, 2)])
def test_plans_reach_ranks_on_any_node(remote: tuple[int, ...]) -> None:
    store = LocalStore()
    messages = [b"one", os.urandom(5000), b"three", b""]

    def read(rank: int) -> list[bytes]:
        node = f"node {rank}" if rank in remote else "near"
        reader = connect_plan_reader(store, rank, 3, node, "127.0.0.1")
        return [reader.read() for _ in messages]

    with ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(read, rank) for rank in (1, 2)]
        writer = connect_plan_writer(store, 3, 5000, "near", "127.0.0.1", 20.0)
        for message in messages[:-1]:
            writer.write(message)
        writer.end()
        for found in reading:
            assert found.result() == messages


def test_a_reader_of_shared_memory_keeps_its_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank may still be connecting to it."""

    class FakeCommunicator:
        pass

    made: list[weakref.ref[FakeCommunicator]] = []

    def connect(*_: object) -> FakeCommunicator:
        communicator = FakeCommunicator()
        made.append(weakref.ref(communicator))
        return communicator

    monkeypatch.setattr(step_broadcast, "connect_hosts", connect)
    store = LocalStore()
    store.set("node 2", "far")
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(connect_plan_reader, store, 1, 3, "near", "127.0.0.1")
        writer = connect_plan_writer(store, 3, 64, "near", "127.0.0.1", 20.0)
        reader = reading.result()
    del reading
    gc.collect()
    assert [each() is not None for each in made] == [True, True]
    del reader, writer
    gc.collect()
    assert [each() for each in made] == [None, None]
