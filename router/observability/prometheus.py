"""The metrics that Prometheus scrapes; docs/operations.md tells what each is good for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.router.observability.request_metrics import RequestMetrics
from penstock.router.observability.snapshot import (
    DOWN,
    ClusterState,
    PoolScaling,
    PoolState,
    WorkerState,
    WorkerStats,
)
from penstock.router.routing.placement.disaggregation import ALL_DECISIONS

Samples = Iterable[tuple[Sequence[str], float]]
HistogramSample = tuple[
    Sequence[float], Sequence[int], float
]  # bounds, counts between them, the sum


def all_metrics(state: ClusterState, metrics: RequestMetrics) -> Iterator[Metric]:
    """All of them: of the cluster as it is, and what the router counts."""
    yield from pool_metrics(state.pools)
    yield from scaling_metrics(state.scaling.pools)
    yield gauge(
        "penstock_router_up",
        "1 while the router answers the supervisor, 0 while it should be there and does not.",
        ["router"],
        (([each.router], each.state != DOWN) for each in state.routers),
    )
    yield from worker_metrics(state.workers)
    reported = [(each.worker, each.numbers) for each in state.workers if each.numbers is not None]
    yield from worker_stats_metrics(reported)
    yield from router_metrics(state, metrics)


def pool_metrics(pools: Sequence[PoolState]) -> Iterator[Metric]:
    yield gauge(
        "penstock_requests_waiting",
        "Requests that wait for a worker of the pool, at the router or there.",
        ["pool"],
        (([each.pool], each.waiting) for each in pools),
    )
    yield gauge(
        "penstock_tokens_waiting",
        "Prompt tokens that wait to be computed in the pool.",
        ["pool"],
        (([each.pool], each.waiting_tokens) for each in pools),
    )
    yield gauge(
        "penstock_workers_ready",
        "Workers of the pool that take new work.",
        ["pool"],
        (([each.pool], each.ready) for each in pools),
    )


def scaling_metrics(pools: Sequence[PoolScaling]) -> Iterator[Metric]:
    yield gauge(
        "penstock_workers_desired",
        "Workers that the pool should have.",
        ["pool"],
        (([each.pool], each.desired) for each in pools),
    )
    yield gauge(
        "penstock_workers_pending",
        "Workers of the pool that were asked for and do not serve yet.",
        ["pool"],
        (([each.pool], each.pending) for each in pools),
    )
    yield gauge(
        "penstock_workers_given_up",
        "Workers of the pool that could not be started, and are tried again later.",
        ["pool"],
        (([each.pool], each.given_up) for each in pools),
    )
    yield gauge(
        "penstock_workers_required",
        "Workers that the pool's load asks for, by what asks: desired follows the larger, within "
        "bounds.",
        ["pool", "term"],
        (([each.pool, term], value) for each in pools for term, value in each.terms.items()),
    )


def worker_metrics(workers: Sequence[WorkerState]) -> Iterator[Metric]:
    yield gauge(
        "penstock_worker_up",
        "1 while the worker is heard, 0 while it should be there and is not.",
        ["worker"],
        (([each.worker], each.up) for each in workers),
    )
    yield gauge(
        "penstock_requests_running",
        "Sequences that the worker runs.",
        ["worker", "role"],
        (([each.worker, each.role], each.numbers.load.running) for each in workers if each.numbers),
    )


def worker_stats_metrics(workers: Sequence[tuple[str, WorkerStats]]) -> Iterator[Metric]:
    """What only a worker that is heard can tell."""
    yield gauge(
        "penstock_kv_blocks",
        "Blocks of the worker's KV memory by what they are: they sum up to all there are.",
        ["worker", "state"],
        (([name, kind], count) for name, each in workers for kind, count in each.blocks.items()),
    )
    yield gauge(
        "penstock_kv_waste_ratio",
        "Share of the used KV blocks' slots that hold nothing.",
        ["worker"],
        (([name], each.kv_waste) for name, each in workers),
    )
    yield gauge(
        "penstock_expert_imbalance_ratio",
        "Choices of a mixture's busiest expert over those of its mean one, of late.",
        ["worker"],
        (
            ([name], each.load.expert_imbalance)
            for name, each in workers
            if each.load.expert_imbalance  # of models without experts there is nothing to tell
        ),
    )
    counters: Sequence[tuple[str, str, Callable[[WorkerStats], int]]] = (
        ("prompt_tokens", "Prompt tokens taken up.", lambda each: each.prompt_tokens),
        (
            "prefix_hit_tokens",
            "Prompt tokens whose KV was in the prefix cache.",
            lambda each: each.load.prompt_tokens_cached,
        ),
        (
            "preemptions",
            "Sequences put back into the queue for want of KV blocks.",
            lambda each: each.load.preemptions,
        ),
    )
    for name, about, number in counters:
        yield counter(
            f"penstock_{name}",
            about,
            ["worker"],
            (([worker], number(each)) for worker, each in workers),
        )
    yield histogram(
        "penstock_step_seconds",
        "Time of the engine's steps.",
        ["worker"],
        (
            ([name], (each.steps.bounds, each.steps.counts, each.steps.seconds))
            for name, each in workers
        ),
    )


def router_metrics(state: ClusterState, metrics: RequestMetrics) -> Iterator[Metric]:
    """What the router has counted of its own requests."""
    histograms = (
        ("time_to_first_token_seconds", "From a request to its first token.", metrics.first_token),
        (
            "time_per_output_token_seconds",
            "Mean time between the tokens of an answer, after its first.",
            metrics.per_token,
        ),
        (
            "inter_token_seconds",
            "Time from each token of an answer to the next.",
            metrics.between_tokens,
        ),
        ("request_seconds", "From a request to the end of its answer.", metrics.request),
        ("queue_seconds", "From a request to its going to a worker.", metrics.queue),
        ("prefill_seconds", "From there to its first token.", metrics.prefill),
        ("decode_seconds", "From its first token to its last.", metrics.decode),
        ("prompt_length_tokens", "Length of prompts that were answered.", metrics.prompt_lengths),
        ("answer_length_tokens", "Length of answers.", metrics.answer_lengths),
        ("kv_transfer_seconds", "From asking for KV blocks to their arrival.", metrics.kv_transfer),
    )
    for name, about, each in histograms:
        yield histogram(
            f"penstock_{name}", about, [], [([], (each.bounds, each.counts, each.total))]
        )
    yield counter(
        "penstock_kv_transfer_bytes", "Bytes of KV blocks.", [], [([], metrics.kv_transfer_bytes)]
    )
    yield counter(
        "penstock_kv_transfers_failed",
        "KV transfers that did not arrive; their prompts were computed again.",
        [],
        [([], state.kv_transfers_failed)],
    )
    yield counter(
        "penstock_prefill_placements",
        "Prompts by where they were to be computed, apart on a prefill worker or together with "
        "their answer, and what weighed most.",
        ["where", "reason"],
        ((str(each).split(": "), state.placed.get(str(each), 0)) for each in ALL_DECISIONS),
    )
    yield gauge(
        "penstock_kv_transfer_fixed_seconds",
        "Expected time of any KV transfer, beside the time of its bytes.",
        [],
        [([], state.kv_transfer_cost.fixed_seconds)],
    )
    yield gauge(
        "penstock_kv_transfer_bytes_per_second",
        "Expected bandwidth of KV transfers.",
        [],
        [([], state.kv_transfer_cost.bytes_per_second)],
    )
    yield counter(
        "penstock_failovers",
        "Requests begun again elsewhere because their worker was lost.",
        [],
        [([], state.failovers)],
    )
    yield counter(
        "penstock_requests_finished",
        "Requests by how they ended.",
        ["reason"],
        (([reason], count) for reason, count in metrics.finished.items()),
    )
    yield counter(
        "penstock_generated_tokens",
        "Tokens of answers by whose key asked; a key is told by its place in the list of keys.",
        ["tenant"],
        (([name], count) for name, count in state.generated.items()),
    )
    yield counter(
        "penstock_prompt_tokens_by_tenant",
        "Prompt tokens of requests that were taken, by whose key asked.",
        ["tenant"],
        (([name], count) for name, count in state.prompt_tokens_by_tenant.items()),
    )


def gauge(name: str, about: str, labels: Sequence[str], samples: Samples) -> Metric:
    metric = GaugeMetricFamily(name, about, labels=labels)
    for values, value in samples:
        metric.add_metric(values, value)
    return metric


def counter(name: str, about: str, labels: Sequence[str], samples: Samples) -> Metric:
    metric = CounterMetricFamily(name, about, labels=labels)
    for values, value in samples:
        metric.add_metric(values, value)
    return metric


def histogram(
    name: str,
    about: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], HistogramSample]],
) -> Metric:
    metric = HistogramMetricFamily(name, about, labels=labels)
    for values, (bounds, counts, total) in samples:
        ends = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        metric.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), total)
    return metric
