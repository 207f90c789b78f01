"""The states of several routers as one: queues are summed, workers are counted once."""

from dataclasses import replace

from penstock.cluster.autoscaling.autoscaler import PoolInputs
from penstock.cluster.autoscaling.autoscaler_adapter import AutoscalerInputs
from penstock.cluster.autoscaling.pool_changes import Phase
from penstock.cluster.pools.aggregate import ClusterAggregator, router_states
from penstock.common.worker_load import WorkerLoad
from penstock.router.observability.snapshot import (
    ClusterState,
    PoolState,
    RouterState,
    Scaling,
    WorkerState,
    WorkerStats,
)

NUMBERS = WorkerStats(
    WorkerLoad(running=5, queued=1, queued_tokens=40, used_blocks=9, free_blocks=91),
    max_sequences=64,
    block_size=16,
)


def state_of(
    name: str, queued: int, tokens: int, prompts: int, connected: bool = True
) -> ClusterState:
    worker = WorkerState(
        "mixed-0", "mixed", "ready" if connected else "down", 2, NUMBERS if connected else None
    )
    pool = PoolState("mixed", 1, int(connected), 5, queued + 1, tokens + 40, queued, tokens)
    own = RouterState(name, "ready", streams=queued + 2, queued={"mixed": queued})
    return ClusterState(
        model="m",
        version="1",
        not_ready="" if connected else "no worker is ready",
        streams=queued + 2,
        waiting=queued,
        waiting_tokens=tokens,
        pools=[pool],
        workers=[worker],
        finished={},
        generated={},
        failovers=0,
        kv_transfers=0,
        kv_transfers_failed=0,
        kv_transfer_bytes=0,
        prompt_tokens=prompts,
        scaling=Scaling(),
        routers=[own],
    )


def test_queues_are_summed_and_workers_are_counted_once() -> None:
    aggregator = ClusterAggregator()
    found = aggregator.sum({"a": state_of("a", 3, 30, 100), "b": state_of("b", 4, 50, 200)})
    assert found is not None
    assert (found.streams, found.waiting, found.waiting_tokens) == (11, 7, 80)
    (pool,) = found.pools
    assert (pool.queued, pool.queued_tokens, pool.running, pool.ready) == (7, 80, 5, 1)
    (worker,) = found.workers
    assert (worker.requests, worker.numbers) == (4, NUMBERS)


def test_worker_is_ready_if_one_router_is_connected_to_it() -> None:
    states = {"a": state_of("a", 1, 10, 0, connected=False), "b": state_of("b", 0, 0, 0)}
    found = ClusterAggregator().sum(states)
    assert found is not None
    assert found.not_ready == ""
    assert found.workers[0].numbers == NUMBERS
    assert found.pools[0].ready == 1
    assert found.pools[0].queued == 1


def test_total_of_prompt_tokens_never_decreases() -> None:
    aggregator = ClusterAggregator()

    def total(a: int | None, b: int | None) -> int | None:
        states = {"a": a, "b": b}
        found = aggregator.sum(
            {
                name: None if tokens is None else state_of(name, 0, 0, tokens)
                for name, tokens in states.items()
            }
        )
        return None if found is None else found.prompt_tokens

    assert total(100, 200) == 300
    assert total(None, 250) == 350, "router a is down, its tokens still count"
    assert total(30, 250) == 380, "router a restarted, its total began at 0"
    assert total(40, 260) == 400
    assert total(None, None) is None


def test_autoscaler_inputs_are_equal_for_one_router_and_two() -> None:
    phases = {"mixed": {"mixed-0": Phase.SERVING}}
    one, two, one_inputs, two_inputs = (
        ClusterAggregator(),
        ClusterAggregator(),
        AutoscalerInputs(),
        AutoscalerInputs(),
    )
    pairs: list[tuple[PoolInputs, PoolInputs]] = []
    for now in (0.0, 2.0):
        tokens = int(100 * (now + 1))
        whole = one.sum({"a": state_of("a", 8, 90, tokens)})
        halves = {name: state_of(name, 4, 45, tokens // 2) for name in "ab"}
        summed = two.sum(halves)
        assert whole is not None
        assert summed is not None
        pairs.append(
            (
                one_inputs.pools(whole, phases, now)["mixed"],
                two_inputs.pools(summed, phases, now)["mixed"],
            )
        )
    assert all(first == second for first, second in pairs)


def test_router_states_have_all_routers_with_their_addresses() -> None:
    states = {"router-0": state_of("router-0", 2, 0, 0), "router-1": None}
    addresses = {"router-0": ("h:1", "h:2", "h:5"), "router-1": ("h:3", "h:4", "h:6")}
    first, second = router_states(states, addresses)
    assert (first.state, first.http, first.streams, dict(first.queued)) == (
        "ready",
        "h:1",
        4,
        {"mixed": 2},
    )
    assert second == RouterState("router-1", "down", "h:3", "h:4")
    # A router's state comes from its own report; reports about other routers are ignored.
    state = states["router-0"]
    assert state is not None
    stale = replace(second, state="ready")
    again = router_states({"router-0": replace(state, routers=[stale, *state.routers])}, addresses)
    assert again == [first]
