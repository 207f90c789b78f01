"""Build the configurations of a cluster's routers and workers from its specification."""

from pathlib import Path

from penstock.cluster.placement.placement import WorkerPlacement
from penstock.cluster.spec.spec import ClusterSpec, PoolSpec
from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig


def router_config(spec: ClusterSpec, model: Path, token: str, index: int = 0) -> RouterConfig:
    """Return the configuration of router number `index`."""
    http_port, grpc_port = spec.ports(index)
    return RouterConfig(
        model=model,
        served_name=spec.model_name,
        name=f"router-{index}",
        host=spec.router.host,
        http_port=http_port,
        grpc_port=grpc_port,
        api_keys=spec.router.api_keys,
        worker_token=token,
        max_model_len=spec.model.max_model_len,
        max_queued_requests=spec.router.max_queued,
        ttft_slo_seconds=spec.engine.ttft_slo_seconds,
        vllm_metrics=spec.router.vllm_metrics,
        waits_for_both=bool(spec.pools.prefill.least and spec.pools.decode.least),
        wakes_workers=spec.pools.may_be_empty,
        worker_timeout_seconds=spec.router.worker_timeout_seconds,
        step_timeout_seconds=spec.engine.step_timeout_seconds,
    )


def worker_config(
    spec: ClusterSpec, model: Path, token: str, placement: WorkerPlacement
) -> WorkerConfig:
    """Return the configuration of the worker at `placement`.

    All sizes are those of the worker's initial pool, even after the worker's role has changed.
    `host` is set later, on the node where the worker runs.
    """
    pool: PoolSpec = getattr(spec.pools, placement.role)
    return WorkerConfig(
        name=placement.name,
        model=model,
        role=placement.role,
        token=token,
        block_size=pool.block_size,
        kv_cache_mib=pool.kv_cache_mib,
        max_sequences=pool.max_sequences,
        max_batched_tokens=pool.max_batched_tokens,
        max_model_len=spec.model.max_model_len,
        threads=placement.threads,
        dtype=spec.model.dtype,
        quantization=spec.model.quantization,
        kv_cache_dtype=spec.model.kv_cache_dtype,
        deterministic=spec.model.deterministic,
        canary_seconds=spec.engine.canary_seconds,
        step_timeout_seconds=spec.engine.step_timeout_seconds,
        crash_dump_dir=(
            None if spec.engine.crash_dump_dir is None else Path(spec.engine.crash_dump_dir)
        ),
        device="cuda" if placement.gpus else "cpu",
        tp=placement.tp,
        pp=placement.pp,
        ep=placement.ep,
    )
