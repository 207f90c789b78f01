"""Names of the metrics that dashboards and alerts use."""

HISTOGRAMS = (
    "step_seconds",
    "step_tokens",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "inter_token_seconds",
    "request_seconds",
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
    "prompt_length_tokens",
    "answer_length_tokens",
    "preemptions_per_request",
    "kv_transfer_seconds",
)
PLAIN = (
    "requests_waiting",
    "tokens_waiting",
    "requests_running",
    "kv_blocks",
    "kv_waste_ratio",
    "prefix_hit_tokens_total",
    "prompt_tokens_total",
    "kv_transfer_bytes_total",
    "kv_transfer_bytes_per_second",
    "kv_transfer_fixed_seconds",
    "kv_transfers_failed_total",
    "prefill_placements_total",
    "preemptions_total",
    "requests_finished_total",
    "malformed_requests_total",
    "connections_refused_total",
    "failovers_total",
    "generated_tokens_total",
    "prompt_tokens_by_tenant_total",
    "workers_ready",
    "worker_up",
    "router_up",
)
POOL_COUNTS = ("ready", "desired", "pending", "given_up", "required")
SIZES = {f"penstock_workers_{name}" for name in POOL_COUNTS[1:]}
"""Metrics that a router exports once a supervisor sizes its pools."""
EXPERTS = {"penstock_expert_imbalance_ratio"}
"""Metrics that a router exports for models with expert parallelism."""
SERIES = {f"penstock_{name}" for name in PLAIN} | {
    f"penstock_{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")
}
