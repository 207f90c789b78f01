"""The metrics that Prometheus scrapes; docs/operations.md describes each of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, TypeAlias

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
# A histogram: upper bounds of the buckets, values per bucket, and the sum of the values.
HistogramSample = tuple[Sequence[float], Sequence[int], float]
MetricFamily: TypeAlias = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

SAMPLES_PER_FRAGMENT = 128
"""Number of samples after which the next fragment of a metric begins; it takes about 1 ms."""


def all_metrics(state: ClusterState, metrics: RequestMetrics) -> Iterator[Metric]:
    """Return all metrics, in fragments: the state of the cluster and the totals of this router.

    Consecutive fragments with the same name belong to one metric. The totals of this router are
    read before the function returns, so that they match each other. Everything else comes from
    `state`.
    """
    return chain(list(router_metrics(state, metrics)), state_metrics(state))


def state_metrics(state: ClusterState) -> Iterator[Metric]:
    """Yield the metrics of the cluster, and the token counts of the tenants."""
    yield from pool_metrics(state.pools)
    yield from scaling_metrics(state.scaling.pools)
    yield from gauge(
        "penstock_router_up",
        "1 if the router responds to the supervisor, 0 if it should but does not.",
        ["router"],
        (([each.router], each.state != DOWN) for each in state.routers),
    )
    yield from worker_metrics(state.workers)
    reported = [(each.worker, each.numbers) for each in state.workers if each.numbers is not None]
    yield from worker_stats_metrics(reported)
    yield from tenant_metrics(state)


def pool_metrics(pools: Sequence[PoolState]) -> Iterator[Metric]:
    """Yield the metrics of each pool's queue and workers."""
    yield from gauge(
        "penstock_requests_waiting",
        "Number of requests that wait for the pool, at routers or at its workers.",
        ["pool"],
        (([each.pool], each.waiting) for each in pools),
    )
    yield from gauge(
        "penstock_tokens_waiting",
        "Number of queued prompt tokens that the pool must compute.",
        ["pool"],
        (([each.pool], each.waiting_tokens) for each in pools),
    )
    yield from gauge(
        "penstock_workers_ready",
        "Number of workers of the pool that accept requests.",
        ["pool"],
        (([each.pool], each.ready) for each in pools),
    )


def scaling_metrics(pools: Sequence[PoolScaling]) -> Iterator[Metric]:
    """Yield the autoscaling metrics of each pool."""
    yield from gauge(
        "penstock_workers_desired",
        "Number of workers that the pool should have.",
        ["pool"],
        (([each.pool], each.desired) for each in pools),
    )
    yield from gauge(
        "penstock_workers_pending",
        "Number of workers of the pool that are starting or restarting.",
        ["pool"],
        (([each.pool], each.pending) for each in pools),
    )
    yield from gauge(
        "penstock_workers_given_up",
        "Number of workers of the pool that failed to start and will be retried.",
        ["pool"],
        (([each.pool], each.given_up) for each in pools),
    )
    yield from gauge(
        "penstock_workers_required",
        "Number of workers that the pool's load requires, by scaling term; the desired number "
        "follows the largest term, within the pool's limits.",
        ["pool", "term"],
        (([each.pool, term], value) for each in pools for term, value in each.terms.items()),
    )


def worker_metrics(workers: Sequence[WorkerState]) -> Iterator[Metric]:
    """Yield the metrics that exist for every worker, connected or not."""
    yield from gauge(
        "penstock_worker_up",
        "1 if messages of the worker arrive, 0 if the worker is down or silent.",
        ["worker"],
        (([each.worker], each.up) for each in workers),
    )
    yield from gauge(
        "penstock_requests_running",
        "Number of running sequences of the worker.",
        ["worker", "role"],
        (([each.worker, each.role], each.numbers.load.running) for each in workers if each.numbers),
    )


def worker_stats_metrics(workers: Sequence[tuple[str, WorkerStats]]) -> Iterator[Metric]:
    """Yield the metrics from the load reports of the workers."""
    yield from gauge(
        "penstock_kv_blocks",
        "Number of KV blocks of the worker by state; the states sum to all blocks.",
        ["worker", "state"],
        (([name, kind], count) for name, each in workers for kind, count in each.blocks.items()),
    )
    yield from gauge(
        "penstock_kv_waste_ratio",
        "Share of the token slots in used KV blocks that are empty.",
        ["worker"],
        (([name], each.kv_waste) for name, each in workers),
    )
    yield from gauge(
        "penstock_expert_imbalance_ratio",
        "Recent load of the busiest expert of an MoE model relative to the mean.",
        ["worker"],
        (
            ([name], each.load.expert_imbalance)
            for name, each in workers
            # 0 means that the imbalance is unknown, or that the model has no experts.
            if each.load.expert_imbalance
        ),
    )
    counters: Sequence[tuple[str, str, Callable[[WorkerStats], int]]] = (
        (
            "prompt_tokens",
            "Total of prompt tokens, computed or cached.",
            lambda each: each.prompt_tokens,
        ),
        (
            "prefix_hit_tokens",
            "Total of prompt tokens found in the prefix cache.",
            lambda each: each.load.prompt_tokens_cached,
        ),
        (
            "preemptions",
            "Total of sequences preempted for lack of KV blocks.",
            lambda each: each.load.preemptions,
        ),
    )
    for name, about, number in counters:
        yield from counter(
            f"penstock_{name}",
            about,
            ["worker"],
            (([worker], number(each)) for worker, each in workers),
        )
    yield from histogram(
        "penstock_step_seconds",
        "Duration of engine steps.",
        ["worker"],
        (
            ([name], (each.steps.bounds, each.steps.counts, each.steps.seconds))
            for name, each in workers
        ),
    )
    yield from histogram(
        "penstock_step_tokens",
        "Tokens per engine step: computed prompt tokens and generated tokens.",
        ["worker"],
        (([name], each.step_tokens) for name, each in workers if each.step_token_bounds),
    )


def transfer_metrics(state: ClusterState, metrics: RequestMetrics) -> Iterator[Metric]:
    """Yield the metrics of KV transfers, prompt placement and failovers."""
    yield from counter(
        "penstock_kv_transfer_bytes",
        "Bytes of KV transfers.",
        [],
        [([], metrics.kv_transfer_bytes)],
    )
    yield from counter(
        "penstock_kv_transfers_failed",
        "Total of failed KV transfers; their prompts were recomputed.",
        [],
        [([], state.kv_transfers_failed)],
    )
    yield from counter(
        "penstock_prefill_placements",
        "Total of prompts by where they are computed (apart: on a prefill worker; together: on "
        "the decode worker) and the main reason.",
        ["where", "reason"],
        ((str(each).split(": "), state.placed.get(str(each), 0)) for each in ALL_DECISIONS),
    )
    yield from gauge(
        "penstock_kv_transfer_fixed_seconds",
        "Expected fixed cost of a KV transfer, without the time per byte.",
        [],
        [([], state.kv_transfer_cost.fixed_seconds)],
    )
    yield from gauge(
        "penstock_kv_transfer_bytes_per_second",
        "Expected bandwidth of KV transfers.",
        [],
        [([], state.kv_transfer_cost.bytes_per_second)],
    )
    yield from counter(
        "penstock_failovers",
        "Total of requests restarted on another worker because theirs was lost.",
        [],
        [([], state.failovers)],
    )


def router_metrics(state: ClusterState, metrics: RequestMetrics) -> Iterator[Metric]:
    """Yield the metrics of this router's own requests."""
    histograms = (
        ("time_to_first_token_seconds", "Time from arrival to first token.", metrics.first_token),
        (
            "time_per_output_token_seconds",
            "Mean time between the tokens of an answer.",
            metrics.per_token,
        ),
        (
            "inter_token_seconds",
            "Time from each token of an answer to the next.",
            metrics.between_tokens,
        ),
        ("request_seconds", "Time from arrival to end of answer.", metrics.request),
        ("queue_seconds", "Time from arrival to submission to a worker.", metrics.queue),
        ("prefill_seconds", "Time from submission to first token.", metrics.prefill),
        ("decode_seconds", "Time from first to last token.", metrics.decode),
        ("prompt_length_tokens", "Tokens per answered prompt.", metrics.prompt_lengths),
        ("answer_length_tokens", "Tokens per answer.", metrics.answer_lengths),
        ("preemptions_per_request", "Preemptions of each finished request.", metrics.preemptions),
        ("kv_transfer_seconds", "Duration of KV transfers.", metrics.kv_transfer),
    )
    for name, about, each in histograms:
        yield from histogram(
            f"penstock_{name}", about, [], [([], (each.bounds, each.counts, each.total))]
        )
    yield from transfer_metrics(state, metrics)
    yield from counter(
        "penstock_requests_finished",
        "Total of finished requests by reason.",
        ["reason"],
        (([reason], count) for reason, count in metrics.finished.items()),
    )
    yield from counter(
        "penstock_malformed_requests",
        "Total of requests that are not valid HTTP.",
        [],
        [([], metrics.malformed_requests)],
    )
    yield from counter(
        "penstock_connections_refused",
        "Total of refused connections by port, because too many were open.",
        ["port"],
        (([port.lower()], each.total) for port, each in metrics.refused_connections.items()),
    )


def tenant_metrics(state: ClusterState) -> Iterator[Metric]:
    """Yield the metrics of this router's tenants."""
    yield from counter(
        "penstock_generated_tokens",
        "Total of generated tokens by tenant; key-N is the N-th configured API key.",
        ["tenant"],
        (([name], count) for name, count in state.generated.items()),
    )
    yield from counter(
        "penstock_prompt_tokens_by_tenant",
        "Total of prompt tokens of accepted requests by tenant; see generated tokens.",
        ["tenant"],
        (([name], count) for name, count in state.prompt_tokens_by_tenant.items()),
    )


def gauge(name: str, about: str, labels: Sequence[str], samples: Samples) -> Iterator[Metric]:
    """Yield a gauge in fragments, each with some of its samples. `about` is its help text."""
    return _fragments(lambda: GaugeMetricFamily(name, about, labels=labels), samples)


def counter(name: str, about: str, labels: Sequence[str], samples: Samples) -> Iterator[Metric]:
    """Yield a counter in fragments, each with some of its samples. `about` is its help text."""
    return _fragments(lambda: CounterMetricFamily(name, about, labels=labels), samples)


def histogram(
    name: str,
    about: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], HistogramSample]],
) -> Iterator[Metric]:
    """Yield a histogram in fragments, each with some of its samples. `about` is its help text."""
    buckets = (
        (values, _buckets(bounds, counts), total) for values, (bounds, counts, total) in samples
    )
    return _fragments(lambda: HistogramMetricFamily(name, about, labels=labels), buckets)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    ends = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return list(zip(ends, accumulate(counts), strict=True))


def _fragments(
    new_fragment: Callable[[], MetricFamily], samples: Iterable[tuple[Any, ...]]
) -> Iterator[Metric]:
    """Yield a metric in fragments of `SAMPLES_PER_FRAGMENT` samples or a few more.

    The last fragment may be smaller; a metric without samples has one empty fragment.

    Args:
        new_fragment: returns a fragment without samples.
        samples: arguments of `add_metric` of the fragments.
    """
    fragment = new_fragment()
    for sample in samples:
        if len(fragment.samples) >= SAMPLES_PER_FRAGMENT:
            yield fragment
            fragment = new_fragment()
        fragment.add_metric(*sample)
    yield fragment
