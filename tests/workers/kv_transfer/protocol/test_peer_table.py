"""Connections to peers that are made early, evicted, closed or retried."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.kv_transfer.protocol.messages import MAX_PEERS, Peer
from penstock.workers.kv_transfer.protocol.peer_table import (
    MAX_EARLY_PEERS,
    MAX_RETRY_SECONDS,
    PeerTable,
)


@dataclass(eq=False)
class Connection:
    peer: Peer
    broken: str = ""
    idle: bool = True
    connected: bool = False
    closed: bool = False


def peer(name: str, incarnation: str = "1") -> Peer:
    return Peer(name, incarnation, "address", "secret")


def peers(count: int) -> list[Peer]:
    return [peer(f"w{number}") for number in range(count)]


class Worker:
    """A worker that executes the table's decisions and counts its open connections."""

    def __init__(self) -> None:
        self.table: PeerTable[Connection] = PeerTable()
        self.now = 0.0
        self.open: list[Connection] = []
        self.num_failures = 0

    def check(self) -> float | None:
        due = self.table.due(self.now)
        for connection, reason in due.closing:
            assert reason
            self.close(connection)
        self.num_failures += len(due.failures)
        for wanted in due.opening:
            self.add(wanted)
        return due.next_check

    def transfer(self, to: Peer) -> Connection | None:
        found = self.table.use(to)
        if found is None:
            has_slot, replaced = self.table.make_slot(to)
            if replaced is not None:
                self.close(replaced)
            found = self.add(to) if has_slot else None
        return found

    def add(self, to: Peer) -> Connection:
        connection = Connection(to)
        self.open.append(connection)
        self.table.add(connection)
        return connection

    def close(self, connection: Connection) -> None:
        connection.closed = True
        self.open.remove(connection)

    def names(self) -> list[str]:
        return [each.peer.worker for each in self.table.connections()]


def connected(worker: Worker) -> None:
    for connection in worker.open:
        connection.connected = True


def test_listed_peers_are_connected_once() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(3))
    assert worker.check() is None
    assert worker.names() == ["w0", "w1", "w2"]
    worker.check()
    worker.table.set_peers(2, peers(3))
    worker.check()
    assert len(worker.open) == 3


def test_transfer_uses_a_connection_that_is_still_in_the_making() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(1))
    worker.check()
    (early,) = worker.open
    assert not early.connected
    assert worker.transfer(peer("w0")) is early


def test_number_of_early_connections_is_bounded_over_all_routers() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(50))
    worker.table.set_peers(2, list(reversed(peers(50))))
    worker.check()
    assert len(worker.open) == MAX_EARLY_PEERS


def test_early_connection_evicts_none_and_a_transfer_evicts_the_oldest_idle_one() -> None:
    worker = Worker()
    for number in range(MAX_PEERS):
        worker.transfer(peer(f"used{number}"))
    worker.table.set_peers(1, peers(1))
    worker.check()
    assert len(worker.open) == MAX_PEERS
    assert "w0" not in worker.names()
    worker.open[0].idle = False
    assert worker.transfer(peer("another")) is not None
    assert "used0" in worker.names()
    assert "used1" not in worker.names()


def test_transfer_gets_no_slot_while_all_connections_are_busy() -> None:
    worker = Worker()
    for number in range(MAX_PEERS):
        found = worker.transfer(peer(f"used{number}"))
        assert found is not None
        found.idle = False
    assert worker.transfer(peer("another")) is None
    worker.open[3].idle = True
    assert worker.transfer(peer("another")) is not None


def test_unreachable_peer_is_tried_again_after_growing_delays() -> None:
    worker, starts = Worker(), []
    worker.table.set_peers(1, peers(1))
    for _ in range(12):
        then = worker.check()
        if worker.open:
            starts.append(worker.now)
            (connection,) = worker.open
            connection.broken = "UNAVAILABLE"
            worker.open.remove(connection)
            then = worker.check()
        assert then is not None
        worker.now = then
    delays = [later - earlier for earlier, later in pairwise(starts)]
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(delays) == MAX_RETRY_SECONDS
    assert worker.num_failures == len(starts)


def test_delay_starts_again_after_a_connection_was_made() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(1))
    for _ in range(5):
        worker.check()
        connected(worker)
        worker.check()
        (connection,) = worker.open
        connection.broken = "the destination closed the channel"
        worker.open.remove(connection)
        assert worker.check() == worker.now + 1.0
        worker.now += 1.0


def test_transfer_does_not_wait_for_the_delay() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(1))
    worker.table.failed(peer("w0"), "UNAVAILABLE", 0.0)
    assert worker.check() == 1.0
    assert worker.transfer(peer("w0")) is not None


def test_delisted_peer_is_closed_once_it_is_idle() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(2))
    worker.table.set_peers(2, peers(1))
    worker.check()
    worker.open[1].idle = False
    worker.table.set_peers(1, [])
    worker.check()
    assert worker.names() == ["w0", "w1"], "w0 is listed by another router, w1 is busy"
    worker.open[1].idle = True
    worker.check()
    assert worker.names() == ["w0"]


def test_end_of_a_routers_stream_closes_no_connection() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(2))
    worker.check()
    worker.table.forget(1)
    worker.check()
    assert worker.names() == ["w0", "w1"]


def test_next_stream_of_a_router_replaces_the_list_of_its_ended_stream() -> None:
    worker = Worker()
    worker.table.set_peers(1, peers(3))
    worker.table.set_peers(2, peers(1))
    worker.check()
    worker.transfer(peer("unlisted"))
    worker.table.forget(1)
    worker.table.set_peers(2, peers(1))
    worker.check()
    assert worker.names() == ["w0", "w1", "w2", "unlisted"], "the router may list them again"
    worker.table.set_peers(3, [peer("w1")])
    worker.check()
    assert worker.names() == ["w0", "w1", "unlisted"], "stream 2 still lists w0"


def test_restarted_peer_replaces_its_connection() -> None:
    worker = Worker()
    worker.table.set_peers(1, [peer("w0")])
    worker.table.set_peers(2, [peer("w0")])
    worker.check()
    worker.table.set_peers(2, [peer("w0", "2")])
    worker.check()
    assert [each.peer.incarnation for each in worker.open] == ["2"], "the newest list counts"


NAMES = st.integers(0, 30)
LISTS = st.lists(st.tuples(NAMES, st.integers(1, 2)), max_size=12)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(1, 3), LISTS),
        st.tuples(st.just("forget"), st.integers(1, 3), st.just([])),
        st.tuples(st.just("transfer"), NAMES, st.just([])),
        st.tuples(st.sampled_from(["break", "busy", "idle", "made"]), NAMES, st.just([])),
        st.tuples(st.just("wait"), st.integers(1, 90), st.just([])),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_connections_are_bounded_and_every_idle_listed_peer_is_connected_in_the_end(
    actions: list[tuple[str, int, list[tuple[int, int]]]],
) -> None:
    worker = Worker()
    for action, number, listed in actions:
        _act(worker, action, number, [peer(f"w{name}", str(inc)) for name, inc in listed])
        worker.check()
        open_now = [each for each in worker.open if not each.broken]
        assert len(open_now) <= MAX_PEERS
        assert all(not each.closed for each in worker.table.connections())
        names = worker.names()
        assert len(set(names)) == len(names)
        assert {id(each) for each in open_now} <= {id(e) for e in worker.table.connections()}
    for connection in list(worker.open):
        connection.idle, connection.connected = True, True
    # The first check removes broken connections. The second check connects these peers again.
    for _ in range(2):
        worker.check()
        worker.now += MAX_RETRY_SECONDS
    worker.check()
    reached = {each.peer for each in worker.table.connections() if not each.broken}
    missing = [each for each in worker.table.wanted() if each not in reached]
    assert not missing or len(worker.names()) == MAX_PEERS


def _act(worker: Worker, action: str, number: int, listed: list[Peer]) -> None:
    matching = [each for each in worker.open if each.peer.worker == f"w{number}"]
    changes: dict[str, Callable[[Connection], None]] = {
        "break": lambda each: setattr(each, "broken", "lost"),
        "busy": lambda each: setattr(each, "idle", False),
        "idle": lambda each: setattr(each, "idle", True),
        "made": lambda each: setattr(each, "connected", True),
    }
    match action:
        case "set":
            worker.table.set_peers(number, listed)
        case "forget":
            worker.table.forget(number)
        case "transfer":
            worker.transfer(peer(f"w{number}"))
        case "wait":
            worker.now += number
        case _:
            for connection in matching:
                changes[action](connection)
