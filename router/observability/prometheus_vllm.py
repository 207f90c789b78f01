"""The metrics of `prometheus` under vLLM's names and labels, for existing vLLM dashboards.

The label `engine` is a worker's name or, for metrics of the router, the router's name.
Metrics that vLLM has renamed are exported under both names. Metrics of features that Penstock does
not have (speculation, adapters, swapping) are left out.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from prometheus_client.core import Metric

from penstock.router.observability.prometheus import counter, gauge, histogram
from penstock.router.observability.request_metrics import RequestMetrics
from penstock.router.observability.snapshot import ClusterState, WorkerStats

LABELS = ("model_name", "engine")
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
KV_NAMES = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
INTER_TOKEN_NAMES = ("inter_token_latency_seconds", "time_per_output_token_seconds")


def vllm_metrics(router: str, state: ClusterState, metrics: RequestMetrics) -> Iterator[Metric]:
    """Return all metrics under vLLM's names, in fragments as in `prometheus.all_metrics`.

    `router` is the name of this router.
    """
    reported = [(each.worker, each.numbers) for each in state.workers if each.numbers is not None]
    own = list(_router_metrics((state.model, router), state, metrics))
    return chain(own, _worker_metrics(router, state, reported))


def _worker_metrics(
    router: str, state: ClusterState, stats: Sequence[tuple[str, WorkerStats]]
) -> Iterator[Metric]:
    named = [((state.model, worker), numbers) for worker, numbers in stats]
    yield from gauge(
        "vllm:num_requests_running",
        "Number of running sequences, without those that wait for a KV transfer.",
        LABELS,
        ((labels, each.load.running - each.load.receiving) for labels, each in named),
    )
    yield from _waiting_metrics(router, state, named)
    for name in KV_NAMES:
        yield from gauge(
            f"vllm:{name}",
            "Share of KV blocks in use, from 0 to 1.",
            LABELS,
            ((labels, each.load.kv_usage) for labels, each in named),
        )
    yield from gauge(
        "vllm:cache_config_info",
        "Always 1; the labels are the sizes of the KV cache.",
        (*LABELS, "block_size", "num_gpu_blocks"),
        (((*labels, str(each.block_size), str(each.num_blocks)), 1.0) for labels, each in named),
    )
    counters = (
        ("prefix_cache_queries", [each.prompt_tokens for _, each in named]),
        ("prefix_cache_hits", [each.load.prompt_tokens_cached for _, each in named]),
        ("num_preemptions", [each.load.preemptions for _, each in named]),
    )
    for name, values in counters:
        samples = zip((labels for labels, _ in named), values, strict=True)
        yield from counter(f"vllm:{name}", "Same as Penstock's own, by worker.", LABELS, samples)
    yield from histogram(
        "vllm:iteration_tokens_total",
        "Tokens per engine step: computed prompt tokens and generated tokens.",
        LABELS,
        ((labels, each.step_tokens) for labels, each in named if each.step_token_bounds),
    )


def _waiting_metrics(
    router: str, state: ClusterState, named: Sequence[tuple[Sequence[str], WorkerStats]]
) -> Iterator[Metric]:
    """Yield the numbers of waiting requests: in total, and by reason."""
    own: Sequence[str] = (state.model, router)
    waiting = [
        (own, state.waiting - state.held_back, state.held_back),
        *((labels, each.load.queued, each.load.deferred) for labels, each in named),
    ]
    yield from gauge(
        "vllm:num_requests_waiting",
        "Number of requests that wait at the worker or the router.",
        LABELS,
        ((labels, capacity + deferred) for labels, capacity, deferred in waiting),
    )
    yield from gauge(
        "vllm:num_requests_waiting_by_reason",
        "Number of requests that wait for room (capacity) or for something else (deferred).",
        (*LABELS, "reason"),
        (
            ((*labels, reason), count)
            for labels, *counts in waiting
            for reason, count in zip(("capacity", "deferred"), counts, strict=True)
        ),
    )


def _router_metrics(
    labels: Sequence[str], state: ClusterState, metrics: RequestMetrics
) -> Iterator[Metric]:
    yield from counter(
        "vllm:prompt_tokens", "Prompt tokens.", LABELS, [(labels, state.prompt_tokens)]
    )
    generated = sum(state.generated.values())
    yield from counter("vllm:generation_tokens", "Generated tokens.", LABELS, [(labels, generated)])
    yield from counter(
        "vllm:request_success",
        "Total of finished requests by reason.",
        (*LABELS, "finished_reason"),
        (((*labels, theirs), state.finished[ours]) for ours, theirs in REASONS.items()),
    )
    histograms = (
        ("time_to_first_token_seconds", metrics.first_token),
        *((name, metrics.between_tokens) for name in INTER_TOKEN_NAMES),
        ("request_time_per_output_token_seconds", metrics.per_token),
        ("e2e_request_latency_seconds", metrics.request),
        ("request_queue_time_seconds", metrics.queue),
        ("request_prefill_time_seconds", metrics.prefill),
        ("request_decode_time_seconds", metrics.decode),
        ("request_inference_time_seconds", metrics.inference),
        ("request_params_max_tokens", metrics.max_tokens),
        ("request_params_n", metrics.choices),
        ("request_prompt_tokens", metrics.prompt_lengths),
        ("request_generation_tokens", metrics.answer_lengths),
        ("request_num_preemptions", metrics.preemptions),
    )
    for name, each in histograms:
        distribution = (each.bounds, each.counts, each.total)
        yield from histogram(f"vllm:{name}", "Same as in vLLM.", LABELS, [(labels, distribution)])
