"""Destinations to which prefill workers connect early: which, how many, and when."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.worker_load import NO_LOAD
from penstock.router.routing.events import (
    Command,
    RoleChanged,
    Tick,
    WorkerInfo,
    WorkerLost,
    WorkerUp,
)
from penstock.router.routing.transfer_peers import (
    MAX_EARLY_PEERS,
    ConnectPeers,
    TransferEndpoint,
    choose_destinations,
)
from penstock.router.routing.worker_view import WorkerView
from tests.support.router_harness import Router
from tests.support.router_world import info_of


def worker(name: str, role: str, incarnation: str = "1", **changes: object) -> WorkerInfo:
    endpoint = TransferEndpoint(name, incarnation, "address", "secret")
    return info_of(name, role, incarnation, **{"transfer": endpoint, **changes})


def view(info: WorkerInfo) -> WorkerView:
    return WorkerView(info, NO_LOAD, 0.0, float("-inf"))


def chosen(*infos: WorkerInfo) -> dict[str, set[str]]:
    found = choose_destinations(map(view, infos))
    return {name: {each.worker for each in peers} for name, peers in found.items()}


def sent(commands: list[Command]) -> dict[str, list[tuple[str, str]]]:
    return {
        command.worker: sorted((each.worker, each.incarnation) for each in command.destinations)
        for command in commands
        if isinstance(command, ConnectPeers)
    }


def test_prefill_workers_get_all_decode_workers_of_a_small_cluster() -> None:
    infos = [worker(name, "prefill") for name in "pq"] + [worker(name, "decode") for name in "de"]
    assert chosen(*infos) == {"p": {"d", "e"}, "q": {"d", "e"}, "d": set(), "e": set()}


def test_only_workers_of_one_layout_and_with_an_endpoint_are_connected() -> None:
    infos = [
        worker("p", "prefill"),
        worker("d", "decode"),
        worker("m", "mixed"),
        worker("other", "decode", layout="L2"),
        worker("old", "decode", transfer=None),
    ]
    assert chosen(*infos) == {"p": {"d", "m"}, "d": set(), "m": set(), "other": set()}


@given(st.integers(0, 60), st.integers(0, 60), st.randoms(use_true_random=False))
def test_connections_are_bounded_on_both_sides_and_independent_of_the_order(
    num_sources: int, num_destinations: int, random: object
) -> None:
    infos = [worker(f"p{number}", "prefill") for number in range(num_sources)]
    infos += [worker(f"d{number}", "decode") for number in range(num_destinations)]
    found = chosen(*infos)
    assert all(len(peers) <= MAX_EARLY_PEERS for peers in found.values())
    incoming = Counter(name for peers in found.values() for name in peers)
    assert all(count <= MAX_EARLY_PEERS for count in incoming.values())
    total = min(num_sources * min(MAX_EARLY_PEERS, num_destinations),
                num_destinations * min(MAX_EARLY_PEERS, num_sources))  # fmt: skip
    assert sum(incoming.values()) >= total // 2, "free connections are used"
    random.shuffle(infos)  # type: ignore[attr-defined]
    assert chosen(*infos) == found


def test_loss_of_one_of_many_workers_changes_few_lists() -> None:
    infos = [worker(f"p{number}", "prefill") for number in range(20)]
    infos += [worker(f"d{number}", "decode") for number in range(40)]
    before, after = chosen(*infos), chosen(*infos[:-1])
    unchanged = [name for name, peers in after.items() if peers == before[name]]
    assert len(unchanged) >= 45


def test_lists_are_sent_at_the_next_tick_and_only_if_they_changed() -> None:
    router = Router(worker("p", "prefill"), worker("d", "decode"))
    assert sent(router(Tick())) == {"p": [("d", "1")]}
    assert sent(router(Tick())) == {}
    router(WorkerUp(worker("e", "decode")))
    assert sent(router(Tick())) == {"p": [("d", "1"), ("e", "1")]}


def test_first_list_of_a_stream_is_not_sent_if_it_is_empty() -> None:
    """A router that has just started may not know the destinations of a worker yet."""
    router = Router(worker("p", "prefill"))
    assert sent(router(Tick())) == {}
    router(WorkerUp(worker("d", "decode")))
    assert sent(router(Tick())) == {"p": [("d", "1")]}


def test_worker_that_reconnects_gets_its_list_again() -> None:
    router = Router(worker("p", "prefill"), worker("d", "decode"))
    router(Tick())
    router(WorkerLost("p"))
    assert sent(router(Tick())) == {}
    router(WorkerUp(worker("p", "prefill")))
    assert sent(router(Tick())) == {"p": [("d", "1")]}


def test_restart_and_loss_of_a_destination_change_the_list() -> None:
    router = Router(worker("p", "prefill"), worker("d", "decode"))
    router(Tick())
    router(WorkerLost("d"))
    assert sent(router(Tick())) == {"p": []}
    router(WorkerUp(worker("d", "decode", "2")))
    assert sent(router(Tick())) == {"p": [("d", "2")]}


def test_change_of_a_role_changes_the_lists() -> None:
    router = Router(worker("p", "prefill"), worker("d", "decode"), worker("e", "decode"))
    router(Tick())
    router(RoleChanged("e", "prefill"))
    assert sent(router(Tick())) == {"p": [("d", "1")], "e": [("d", "1")]}
    router(RoleChanged("e", "decode"))
    assert sent(router(Tick())) == {"p": [("d", "1"), ("e", "1")], "e": []}


def test_nothing_is_sent_to_workers_that_report_no_endpoint() -> None:
    infos = worker("p", "prefill", transfer=None), worker("d", "decode", transfer=None)
    router = Router(*infos)
    assert sent(router(Tick())) == {}
