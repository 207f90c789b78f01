"""What a cluster's processes are started with, from its specification."""

from pathlib import Path

from penstock.cluster.placement import WorkerPlace
from penstock.cluster.spec import ClusterSpec
from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig


def router_config(spec: ClusterSpec, model: Path, token: str) -> RouterConfig:
    """What the router of a cluster is started with."""
    return RouterConfig(
        model=model,
        served_name=spec.router.model_name or model.name,
        host=spec.router.host,
        http_port=spec.router.http_port,
        grpc_port=spec.router.grpc_port,
        api_keys=spec.router.api_keys,
        worker_token=token,
        max_model_len=spec.engine.max_model_len,
        max_queued_requests=spec.router.max_queued,
        vllm_metrics=spec.router.vllm_metrics,
        wakes_workers=spec.pools.may_be_empty,
    )


def worker_config(spec: ClusterSpec, model: Path, token: str, where: WorkerPlace) -> WorkerConfig:
    """What one worker of a cluster is started with; its host is known where it runs."""
    return WorkerConfig(
        name=where.name,
        model=model,
        role=where.role,
        token=token,
        block_size=spec.engine.block_size,
        kv_cache_mib=spec.engine.kv_cache_mib,
        max_sequences=spec.engine.max_sequences,
        max_batched_tokens=spec.engine.max_batched_tokens,
        max_model_len=spec.engine.max_model_len,
        threads=where.threads,
        dtype=spec.engine.dtype,
        quantization=spec.engine.quantization,
        deterministic=spec.engine.deterministic,
        device="cuda" if where.gpus else "cpu",
        tp=where.tp,
        pp=where.pp,
        ep=where.ep,
    )
